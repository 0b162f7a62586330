"""Models on two ranks of one thread each, beside one process of two threads.

    python -m benchmarks.parallel [--sections rates reduce broadcast memory handoff] [--models 100M 0.6B]
                                  [--dtypes float32 bfloat16] [--repeats 3] [--markdown FILE]

    ahead      time of decodes on two ranks, 1, 8 and 32 at once, where the next step is scheduled while one runs, as a
               share of that where it is not
    rates      tokens per second of decodes, 1 and 8 at once after 128 tokens, and of a prompt of 512 tokens. The sides
               take turns, and ratios are of figures of the same turn
    reduce     microseconds of one sum over two ranks, in shared memory and over gloo, alone and beside two processes
               that do nothing but compute
    broadcast  from before a step of 64 decodes is encoded until a rank that slept has decoded it; beside it, what the
               kernel takes to wake both ranks for one byte; alone and beside two processes that compute
    memory     resident memory of each rank, shared pages by their share, beside its shard, its KV cache and what an
               engine takes
    handoff    between engines of several degrees, which move the same bytes

All figures are medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.engine import make_random_model
from benchmarks.kv.degrees import measure_degrees
from benchmarks.page import describe_torch_machine
from benchmarks.parallel.side import rank_memory
from common.demo_model import demo_model_path
from common.engine.contract.step import SchedulerOutput
from common.engine.executor.multiproc.channel import Channel
from common.engine.executor.multiproc.protocol import Close, Step, encode
from common.engine.executor.multiproc.ring import RingWriter
from common.types import RequestId

KINDS = ("one", "shared", "gloo")
AHEAD_TOKENS = 80  # of 32 requests that fit the KV cache
DECODE_PROMPT_TOKENS, DECODE_TOKENS, PREFILL_TOKENS = 128, 24, 512
SIZES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "32 MiB": 32 << 20}
NUM_STEPS = 1000
ENGINE_MIB = 426
MIB = 1 << 20
_STEP_PAUSE_S = 0.002
_TIMEOUT_S = 60.0
_ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}  # as `baton serve` does
_Rows = Iterator[str]


class _Side:
    """A process with an engine."""

    def __init__(self, directory: Path, dtype: str, kind: str) -> None:
        command = [sys.executable, "-m", "benchmarks.parallel.side", str(directory), dtype, kind]
        self._process = subprocess.Popen(
            command, env=_ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._answer()

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, list[float]]:
        """A Generation."""
        assert self._process.stdin is not None
        print(json.dumps({"prompts": prompts, "num_tokens": num_tokens}), file=self._process.stdin, flush=True)
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(_TIMEOUT_S)

    def _answer(self) -> dict[str, list[float]]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("an engine has died")
        answer: dict[str, list[float]] = json.loads(line)
        return answer


def rates(args: argparse.Namespace, scratch: Path) -> _Rows:
    """Rows of tokens per second."""
    yield "| model | type | measure | one process | shared memory | gloo | shared / one | gloo / one |"
    yield "|---|---|---|---|---|---|---|---|"
    for model in args.models:
        directory = make_random_model(scratch, model)
        for dtype in args.dtypes:
            with contextlib.ExitStack() as stack:
                sides = {}
                for kind in KINDS:
                    sides[kind] = _Side(directory, dtype, kind)
                    stack.callback(sides[kind].close)
                for measure, num_prompts in (("decode, batch 1", 1), ("decode, batch 8", 8), ("prefill", 0)):
                    found = _in_turn(sides, num_prompts, args.repeats)
                    medians = [f"{statistics.median(found[kind]):.4g}" for kind in KINDS]
                    ratios = [f"{_ratio(found[kind], found['one']):.2f}" for kind in KINDS[1:]]
                    yield " | ".join([f"| {model}", dtype, measure, *medians, *ratios]) + " |"


def _in_turn(sides: dict[str, _Side], num_prompts: int, repeats: int) -> dict[str, list[float]]:
    """Tokens per second on each side; `num_prompts` that decode, 0: of a prompt."""
    found: dict[str, list[float]] = {kind: [] for kind in sides}
    chance = random.Random(num_prompts)
    for repeat in range(repeats + 1):
        length = DECODE_PROMPT_TOKENS if num_prompts else PREFILL_TOKENS
        prompts = [[chance.randrange(3, 30_000) for _ in range(length)] for _ in range(max(1, num_prompts))]
        for kind in list(sides) if repeat % 2 else list(sides)[::-1]:
            generation = sides[kind].generate(prompts, DECODE_TOKENS if num_prompts and repeat else 2)
            if not repeat:
                continue
            if num_prompts:
                found[kind].append(1000 * num_prompts / statistics.median(generation["gaps_ms"]))
            else:
                gap_s = statistics.median(generation["gaps_ms"]) / 1000  # of the second token
                found[kind].append(PREFILL_TOKENS / (generation["seconds"] - gap_s))  # type: ignore[operator]
    return found


def ahead(args: argparse.Namespace, scratch: Path) -> _Rows:
    """Rows of shares."""
    yield "| model | decodes | median gap | all gaps |"
    yield "|---|---|---|---|"
    directories = {"demo": demo_model_path(), "100M": make_random_model(scratch, "100M")}
    for model, directory in directories.items():
        with contextlib.ExitStack() as stack:
            sides = [_Side(directory, "float32", kind) for kind in ("shared", "in turn")]
            for side in sides:
                stack.callback(side.close)
            for num_prompts in (1, 8, 32):
                medians, sums = [], []
                for repeat in range(2 * args.repeats):
                    prompts = [[5 + repeat, 6 + number, *[7] * 30] for number in range(num_prompts)]
                    gaps = {}
                    for side in sides[:: 1 if repeat % 2 else -1]:
                        gaps[side] = side.generate(prompts, AHEAD_TOKENS)["gaps_ms"]
                    own, others = (gaps[side] for side in sides)
                    medians.append(statistics.median(own) / statistics.median(others))
                    sums.append(sum(own) / sum(others))
                yield f"| {model} | {num_prompts} | {statistics.median(medians):.2f} | {statistics.median(sums):.2f} |"


def _ratio(own: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(mine / its for mine, its in zip(own, others, strict=True))


def reduce(_: argparse.Namespace, scratch: Path) -> _Rows:
    """Rows of microseconds."""
    yield "| size | shared memory, us | gloo, us | beside load: shared memory, us | gloo, us |"
    yield "|---|---|---|---|---|"
    commands = [_peer("reduce", str(rank), "2", f"{scratch}/store") for rank in range(2)]
    with contextlib.ExitStack() as stack:
        ranks = [
            stack.enter_context(subprocess.Popen(each, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
            for each in commands
        ]

        def measure(num_bytes: int) -> list[float]:
            for rank in ranks:
                assert rank.stdin is not None
                print(num_bytes, file=rank.stdin, flush=True)
            answers = [rank.stdout.readline() for rank in ranks if rank.stdout is not None]
            return [max(map(float, each)) for each in zip(*(answer.split() for answer in answers), strict=True)]

        for name, num_bytes in SIZES.items():
            idle = measure(num_bytes)
            with _load():
                loaded = measure(num_bytes)
            yield f"| {name} | " + " | ".join(f"{us:.0f}" for us in (*idle, *loaded)) + " |"


@contextlib.contextmanager
def _load() -> Iterator[None]:
    """Two processes that compute."""
    spinning = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.wait()


def broadcast(_: argparse.Namespace, __: Path) -> _Rows:
    """Rows of microseconds."""
    yield "| message, to the later of two ranks | bytes | p50, us | p99, us | beside load: p50, us | p99, us |"
    yield "|---|---|---|---|---|---|"
    ids = [RequestId(f"request-{number:032x}") for number in range(64)]
    step = Step(SchedulerOutput([], {ids[0]: [[7]]}, dict.fromkeys(ids, 1), 64))
    size = len(encode(step))
    pairs = [socket.socketpair() for _ in range(2)]
    channels = [Channel(own) for own, _ in pairs]
    ring = RingWriter(channels, _TIMEOUT_S)
    readers = []
    for number, (_, others) in enumerate(pairs):
        descriptors = ring.descriptors(number)
        command = _peer("read", *map(str, descriptors))
        readers.append(subprocess.Popen(command, stdin=others.fileno(), pass_fds=descriptors))
        others.close()

    def measure(send: Callable[[], None]) -> list[float]:
        """p50 and p99."""
        seconds = []
        for _ in range(NUM_STEPS + 1):
            began = time.monotonic()
            send()
            read = [struct.unpack("=d", channel.receive())[0] for channel in channels]
            seconds.append(max(read) - began)
            time.sleep(_STEP_PAUSE_S)
        seconds = sorted(seconds[1:])  # the first waits for the readers to start
        return [seconds[int(share * NUM_STEPS)] * 1e6 for share in (0.5, 0.99)]

    def send_byte() -> None:
        for channel in channels:
            channel.send(b"0")

    for name, num_bytes, send in (
        ("a step of 64 decodes", size, lambda: ring.write(encode(step))),
        ("one byte over a socket", 1, send_byte),
    ):
        if send is send_byte:
            ring.write(encode(Close()))
        idle = measure(send)
        with _load():
            loaded = measure(send)
        yield f"| {name} | {num_bytes} | " + " | ".join(f"{us:.0f}" for us in (*idle, *loaded)) + " |"
    for channel in channels:
        channel.close()
    for reader in readers:
        reader.wait(_TIMEOUT_S)
    ring.close()


def _peer(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "benchmarks.parallel.peer", *arguments]


def memory(args: argparse.Namespace, scratch: Path) -> _Rows:
    """Rows of MiB."""
    yield "| model | type | rank | PSS, MiB | half of the weights | KV cache | beside these |"
    yield "|---|---|---|---|---|---|---|"
    for model in args.models:
        directory = make_random_model(scratch, model)
        size = sum(each.stat().st_size for each in directory.glob("*.safetensors"))
        own = json.loads((directory / "config.json").read_text())["dtype"]
        for dtype in args.dtypes:
            weights = size * getattr(torch, dtype).itemsize // getattr(torch, own).itemsize / 2
            for rank, used in enumerate(rank_memory(str(directory), dtype)):
                rest = (used.pss - weights - used.kv) / MIB
                cells = f"{used.pss / MIB:.0f} | {weights / MIB:.0f} | {used.kv / MIB:.0f} | {rest:.0f}"
                yield f"| {model} | {dtype} | {rank} | {cells} of {ENGINE_MIB} |"


def handoff(args: argparse.Namespace, _: Path) -> _Rows:
    """Rows of milliseconds."""
    yield "| connector | degrees | MiB | ms | / 1 -> 1 |"
    yield "|---|---|---|---|---|"
    for connector in ("shared-storage", "redis", "nixl"):
        first, *others = measure_degrees(connector, ((1, 1), (2, 1), (1, 2)), repeats=3 * args.repeats)
        for result in (first, *others):
            degrees = f"{result.num_producer_ranks} -> {result.num_consumer_ranks}"
            ratio = _ratio(result.seconds, first.seconds)
            size = f"{result.num_bytes / MIB:.0f}"
            yield f"| {connector} | {degrees} | {size} | {1e3 * result.median_s:.1f} | {ratio:.2f} |"


SECTIONS: dict[str, tuple[str, Callable[[argparse.Namespace, Path], _Rows]]] = {
    "rates": ("Tokens per second", rates),
    "ahead": ("Running ahead", ahead),
    "reduce": ("One sum over two ranks", reduce),
    "broadcast": ("From the driver to a rank", broadcast),
    "memory": ("Memory of a rank", memory),
    "handoff": ("Handoffs between degrees", handoff),
}


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.parallel", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--models", nargs="+", choices=["100M", "0.6B"], default=["100M", "0.6B"])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    args = parser.parse_args()
    machine = describe_torch_machine() | {"threads": "2 in all"}
    lines = ["# Models on several ranks", "", "`python -m benchmarks.parallel`; see its `--help`.", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items()]
    with tempfile.TemporaryDirectory() as scratch:
        for section in args.sections:
            title, table = SECTIONS[section]
            lines += ["", f"## {title}", ""]
            for row in table(args, Path(scratch)):
                print(row, flush=True)
                lines.append(row)
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

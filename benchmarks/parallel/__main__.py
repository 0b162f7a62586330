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
import functools
import json
import random
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.command import make_parser
from benchmarks.harness.figures import in_turn, ratio
from benchmarks.harness.models import make_random_model
from benchmarks.harness.processes import Child
from benchmarks.harness.report import Page, describe_torch_machine, row, table
from benchmarks.kv.degrees import measure_degrees
from benchmarks.parallel.side import rank_memory
from common.demo_model import demo_model_path
from common.engine.contract.step import SchedulerOutput
from common.engine.executor.multiproc.channel import Channel
from common.engine.executor.multiproc.protocol import Close, Step, encode
from common.engine.executor.multiproc.ring import RingWriter
from common.types import RequestId

KINDS = ("one", "shared")
AHEAD_TOKENS = 80  # of 32 requests that fit the KV cache
DECODE_PROMPT_TOKENS, DECODE_TOKENS, PREFILL_TOKENS = 128, 24, 512
SIZES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": 1 << 20, "32 MiB": 32 << 20}
NUM_STEPS = 1000
ENGINE_MIB = 426
MIB = 1 << 20
_STEP_PAUSE_S = 0.002
_TIMEOUT_S = 60.0
_Rows = Iterator[str]


@contextlib.contextmanager
def _sides(directory: Path, dtype: str, kinds: Sequence[str]) -> Iterator[dict[str, Child]]:
    """Processes with an engine of each kind."""
    variables = {"OMP_WAIT_POLICY": "PASSIVE"}  # as engines do
    with contextlib.ExitStack() as stack:
        sides = {}
        for kind in kinds:
            command = ("-m", "benchmarks.parallel.side", str(directory), dtype, kind)
            sides[kind] = stack.enter_context(Child(*command, variables=variables, ends_with_input=True))
            sides[kind].read_line()
        yield sides


def rates(args: argparse.Namespace, scratch: Path) -> _Rows:
    """Rows of tokens per second."""
    yield from table("model | type | measure | one process | two ranks | two / one")
    for model in args.models:
        directory = make_random_model(scratch, model)
        for dtype in args.dtypes:
            with _sides(directory, dtype, KINDS) as sides:
                for measure, num_prompts in (("decode, batch 1", 1), ("decode, batch 8", 8), ("prefill", 0)):
                    found = _rates(sides, num_prompts, args.repeats)
                    medians = [f"{statistics.median(found[kind]):.4g}" for kind in KINDS]
                    yield row(model, dtype, measure, *medians, f"{ratio(found['shared'], found['one']):.2f}")


def _rates(sides: dict[str, Child], num_prompts: int, repeats: int) -> dict[str, list[float]]:
    """Tokens per second on each side; `num_prompts` that decode, 0: of a prompt."""
    found: dict[str, list[float]] = {kind: [] for kind in sides}
    chance = random.Random(num_prompts)
    for repeat in range(repeats + 1):
        length = DECODE_PROMPT_TOKENS if num_prompts else PREFILL_TOKENS
        prompts = [[chance.randrange(3, 30_000) for _ in range(length)] for _ in range(max(1, num_prompts))]
        for kind, side in in_turn(sides.items(), repeat):
            generation = side.ask(prompts, DECODE_TOKENS if num_prompts and repeat else 2)
            if not repeat:
                continue
            gap_s = statistics.median(generation["gaps_ms"]) / 1000
            found[kind].append(num_prompts / gap_s if num_prompts else PREFILL_TOKENS / (generation["seconds"] - gap_s))
    return found


def ahead(args: argparse.Namespace, scratch: Path) -> _Rows:
    """Rows of shares."""
    yield from table("model | decodes | median gap | all gaps")
    directories = {"demo": demo_model_path(), "100M": make_random_model(scratch, "100M")}
    for model, directory in directories.items():
        with _sides(directory, "float32", ("shared", "in turn")) as sides:
            for num_prompts in (1, 8, 32):
                medians, sums = [], []
                for repeat in range(2 * args.repeats):
                    prompts = [[5 + repeat, 6 + number, *[7] * 30] for number in range(num_prompts)]
                    gaps = {
                        kind: side.ask(prompts, AHEAD_TOKENS)["gaps_ms"]
                        for kind, side in in_turn(sides.items(), repeat)
                    }
                    own, others = gaps["shared"], gaps["in turn"]
                    medians.append(statistics.median(own) / statistics.median(others))
                    sums.append(sum(own) / sum(others))
                yield row(model, num_prompts, f"{statistics.median(medians):.2f}", f"{statistics.median(sums):.2f}")


def reduce(_: argparse.Namespace, scratch: Path) -> _Rows:
    """Rows of microseconds."""
    yield from table("size | shared memory, us | gloo, us | beside load: shared memory, us | gloo, us")
    with contextlib.ExitStack() as stack:
        ranks = [stack.enter_context(_peer("reduce", str(rank), "2", f"{scratch}/store")) for rank in range(2)]

        def measure(num_bytes: int) -> list[float]:
            for rank in ranks:
                rank.write_line(str(num_bytes))
            return [max(map(float, each)) for each in zip(*(rank.read_line().split() for rank in ranks), strict=True)]

        for name, num_bytes in SIZES.items():
            yield row(name, *_microseconds(functools.partial(measure, num_bytes)))


def _microseconds(measure: Callable[[], list[float]]) -> Iterator[str]:
    """Yields figures of two measurements: one alone, and one beside load."""
    idle = measure()
    with _load():
        yield from (f"{us:.0f}" for us in (*idle, *measure()))


@contextlib.contextmanager
def _load() -> Iterator[None]:
    """Two processes that compute."""
    with Child("-c", "while True: pass"), Child("-c", "while True: pass"):
        yield


def broadcast(_: argparse.Namespace, __: Path) -> _Rows:
    """Rows of microseconds."""
    yield from table("message, to the later of two ranks | bytes | p50, us | p99, us | beside load: p50, us | p99, us")
    ids = [RequestId(f"request-{number:032x}") for number in range(64)]
    step = Step(SchedulerOutput([], {ids[0]: [[7]]}, dict.fromkeys(ids, 1), 64))
    pairs = [socket.socketpair() for _ in range(2)]
    channels = [Channel(own) for own, _ in pairs]
    ring = RingWriter(channels, _TIMEOUT_S)

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

    with contextlib.ExitStack() as readers:
        for number, (_own, others) in enumerate(pairs):
            descriptors = ring.descriptors(number)
            reader = _peer("read", *map(str, descriptors), stdin=others.fileno(), pass_fds=descriptors)
            readers.enter_context(reader)
            others.close()
        write_step = functools.partial(measure, lambda: ring.write(encode(step)))
        yield row("a step of 64 decodes", len(encode(step)), *_microseconds(write_step))
        ring.write(encode(Close()))
        yield row("one byte over a socket", 1, *_microseconds(functools.partial(measure, send_byte)))
        for channel in channels:
            channel.close()
    ring.close()


def _peer(*arguments: str, **options: Any) -> Child:
    return Child("-m", "benchmarks.parallel.peer", *arguments, ends_with_input=True, **options)


def memory(args: argparse.Namespace, scratch: Path) -> _Rows:
    """Rows of MiB."""
    yield from table("model | type | rank | PSS, MiB | half of the weights | KV cache | beside these")
    for model in args.models:
        directory = make_random_model(scratch, model)
        size = sum(each.stat().st_size for each in directory.glob("*.safetensors"))
        own = json.loads((directory / "config.json").read_text())["dtype"]
        for dtype in args.dtypes:
            weights = size * getattr(torch, dtype).itemsize // getattr(torch, own).itemsize / 2
            for rank, used in enumerate(rank_memory(str(directory), dtype)):
                rest = (used.pss - weights - used.kv) / MIB
                cells = [f"{each / MIB:.0f}" for each in (used.pss, weights, used.kv)]
                yield row(model, dtype, rank, *cells, f"{rest:.0f} of {ENGINE_MIB}")


def handoff(args: argparse.Namespace, _: Path) -> _Rows:
    """Rows of milliseconds."""
    yield from table("connector | degrees | MiB | ms | GB/s | / 1 -> 1")
    for connector in ("shared-storage", "redis", "nixl"):
        results = measure_degrees(connector, repeats=3 * args.repeats)
        for found in results:
            degrees = f"{found.num_producer_ranks} -> {found.num_consumer_ranks}"
            rate = f"{found.num_bytes / found.median_s / 1e9:.2f}"
            times = f"{ratio(found.seconds, results[0].seconds):.2f}"
            yield row(connector, degrees, f"{found.num_bytes / MIB:.0f}", f"{1e3 * found.median_s:.1f}", rate, times)


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
    parser = make_parser("benchmarks.parallel", __doc__, repeats=3)
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--models", nargs="+", choices=["100M", "0.6B"], default=["100M", "0.6B"])
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    args = parser.parse_args()
    machine = describe_torch_machine() | {"threads": "2 in all"}
    page = Page("Models on several ranks", "`python -m benchmarks.parallel`; see its `--help`.", machine)
    with tempfile.TemporaryDirectory() as scratch:
        for section in args.sections:
            title, lines = SECTIONS[section]
            page.section(title)
            for line in lines(args, Path(scratch)):
                page.add(line)
    page.write(args.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Resident memory of engine processes: over many requests of random shapes, with and without bounded kernel caches; and
in rounds of what a client may make an engine hold.

    python -m benchmarks.memory [--random-model] [--dtype bfloat16] [--requests 20000] [--max-prompt-tokens 400]
                                 [--max-output-tokens 8] [--max-in-flight 16] [--alone]
    python -m benchmarks.memory --rounds 12 [--random-model] [--dtype bfloat16]

Two engine processes serve the same requests, a slice each in turn, so that both see the same load of the machine:
"bounded" as it comes, "unbounded" with the kernel libraries' own capacities. Prompts have 1 to
`--max-prompt-tokens` random tokens, answers 1 to `--max-output-tokens`, and 1 to `--max-in-flight` requests are in
flight, another number for each slice. The KV cache is so small that all of it is written before the first row.
With `--alone` there is only the bounded engine, in half the time.

With `--rounds` there is only the bounded engine, and a batch that is as full as it can be. Each round has 256 requests
with 20 log probabilities, 256 with tables of biases, allowed tokens and bad words that are as large as may be, log
probabilities of long prompts, 300 grammars that are new, of both libraries, and a few that grow with each token.
Grammars are in processes of their own, whose memory is counted by itself, pages shared among them by their share.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import os
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import psutil

from benchmarks.engine import make_100m_model
from benchmarks.page import describe_torch_machine
from common.demo_model import demo_model_path
from common.engine.client import AsyncMPClient
from common.engine.config import CacheConfig, EngineConfig, ModelConfig
from common.engine.devices.cpu.kernel_cache import KERNEL_CACHE_VARIABLES
from common.engine.messages import AddRequest, EngineCoreOutputs
from common.types import Constraint, RequestId, SamplingParams
from common.types.parameters import parameters_of

UNBOUNDED = dict.fromkeys(KERNEL_CACHE_VARIABLES, "1024")  # what the libraries take without a setting
SLICE = 100  # requests
ROW = 500  # requests between two rows of the table
NUM_BLOCKS = 1025
NUM_BLOCKS_OF_ROUNDS = 4097  # so that the batch can be full
MIB = 1 << 20
BATCH = 256  # requests
VOCABULARY = 2000  # token ids that are used, which every model has
GRAMMARS, GRAMMARS_IN_FLIGHT = 300, 48  # of a round


@dataclass(slots=True)
class Engine:
    """One engine process, and what each slice of requests took it."""

    client: AsyncMPClient
    outputs: AsyncIterator[EngineCoreOutputs]
    process: psutil.Process
    wall_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)

    @property
    def rss_mib(self) -> float:
        """Resident memory now."""
        return self.process.memory_info().rss / MIB

    @property
    def peak_mib(self) -> float:
        """The most that was resident so far."""
        lines = Path(f"/proc/{self.process.pid}/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))

    @property
    def grammars_mib(self) -> float:
        """Memory of the processes that compile and follow grammars."""
        total = 0
        for process in self.process.children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += process.memory_full_info().pss
        return total / MIB

    async def serve(self, requests: list[AddRequest], in_flight: int) -> None:
        """Serve one slice, with `in_flight` requests at a time."""
        cpu_before, started = sum(self.process.cpu_times()[:2]), perf_counter()
        waiting = iter(requests)
        for request in itertools.islice(waiting, in_flight):
            self.client.add_request(request)
        num_finished = 0
        while num_finished < len(requests):
            for output in (await anext(self.outputs)).outputs:
                if output.finish_reason is not None:
                    num_finished += 1
                    if (request := next(waiting, None)) is not None:
                        self.client.add_request(request)
        self.wall_s.append(perf_counter() - started)
        self.cpu_s.append(sum(self.process.cpu_times()[:2]) - cpu_before)


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--random-model", action="store_true", help="a Qwen3 of 100M parameters, not the demo model")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each engine")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--max-prompt-tokens", type=int, default=400)
    parser.add_argument("--max-output-tokens", type=int, default=8)
    parser.add_argument("--max-in-flight", type=int, default=16)
    parser.add_argument("--alone", action="store_true", help="only the bounded engine")
    parser.add_argument("--rounds", type=int, help="rounds of what a client may make an engine hold, instead")
    args = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `baton serve` does
    print(" ".join(f"{key}: {value};" for key, value in describe_torch_machine().items()), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        model = make_100m_model(Path(scratch)) if args.random_model else demo_model_path()
        config = EngineConfig(
            model=ModelConfig(model=str(model), dtype=args.dtype, device="cpu", num_threads=args.threads),
            cache=CacheConfig(num_blocks=NUM_BLOCKS if args.rounds is None else NUM_BLOCKS_OF_ROUNDS),
        )
        asyncio.run(compare(config, args) if args.rounds is None else repeat_rounds(config, args.rounds))
    return 0


async def compare(config: EngineConfig, args: argparse.Namespace) -> None:
    """Both engines, or the bounded one alone, over the same requests."""
    engines = {"bounded": await start_engine(config, {})}
    if not args.alone:
        engines["unbounded"] = await start_engine(config, UNBOUNDED)
    print("requests  " + "".join(f" {f'MiB {name}':>14} {'tokens/s':>9}" for name in engines), flush=True)
    print(f"{0:>8}  " + "".join(f" {engine.rss_mib:>14.0f} {'':>9}" for engine in engines.values()), flush=True)
    generator = random.Random(0)
    tokens: list[int] = []
    for number in range(args.requests // SLICE):
        requests = make_requests(generator, number, args.max_prompt_tokens, args.max_output_tokens)
        in_flight = generator.randint(1, args.max_in_flight)
        tokens.append(sum(len(r.prompt_token_ids) + r.sampling.max_tokens for r in requests))
        for engine in list(engines.values())[:: 1 if number % 2 else -1]:
            await engine.serve(requests, in_flight)
        if (number + 1) * SLICE % ROW == 0:
            last = slice(-(ROW // SLICE), None)
            row = "".join(
                f" {engine.rss_mib:>14.0f} {sum(tokens[last]) / sum(engine.wall_s[last]):>9.0f}"
                for engine in engines.values()
            )
            print(f"{(number + 1) * SLICE:>8}  {row}", flush=True)
    if not args.alone:
        bounded, unbounded = engines.values()
        print("bounded / unbounded, tokens per second:    ", ratio(unbounded.wall_s, bounded.wall_s))
        print("bounded / unbounded, tokens per CPU second:", ratio(unbounded.cpu_s, bounded.cpu_s))
    await asyncio.gather(*(engine.client.close() for engine in engines.values()))


async def repeat_rounds(config: EngineConfig, num_rounds: int) -> None:
    """Rounds of requests that make the engine hold much, after all of its KV cache was written."""
    engine = await start_engine(config, {})
    generator = random.Random(0)
    await engine.serve([_request(generator, num_prompt_tokens=2000) for _ in range(40)], 4)
    print(f"{'round':>5} {'MiB engine':>11} {'at most':>8} {'MiB grammars':>13} {'at most':>8} {'s':>5}", flush=True)
    print(f"{0:>5} {engine.rss_mib:>11.0f} {engine.peak_mib:>8.0f} {engine.grammars_mib:>13.0f}", flush=True)
    for number in range(1, num_rounds + 1):
        started, most = perf_counter(), [0.0]
        watching = asyncio.create_task(_watch_grammars(engine, most))
        await engine.serve(_full_batches(generator), BATCH)
        await engine.serve(_grammars(generator, number), GRAMMARS_IN_FLIGHT)
        watching.cancel()
        grammars = f"{engine.grammars_mib:>13.0f} {most[0]:>8.0f}"
        took = perf_counter() - started
        print(f"{number:>5} {engine.rss_mib:>11.0f} {engine.peak_mib:>8.0f} {grammars} {took:>5.0f}", flush=True)
    await engine.client.close()


async def _watch_grammars(engine: Engine, most: list[float]) -> None:
    while True:
        most[0] = max(most[0], engine.grammars_mib)
        await asyncio.sleep(0.5)


def _full_batches(generator: random.Random) -> list[AddRequest]:
    """Requests of several kinds, one batch of each."""
    bounds = {name: field.parameter for name, field in parameters_of(SamplingParams).items()}
    biased = range(min(VOCABULARY, bounds["logit_bias"].max_entries or 0))
    words = bounds["bad_word_token_ids"]
    num_words, num_tokens = words.max_entries or 0, words.max_token_ids or 0
    requests = [_request(generator, num_logprobs=20, max_tokens=60) for _ in range(BATCH)]
    requests += [
        _request(
            generator,
            logit_bias={token_id: generator.uniform(-1, 1) for token_id in biased},
            allowed_token_ids=tuple(biased),
            bad_word_token_ids=tuple(
                tuple(generator.choices(range(VOCABULARY), k=num_tokens // num_words)) for _ in range(num_words)
            ),
        )
        for _ in range(BATCH)
    ]
    return requests + [_request(generator, num_prompt_tokens=3000, prompt_logprobs=20, max_tokens=1) for _ in range(8)]


def _grammars(generator: random.Random, number: int) -> list[AddRequest]:
    """Requests under grammars of which none was seen before."""
    requests = []
    for index in range(GRAMMARS // 3):
        names = [f"p{number}_{index}_{each}" for each in range(100)]
        texts, lengths = ({name: {"type": "string", **bound} for name in names} for bound in ({}, {"maxLength": 30}))
        requests += [
            _request(generator, structured_outputs=Constraint.json_schema({"type": "object", "properties": each}))
            for each in (texts, lengths)
        ]
        regex = Constraint.regex(f"([a-z]{{{index + 1},{number * 1000 + index}}} )*(yes|no)")
        requests.append(_request(generator, structured_outputs=regex))
    optionals = [f'root ::= (("a"? "a"?){{1,40}}){{1,{number + 20}}} "{end}"' for end in "stuvwxyz"]
    growing = [_request(generator, structured_outputs=Constraint.grammar(text), max_tokens=400) for text in optionals]
    return requests + growing


def _request(generator: random.Random, *, num_prompt_tokens: int = 200, **sampling: Any) -> AddRequest:
    parameters = {"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **sampling}
    return AddRequest(
        request_id=RequestId(f"request-{generator.getrandbits(64)}"),
        prompt_token_ids=[generator.randrange(3, VOCABULARY) for _ in range(num_prompt_tokens)],
        sampling=SamplingParams(**parameters),
    )


async def start_engine(config: EngineConfig, environment: dict[str, str]) -> Engine:
    """An engine process with this added to its environment."""
    os.environ.update(environment)
    client = AsyncMPClient(config)
    await client.start()
    for name in environment:
        del os.environ[name]
    return Engine(client, aiter(client.outputs()), psutil.Process(client.pid))


def make_requests(
    generator: random.Random, number: int, max_prompt_tokens: int, max_output_tokens: int
) -> list[AddRequest]:
    """One slice of requests."""
    return [
        AddRequest(
            request_id=RequestId(f"{number}-{i}"),
            prompt_token_ids=[
                generator.randrange(3, VOCABULARY) for _ in range(generator.randint(1, max_prompt_tokens))
            ],
            sampling=SamplingParams(
                temperature=0.0, max_tokens=generator.randint(1, max_output_tokens), ignore_eos=True
            ),
        )
        for i in range(SLICE)
    ]


def ratio(theirs: list[float], ours: list[float]) -> str:
    """Median over the slices, with quartiles."""
    low, median, high = statistics.quantiles([b / a for a, b in zip(ours, theirs, strict=True)], n=4)
    return f"{median:.3f} [{low:.3f}, {high:.3f}], median and quartiles of {len(ours)} pairs"


if __name__ == "__main__":
    sys.exit(main())

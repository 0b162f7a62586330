"""Resident memory of engine processes over many requests of random shapes, with and without bounded kernel caches.

    python -m benchmarks.memory [--random-model] [--dtype bfloat16] [--requests 20000] [--max-prompt-tokens 400]
                                 [--max-output-tokens 8] [--max-in-flight 16] [--alone]

Two engine processes serve the same requests, a slice each in turn, so that both see the same load of the machine:
"bounded" as it comes, "unbounded" with the kernel libraries' own capacities. Prompts have 1 to
`--max-prompt-tokens` random tokens, answers 1 to `--max-output-tokens`, and 1 to `--max-in-flight` requests are in
flight, another number for each slice. The KV cache is so small that all of it is written before the first row.
With `--alone` there is only the bounded engine, in half the time.
"""

from __future__ import annotations

import argparse
import asyncio
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

import psutil

from benchmarks.engine import describe_machine, make_100m_model
from common.demo_model import demo_model_path
from common.engine.client import AsyncMPClient
from common.engine.config import CacheConfig, EngineConfig, ModelConfig
from common.engine.messages import AddRequest, EngineCoreOutputs
from common.engine.worker.kernel_cache import KERNEL_CACHE_VARIABLES
from common.types import RequestId, SamplingParams

UNBOUNDED = dict.fromkeys(KERNEL_CACHE_VARIABLES, "1024")  # what the libraries take without a setting
SLICE = 100  # requests
ROW = 500  # requests between two rows of the table
NUM_BLOCKS = 1025
MIB = 1 << 20


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
    args = parser.parse_args()
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as `baton serve` does
    print(" ".join(f"{key}: {value};" for key, value in describe_machine().items()), flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        model = make_100m_model(Path(scratch)) if args.random_model else demo_model_path()
        config = EngineConfig(
            model=ModelConfig(model=str(model), dtype=args.dtype, device="cpu", num_threads=args.threads),
            cache=CacheConfig(num_blocks=NUM_BLOCKS),
        )
        asyncio.run(compare(config, args))
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
            prompt_token_ids=[generator.randrange(3, 2000) for _ in range(generator.randint(1, max_prompt_tokens))],
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

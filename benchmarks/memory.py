"""Resident memory of an engine process: over many requests of random shapes, and in rounds of what a client may make an
engine hold.

    python -m benchmarks.memory [--requests 20000] [--markdown FILE]
    python -m benchmarks.memory --rounds 12

Prompts have 1 to 400 random tokens, answers 1 to 8, and 1 to 16 requests are in flight, another number for each slice
of 100. The KV cache is so small that all of it is written before the first row.

With `--rounds` the batch is as full as it can be. Each round has 256 requests
with 20 log probabilities, 256 with tables of biases, allowed tokens and bad words that are as large as may be, log
probabilities of long prompts, 300 grammars that are new, of both libraries, and a few that grow with each token.
Grammars are in processes of their own, whose memory is counted by itself, pages shared among them by their share.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import psutil

from benchmarks.harness.command import make_parser
from benchmarks.harness.report import Page, describe_torch_machine, row, table
from common.demo_model import demo_model_path
from common.engine.client import AsyncMPClient
from common.engine.config import CacheConfig, EngineConfig, ModelConfig
from common.engine.messages import AddRequest, EngineCoreOutputs
from common.types import Constraint, RequestId, SamplingParams
from common.types.parameters import parameters_of

SLICE = 100  # requests
ROW = 500  # requests between two rows of the table
MAX_PROMPT_TOKENS, MAX_OUTPUT_TOKENS, MAX_IN_FLIGHT = 400, 8, 16
NUM_BLOCKS = 1025
NUM_BLOCKS_OF_ROUNDS = 4097  # so that the batch can be full
MIB = 1 << 20
BATCH = 256  # requests
VOCABULARY = 2000  # token ids that are used, which every model has
GRAMMARS, GRAMMARS_IN_FLIGHT = 300, 48  # of a round


class Engine(NamedTuple):
    """One engine process."""

    client: AsyncMPClient
    outputs: AsyncIterator[EngineCoreOutputs]
    process: psutil.Process

    @property
    def rss_mib(self) -> float:
        """Resident memory now."""
        return float(self.process.memory_info().rss / MIB)

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
        """Serves some requests, with `in_flight` of them at a time."""
        waiting = iter(requests)
        for request in itertools.islice(waiting, in_flight):
            self.client.add_request(request)
        num_finished = 0
        while num_finished < len(requests):
            for output in (await anext(self.outputs)).outputs:
                if output.finish_reason is not None:
                    num_finished += 1
                    for request in itertools.islice(waiting, 1):
                        self.client.add_request(request)


def main() -> int:
    """Measures and prints."""
    parser = make_parser("benchmarks.memory", __doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, help="rounds of what a client may make an engine hold, instead")
    args = parser.parse_args()
    page = Page("Memory of an engine", "`python -m benchmarks.memory`; see its `--help`.", describe_torch_machine())
    if args.rounds is None:
        asyncio.run(serve_many(page, args.requests))
    else:
        asyncio.run(repeat_rounds(page, args.rounds))
    page.write(args.markdown)
    return 0


async def serve_many(page: Page, num_requests: int) -> None:
    """Slices of requests, one after the other."""
    engine = await start_engine(NUM_BLOCKS)
    page.add("", *table("requests | MiB | tokens/s"), row(0, f"{engine.rss_mib:.0f}", ""))
    generator = random.Random(0)
    tokens, started = 0, perf_counter()
    for served in range(SLICE, num_requests + 1, SLICE):
        requests = [
            _request(
                generator,
                num_prompt_tokens=generator.randint(1, MAX_PROMPT_TOKENS),
                max_tokens=generator.randint(1, MAX_OUTPUT_TOKENS),
            )
            for _ in range(SLICE)
        ]
        tokens += sum(len(each.prompt_token_ids) + each.sampling.max_tokens for each in requests)
        await engine.serve(requests, generator.randint(1, MAX_IN_FLIGHT))
        if served % ROW == 0:
            page.add(row(served, f"{engine.rss_mib:.0f}", f"{tokens / (perf_counter() - started):.0f}"))
            tokens, started = 0, perf_counter()
    await engine.client.close()


async def repeat_rounds(page: Page, num_rounds: int) -> None:
    """Rounds of requests that make the engine hold much, after all of its KV cache was written."""
    engine = await start_engine(NUM_BLOCKS_OF_ROUNDS)
    generator = random.Random(0)
    await engine.serve([_request(generator, num_prompt_tokens=2000) for _ in range(40)], 4)
    page.add("", *table("round | MiB engine | at most | MiB grammars | at most | s"))
    for number in range(num_rounds + 1):
        started, most = perf_counter(), [0.0]
        if number:
            watching = asyncio.create_task(_watch_grammars(engine, most))
            await engine.serve(_full_batches(generator), BATCH)
            await engine.serve(_grammars(generator, number), GRAMMARS_IN_FLIGHT)
            watching.cancel()
        used = (engine.rss_mib, engine.peak_mib, engine.grammars_mib, most[0], perf_counter() - started)
        page.add(row(number, *(f"{each:.0f}" for each in used)))
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


async def start_engine(num_blocks: int) -> Engine:
    """Starts an engine process with the demo model on one thread."""
    model = ModelConfig(model=str(demo_model_path()), dtype="float32", device="cpu", num_threads=1)
    client = AsyncMPClient(EngineConfig(model=model, cache=CacheConfig(num_blocks=num_blocks)))
    await client.start()
    return Engine(client, aiter(client.outputs()), psutil.Process(client.pid))


if __name__ == "__main__":
    sys.exit(main())

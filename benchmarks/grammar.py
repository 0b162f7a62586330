"""Measures the cost of structured output: `python -m benchmarks.engine --grammar`.

mask       gap between two tokens of a batch of 32, all free, and all bound to a schema of 2 KB, in turn
compile    gaps between steps of 8 free streams while schemas of 2 KB that no cache knows are compiled, and without
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import tokenizers
import torch

from common.engine.client.inproc import InprocClient
from common.engine.config import CacheConfig, EngineConfig, ModelConfig
from common.engine.messages import AddRequest
from common.types import Constraint, FinishReason, RequestId, SamplingParams

BATCH, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 128, 48
NUM_STREAMS, STREAM_TOKENS, NUM_COMPILED = 8, 400, 12
SCHEMA_BYTES = 2048


class GrammarResult(NamedTuple):
    """One row of the table."""

    model: str
    measure: str
    unit: str
    without: float
    with_grammar: float

    def __str__(self) -> str:
        more = 100 * (self.with_grammar / self.without - 1)
        return (
            f"{self.model:<26} {self.measure:<34} without {self.without:>9.2f}  with {self.with_grammar:>9.2f} "
            f"{self.unit:<9} {more:+.1f} %"
        )


def schema(number: int) -> Constraint:
    """A schema of about 2 KB, another one for each number, whose texts are longer than what is generated."""
    properties: dict[str, object] = {}
    for index in itertools.count():
        kind = ("string", "integer", "boolean", "number")[index % 4]
        properties[f"property_{number}_{index}"] = {"type": kind, "description": "one of many"}
        value = {"type": "object", "properties": properties, "required": list(properties)}
        if len(json.dumps(value)) >= SCHEMA_BYTES:
            return Constraint.json_schema(value, any_whitespace=False)
    raise AssertionError


def write_tokenizer(directory: Path, vocab_size: int) -> None:
    """A tokenizer for a model that has none: bytes, and pairs and triples of them."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    letters = [char for char in alphabet if char.isascii()]
    spellings = itertools.chain(
        alphabet, map("".join, itertools.product(letters, repeat=2)), map("".join, itertools.product(letters, repeat=3))
    )
    vocab = {spelling: index for index, spelling in enumerate(itertools.islice(spellings, vocab_size))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))


def measure_grammar(name: str, directory: Path, dtype: str, repeats: int) -> list[GrammarResult]:
    """Both measures of one model."""
    config = EngineConfig(
        model=ModelConfig(model=str(directory), dtype=dtype), cache=CacheConfig(enable_prefix_caching=False)
    )
    with InprocClient(config) as client:
        engine = _Engine(client)
        engine.decode(Constraint.json_object(), 4)  # imports the library and starts the process that compiles
        return [_mask(name, engine, repeats), *_compile(name, engine)]


class _Engine:
    def __init__(self, client: InprocClient) -> None:
        self._client = client
        self._num_requests = 0

    def add(self, num_tokens: int, constraint: Constraint | None, prompt_tokens: int = PROMPT_TOKENS) -> RequestId:
        request_id = RequestId(f"r{self._num_requests}")
        self._num_requests += 1
        generator = torch.Generator().manual_seed(self._num_requests)
        prompt = torch.randint(3, self._client.spec.vocab_size, (prompt_tokens,), generator=generator).tolist()
        sampling = SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=True, structured_outputs=constraint
        )
        self._client.add_request(AddRequest(request_id=request_id, prompt_token_ids=prompt, sampling=sampling))
        return request_id

    def step(self) -> tuple[list[RequestId], bool]:
        """One step; returns the requests that have ended, and whether it computed something."""
        outputs = self._client.step(timeout_s=60).outputs
        for output in outputs:
            if output.finish_reason is FinishReason.ERROR:
                raise RuntimeError(output.error)
        return [output.request_id for output in outputs if output.finish_reason is not None], bool(outputs)

    def decode(self, constraint: Constraint | None, num_tokens: int) -> float:
        """Median gap in milliseconds of steps in which all of a batch decode."""
        live = {self.add(num_tokens, constraint) for _ in range(BATCH)}
        stamps: list[float] = []
        while live:
            ended, _ = self.step()
            stamps.append(time.perf_counter())
            live.difference_update(ended)
        while self._client.has_work:
            self._client.step()
        gaps = [later - earlier for earlier, later in itertools.pairwise(stamps[-num_tokens:])]
        return statistics.median(gaps) * 1e3

    def stream(self, constraints: Sequence[Constraint]) -> list[float]:
        """Gaps in milliseconds between steps of some streams. Requests with the constraints come among them, one after
        the other, and are dropped once their grammar is there: so no step has more to compute."""
        live = {self.add(STREAM_TOKENS, None, prompt_tokens=8) for _ in range(NUM_STREAMS)}
        for _ in range(20):
            self.step()
        waiting = list(constraints)
        gaps: list[float] = []
        last, compiling = time.perf_counter(), RequestId("")
        while live:
            if waiting and not compiling:
                compiling = self.add(1, waiting.pop(), prompt_tokens=1)
            ended, _ = self.step()
            now = time.perf_counter()
            if compiling in ended:
                compiling = RequestId("")  # this step computed its prompt as well
            else:
                gaps.append((now - last) * 1e3)
            last = now
            live.difference_update(ended)
        while self._client.has_work:
            self._client.step()
        return gaps


def _mask(name: str, engine: _Engine, repeats: int) -> GrammarResult:
    bound = schema(0)
    without: list[float] = []
    with_grammar: list[float] = []
    for repeat in range(repeats + 1):
        order = ((without, None), (with_grammar, bound))
        for figures, constraint in order if repeat % 2 else order[::-1]:
            gap_ms = engine.decode(constraint, OUTPUT_TOKENS)
            if repeat:
                figures.append(gap_ms)
    # The least of the repeats: other work on the machine is several times as much as the difference.
    return GrammarResult(name, f"decode, batch {BATCH}", "ms/token", min(without), min(with_grammar))


def _compile(name: str, engine: _Engine) -> list[GrammarResult]:
    without = engine.stream([])
    compiling = engine.stream([schema(number) for number in range(1, NUM_COMPILED + 1)])
    return [
        GrammarResult(name, f"steps while compiling, {label}", "ms", figure(without), figure(compiling))
        for label, figure in (("median", statistics.median), ("p99", _p99), ("longest", max))
    ]


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100)[-1]


def format_markdown(machine: dict[str, str], results: Sequence[GrammarResult]) -> str:
    """The table with what it depends on."""
    lines = [
        "# What structured output costs",
        "",
        "`python -m benchmarks.engine --grammar`; of decode, the least of the repeats' medians.",
        "",
        *(f"- {key}: {value}" for key, value in machine.items()),
        "",
        "| model | measure | unit | without | with | |",
        "|---|---|---|---|---|---|",
    ]
    for row in results:
        more = 100 * (row.with_grammar / row.without - 1)
        lines.append(
            f"| {row.model} | {row.measure} | {row.unit} | {row.without:.4g} | {row.with_grammar:.4g} | {more:+.1f} % |"
        )
    return "\n".join(lines) + "\n"

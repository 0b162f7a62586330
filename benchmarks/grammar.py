"""Measures the cost of structured output to an engine.

    python -m benchmarks.grammar [--model DIR]... [--dtype bfloat16] [--threads N] [--repeats 5] [--markdown FILE]

The models are the demo model and a random Qwen3 of 100M parameters; on a GPU random ones of 0.6B and 8B.

mask       gap between two tokens of a batch of 32, all free, and all bound to a schema of 2 KB, in turn
compile    gaps between steps of 8 free streams while schemas of 2 KB that no cache knows are compiled, and without
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.harness.command import make_parser
from benchmarks.harness.figures import in_turn, p99
from benchmarks.harness.models import make_random_model, write_tokenizer
from benchmarks.harness.report import Page, describe_torch_machine, row, table
from common.demo_model import DEMO_MODEL_NAME, demo_model_path
from common.engine.client.inproc import InprocClient
from common.engine.config import CacheConfig, DType, EngineConfig, ModelConfig
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

    @property
    def cells(self) -> tuple[str, ...]:
        """Returns the row of the table."""
        more = 100 * (self.with_grammar / self.without - 1)
        return self.model, self.measure, self.unit, f"{self.without:.4g}", f"{self.with_grammar:.4g}", f"{more:+.1f} %"


def main() -> int:
    """Measures and prints."""
    parser = make_parser("benchmarks.grammar", __doc__, repeats=5)
    parser.add_argument("--model", action="append", type=Path, help="directory to measure instead")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    words = "`python -m benchmarks.grammar`; of decode, the least of the repeats' medians."
    page = Page("What structured output costs", words, describe_torch_machine())
    page.add("", *table("model | measure | unit | without | with | "))
    with tempfile.TemporaryDirectory() as scratch:
        for name, directory in _models(args.model, Path(scratch)):
            if not (directory / "tokenizer.json").is_file():
                write_tokenizer(directory)
            for result in measure_grammar(name, directory, args.dtype, args.repeats):
                page.add(row(*result.cells))
    page.write(args.markdown)
    return 0


def _models(directories: Sequence[Path] | None, scratch: Path) -> Iterator[tuple[str, Path]]:
    if directories:
        yield from ((directory.name, directory) for directory in directories)
        return
    shapes = ("0.6B", "8B") if torch.cuda.is_available() else ("100M",)
    if not torch.cuda.is_available():
        yield DEMO_MODEL_NAME, Path(demo_model_path())
    yield from ((f"Qwen3 shape, {shape} random", make_random_model(scratch, shape)) for shape in shapes)


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


def measure_grammar(name: str, directory: Path, dtype: DType, repeats: int) -> list[GrammarResult]:
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
        for figures, constraint in in_turn(((without, None), (with_grammar, bound)), repeat):
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
        for label, figure in (("median", statistics.median), ("p99", p99), ("longest", max))
    ]


if __name__ == "__main__":
    sys.exit(main())

"""Time of an engine's steps with compiled CPU kernels next to torch's operators, in one process and in turn.

    python -m benchmarks.kernels [--dtype bfloat16] [--markdown FILE]

Both sides run the same worker code over the same random prompts. `decode` is a step of that many requests, one token
each; `prefill` one prompt of 1024 tokens. Medians over `--repeats`, ranges in brackets; above a ratio of 1 the kernels
are faster.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.harness.command import make_parser
from benchmarks.harness.figures import ratio
from benchmarks.harness.models import make_random_model
from benchmarks.harness.report import Page, describe_torch_machine, row, spread, table
from common.demo_model import demo_model_path
from common.engine.config import (
    CacheConfig,
    DType,
    EngineConfig,
    KernelChoice,
    ModelConfig,
    SchedulerConfig,
)
from common.engine.contract.step import NewRequest, SchedulerOutput
from common.engine.worker.worker import Worker
from common.types import RequestId, SamplingParams

BLOCK_SIZE = 16
NUM_STEPS = 8  # that are measured at once, per side and repeat
DECODES = [(1, 128), (8, 128), (32, 280), (1, 2048)]  # requests, tokens of context
PREFILL = 1024
SIDES: tuple[KernelChoice, KernelChoice] = ("auto", "reference")


def main() -> int:
    """Measures and prints."""
    parser = make_parser("benchmarks.kernels", __doc__, repeats=7)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--models", nargs="+", help="names of those that are measured; default: all")
    args = parser.parse_args()
    words = f"`python -m benchmarks.kernels --dtype {args.dtype}`."
    page = Page("CPU kernels next to torch's operators", words, describe_torch_machine())
    page.add("", *table("model | step | kernels | ms | torch's operators, ms | ratio"))
    with tempfile.TemporaryDirectory() as scratch:
        models = {"demo": demo_model_path(), "Qwen3 shape, 100M": make_random_model(Path(scratch), "100M")}
        for name in args.models or models:
            for line in measure_model(name, Path(models[name]), args.dtype, args.repeats):
                page.add(line)
    page.write(args.markdown)
    return 0


def measure_model(name: str, model: Path, dtype: DType, repeats: int) -> Iterator[str]:
    """The rows of one model."""
    sides = [Side(model, dtype, kernels) for kernels in SIDES]
    for step, (own, torchs) in measure_steps(sides, DECODES, repeats):
        yield row(name, step, sides[0].kernels, spread(own, ".2f"), spread(torchs, ".2f"), f"{ratio(torchs, own):.2f}")


def measure_steps(
    sides: Sequence[Side], decodes: Sequence[tuple[int, int]], repeats: int
) -> Iterator[tuple[str, list[list[float]]]]:
    """Yields steps by name with the milliseconds of each side's, the sides in turn, and closes the sides."""
    for num_requests, context in decodes:
        for side in sides:
            side.begin(num_requests, context)
        times = [[side.decode() for side in sides] for _ in range(repeats)]
        for side in sides:
            side.end()
        yield f"decode {num_requests} x {context}", [list(each) for each in zip(*times, strict=True)]
    for side in sides:
        side.prefill()
    times = [[side.prefill() for side in sides] for _ in range(repeats)]
    yield f"prefill {PREFILL}", [list(each) for each in zip(*times, strict=True)]
    for side in sides:
        side.worker.close()


class Side:
    """One worker, and the requests that it decodes."""

    def __init__(self, model: Path, dtype: DType, kernels: KernelChoice, quantization: str | None = None) -> None:
        longest = max(context for _, context in DECODES) + 1000
        num_blocks = 1 + max(n * -(-(context + 200) // BLOCK_SIZE) for n, context in DECODES)
        self.worker = Worker(
            EngineConfig(
                model=ModelConfig(
                    model=str(model), dtype=dtype, cpu_kernels=kernels, quantization=quantization, max_model_len=longest
                ),
                cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks),
                scheduler=SchedulerConfig(max_num_seqs=64),
            )
        )
        self.kernels = self.worker.load_model().kernels
        self.worker.initialize_kv_cache(num_blocks)
        self._ids: list[RequestId] = []

    def begin(self, num_requests: int, context: int) -> None:
        """Computes the prompts."""
        first_block = 1
        for i in range(num_requests):
            request = _request(f"r{i}", context, first_block, spare=200)
            first_block += len(request.block_ids[0])
            self._run([request], {request.request_id: context})
            self._ids.append(request.request_id)
        self.decode()

    def decode(self) -> float:
        """Milliseconds of a step that decodes all."""
        started = time.perf_counter()
        for _ in range(NUM_STEPS):
            self._run([], dict.fromkeys(self._ids, 1))
        return (time.perf_counter() - started) * 1000 / NUM_STEPS

    def end(self) -> None:
        """Forgets the requests."""
        self.worker.execute(SchedulerOutput(dropped_request_ids=self._ids))
        self._ids = []

    def prefill(self) -> float:
        """Milliseconds of one prompt."""
        request = _request("prompt", PREFILL, 1, spare=0)
        started = time.perf_counter()
        self._run([request], {request.request_id: PREFILL})
        passed = time.perf_counter() - started
        self.worker.execute(SchedulerOutput(dropped_request_ids=[request.request_id]))
        return passed * 1000

    def _run(self, new: list[NewRequest], scheduled: dict[RequestId, int]) -> None:
        self.worker.execute(SchedulerOutput(new_requests=new, num_scheduled_tokens=scheduled))


def _request(name: str, context: int, first_block: int, *, spare: int) -> NewRequest:
    token_ids = torch.randint(3, 1000, (context,), generator=torch.Generator().manual_seed(context)).tolist()
    blocks = list(range(first_block, first_block + -(-(context + spare) // BLOCK_SIZE)))
    return NewRequest(RequestId(name), token_ids, context, SamplingParams(temperature=0.0), [blocks], 0)


if __name__ == "__main__":
    raise SystemExit(main())

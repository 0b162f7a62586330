"""Processor time of decode attention over latents with the compiled CPU kernel, next to torch's operators.

    python -m benchmarks.latents [--markdown FILE]

One layer of 4 requests with 2048 tokens each, in the shape of DeepSeek-V3 (latents of 512 numbers, rotary parts of 64),
with 16 and with 128 heads. Both attend to absorbed queries over the same paged cache, in turn, on one thread; the times
are of that thread, so that other processes disturb them little. Beside them is what the same core reaches in the same
run: multiplying float32 matrices, and summing up memory.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.harness.command import make_parser
from benchmarks.harness.report import Page, describe_torch_machine, row, spread, table
from common.engine.config import Kernels, ModelConfig
from common.engine.devices.attention import AttentionArgs, AttentionMetadata, LatentExpansion
from common.engine.devices.registry import DEVICES

NUM_REQUESTS, CONTEXT, BLOCK_SIZE = 4, 2048, 16
RANK, ROTARY_DIM, KEY_DIM = 512, 64, 128
NUM_LAYERS = 4  # of the cache, in turn: as in a model, latents do not stay in the processor's caches
SIDES: tuple[Kernels, Kernels] = ("attention", "torch")


def main() -> int:
    """Measures and prints."""
    args = make_parser("benchmarks.latents", __doc__, repeats=9).parse_args()
    torch.set_num_threads(1)
    page = Page("Decode attention over latents", "`python -m benchmarks.latents`.", describe_torch_machine())
    page.add("", *table("type | heads | kernel, ms | GFLOP/s | GB/s of latents | torch's operators, ms | ratio"))
    for dtype in (torch.float32, torch.bfloat16):
        for num_heads in (16, 128):
            page.add(measure(dtype, num_heads, args.repeats))
    gflops, gbytes = core_gflops(args.repeats), core_gbytes(args.repeats)
    page.add("", f"One core: {gflops:.0f} GFLOP/s in products of float32 matrices, {gbytes:.0f} GB/s in sums.")
    page.write(args.markdown)
    return 0


@torch.inference_mode()
def measure(dtype: torch.dtype, num_heads: int, repeats: int) -> str:
    """The row of one type and number of heads."""
    num_blocks = NUM_REQUESTS * CONTEXT // BLOCK_SIZE
    dim = RANK + ROTARY_DIM
    cache = torch.randn(num_blocks + 1, NUM_LAYERS, 1, 1, BLOCK_SIZE, dim).to(dtype)
    tables = torch.randperm(num_blocks).add(1).view(NUM_REQUESTS, -1)
    batch = AttentionMetadata(
        num_decodes=NUM_REQUESTS,
        query_start=list(range(NUM_REQUESTS + 1)),
        seq_lens=[CONTEXT] * NUM_REQUESTS,
        seq_lens_tensor=torch.full((NUM_REQUESTS,), CONTEXT),
        block_tables=tables,
        slot_mapping=tables[:, -1] * BLOCK_SIZE + BLOCK_SIZE - 1,
    )
    expansion = LatentExpansion(torch.randn(num_heads, 2 * KEY_DIM, RANK).to(dtype), KEY_DIM)
    attention = AttentionArgs(scale=0.1, expansion=expansion)
    query = torch.randn(1, NUM_REQUESTS, num_heads, dim).to(dtype)
    device = DEVICES.find("cpu")(ModelConfig(num_threads=1), 0)
    backends = [device.attention(cache, kernels, dtype) for kernels in SIDES]

    def attend(backend: Any) -> None:  # without the products around it
        for layer in range(NUM_LAYERS):
            backend.attend_absorbed(layer, query, attention)

    for backend in backends:
        backend.begin_step(batch)
        attend(backend)
    times = [[seconds(lambda each=each: attend(each)) for each in backends] for _ in range(repeats)]  # type: ignore[misc]
    ours, theirs = ([pair[side] / NUM_LAYERS for pair in times] for side in range(2))
    num_tokens, typical = NUM_REQUESTS * CONTEXT, statistics.median(ours)
    flops, num_bytes = 2 * num_tokens * num_heads * (dim + RANK), num_tokens * dim * dtype.itemsize
    ratio = statistics.median(other / own for own, other in zip(ours, theirs, strict=True))
    name = str(dtype).removeprefix("torch.")
    rates = f"{flops / typical / 1e9:.0f}", f"{num_bytes / typical / 1e9:.1f}"
    return row(name, num_heads, _ms(ours), *rates, _ms(theirs), f"{ratio:.2f}")


def core_gflops(repeats: int) -> float:
    """Billions of operations in a second of a product of matrices."""
    one = torch.randn(1024, 1024)
    return float(2 * 1024**3 / min(seconds(lambda: one @ one) for _ in range(repeats)) / 1e9)


def core_gbytes(repeats: int) -> float:
    """Billions of bytes that are read in a second."""
    numbers = torch.randn(64 << 20)
    return float(numbers.nbytes / min(seconds(numbers.sum) for _ in range(repeats)) / 1e9)


def seconds(run: Callable[[], object]) -> float:
    """Processor time of this thread."""
    started = time.thread_time()
    run()
    return time.thread_time() - started


def _ms(times: Sequence[float]) -> str:
    return spread([1000 * each for each in times], ".2f")


if __name__ == "__main__":
    raise SystemExit(main())

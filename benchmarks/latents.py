"""Processor time of decode attention over latents with the compiled CPU kernel, next to torch's operators.

    python -m benchmarks.latents [--markdown FILE]

One layer of 4 requests with 2048 tokens each, in the shape of DeepSeek-V3 (latents of 512 numbers, rotary parts of 64),
with 16 and with 128 heads. Both attend to absorbed queries over the same paged cache, in turn, on one thread; the times
are of that thread, so that other processes disturb them little. Beside them is what the same core reaches in the same
run: multiplying float32 matrices, and summing up memory.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks.page import describe_torch_machine
from common.engine.devices.attention import AttentionArgs, AttentionMetadata, LatentExpansion
from common.engine.devices.cpu.latent_attention import CpuLatentAttention
from common.engine.devices.torch.latent_attention import TorchLatentAttention

NUM_REQUESTS, CONTEXT, BLOCK_SIZE = 4, 2048, 16
RANK, ROTARY_DIM, KEY_DIM = 512, 64, 128
NUM_LAYERS = 4  # of the cache, in turn: as in a model, latents do not stay in the processor's caches
REPEATS = 9


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.latents", description=__doc__.splitlines()[0])
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        "| type | heads | kernel, ms | GFLOP/s | GB/s of latents | torch's operators, ms | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for dtype in (torch.float32, torch.bfloat16):
        for num_heads in (16, 128):
            rows.append(measure(dtype, num_heads))
            print(rows[-1], flush=True)
    core = f"One core: {core_gflops():.0f} GFLOP/s in products of float32 matrices, {core_gbytes():.0f} GB/s in sums."
    print(core)
    if args.markdown is not None:
        machine = [f"- {key}: {value}" for key, value in describe_torch_machine().items()]
        args.markdown.write_text("\n".join([*machine, "", *rows, "", core, ""]))
    return 0


@torch.inference_mode()
def measure(dtype: torch.dtype, num_heads: int) -> str:
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
    backends = [CpuLatentAttention(cache), TorchLatentAttention(cache)]

    def attend(backend: TorchLatentAttention) -> None:
        for layer in range(NUM_LAYERS):
            backend._attend_absorbed(layer, query, attention)  # noqa: SLF001  without the products around it

    for backend in backends:
        backend.begin_step(batch)
        attend(backend)
    times = [[seconds(lambda each=each: attend(each)) for each in backends] for _ in range(REPEATS)]  # type: ignore[misc]
    ours, theirs = ([pair[side] / NUM_LAYERS for pair in times] for side in range(2))
    num_tokens, typical = NUM_REQUESTS * CONTEXT, statistics.median(ours)
    flops, num_bytes = 2 * num_tokens * num_heads * (dim + RANK), num_tokens * dim * dtype.itemsize
    ratio = statistics.median(other / own for own, other in zip(ours, theirs, strict=True))
    name = str(dtype).removeprefix("torch.")
    figures = f"{_ms(ours)} | {flops / typical / 1e9:.0f} | {num_bytes / typical / 1e9:.1f} | {_ms(theirs)}"
    return f"| {name} | {num_heads} | {figures} | {ratio:.2f} |"


def core_gflops() -> float:
    """Billions of operations in a second of a product of matrices."""
    one = torch.randn(1024, 1024)
    return float(2 * 1024**3 / min(seconds(lambda: one @ one) for _ in range(REPEATS)) / 1e9)


def core_gbytes() -> float:
    """Billions of bytes that are read in a second."""
    numbers = torch.randn(64 << 20)
    return float(numbers.nbytes / min(seconds(numbers.sum) for _ in range(REPEATS)) / 1e9)


def seconds(run: Callable[[], object]) -> float:
    """Processor time of this thread."""
    started = time.thread_time()
    run()
    return time.thread_time() - started


def _ms(times: Sequence[float]) -> str:
    low, typical, high = (1000 * each for each in (min(times), statistics.median(times), max(times)))
    return f"{typical:.2f} [{low:.2f}, {high:.2f}]"


if __name__ == "__main__":
    raise SystemExit(main())

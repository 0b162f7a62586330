"""Triton kernels on this machine's GPU, next to what bounds them: copy bandwidth and the rate of matrix products.

    python -m benchmarks.gpu_kernels [--markdown FILE] [--sweep]

Each figure is the median of many runs over data that does not fit the GPU's cache. Attention has 32 query heads, 8 KV
heads of 128 numbers and blocks of 16 tokens unless said.

    decode    share of the copy bandwidth at which the KV of a batch is read; the time has the storing of the new KV
    chunk     share of the rate of a large matrix product, and next to torch's attention over contiguous tensors

`--sweep` tries other tiles than the stored ones, which is how those were found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch.nn import functional
from triton.testing import do_bench

from benchmarks.harness.command import make_parser
from benchmarks.harness.report import Page, describe_torch_machine, row, table
from common.engine.devices.attention import AttentionArgs, AttentionMetadata
from common.engine.devices.gpu import attention as triton_attention
from common.engine.devices.gpu.attention import Tile, TritonAttention

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
DECODES = [(1, 1024), (1, 16384), (8, 1024), (8, 8192), (32, 1024), (32, 4096), (128, 1024), (256, 512)]
CHUNKS = [(512, 0), (2048, 0), (8192, 0), (2048, 6144)]  # query tokens, tokens before them
CACHE_BLOCKS = 16384
DTYPE = torch.bfloat16


def median_ms(run: Callable[[], Any]) -> float:
    """Median time of a call."""
    return float(do_bench(run, warmup=30, rep=100, return_mode="median"))


def copy_bandwidth() -> float:
    """Bytes per second read and written by a large copy."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (median_ms(lambda: target.copy_(source)) * 1e-3)


def matrix_rate() -> float:
    """Floating-point operations per second of a large product."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=DTYPE) for _ in range(2))
    return 2 * 8192**3 / (median_ms(lambda: a @ b) * 1e-3)


class Rig:
    """One layer's KV cache of random numbers, whose blocks are in no order."""

    def __init__(self) -> None:
        shape = (CACHE_BLOCKS, 1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        self.attention = TritonAttention(torch.randn(shape, device="cuda", dtype=DTYPE))
        self._order = torch.randperm(CACHE_BLOCKS - 1, device="cuda") + 1

    def batch(self, num_seqs: int, num_query: int, seq_len: int) -> AttentionMetadata:
        """`num_seqs` sequences of which the last `num_query` tokens are computed."""
        width = -(-seq_len // BLOCK_SIZE)
        places = torch.arange(num_seqs * width, device="cuda") % len(self._order)
        tables = self._order[places].view(num_seqs, width)
        positions = torch.arange(seq_len - num_query, seq_len, device="cuda")
        slots = (tables[:, positions // BLOCK_SIZE] * BLOCK_SIZE + positions % BLOCK_SIZE).view(-1)
        return AttentionMetadata(
            num_decodes=num_seqs if num_query == 1 else 0,
            query_start=list(range(0, num_seqs * num_query + 1, num_query)),
            seq_lens=[seq_len] * num_seqs,
            seq_lens_tensor=torch.full((num_seqs,), seq_len, device="cuda"),
            block_tables=tables,
            slot_mapping=slots,
        )

    def attend(self, batch: AttentionMetadata) -> Callable[[], None]:
        """A call of the backend alone, as a graph, so that the time of launches does not count."""
        num_tokens = len(batch.slot_mapping)
        query = torch.randn(1, num_tokens, HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
        key, value = (torch.randn(1, num_tokens, KV_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE) for _ in range(2))
        self.attention.begin_step(batch)

        def run() -> None:
            self.attention.attend(0, query, key, value, AttentionArgs(HEAD_DIM**-0.5))

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay


def decode_bytes(num_seqs: int, seq_len: int) -> int:
    """KV that a batch of decodes must read."""
    return num_seqs * seq_len * 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize


def chunk_operations(num_query: int, num_before: int) -> float:
    """Counts operations of the products with the keys and values that are seen."""
    seen = num_query * num_before + num_query * (num_query + 1) / 2
    return 4 * seen * HEADS * HEAD_DIM


def torch_attention_ms(num_query: int, num_before: int) -> float:
    """torch's attention over contiguous tensors, causal from the start only; else NaN."""
    if num_before:
        return float("nan")
    query = torch.randn(1, HEADS, num_query, HEAD_DIM, device="cuda", dtype=DTYPE)
    key, value = (torch.randn(1, KV_HEADS, num_query, HEAD_DIM, device="cuda", dtype=DTYPE) for _ in range(2))
    key, value = (each.repeat_interleave(HEADS // KV_HEADS, dim=1) for each in (key, value))
    return median_ms(lambda: functional.scaled_dot_product_attention(query, key, value, is_causal=True))


@contextmanager
def tile_of(name: str, tile: Tile) -> Iterator[None]:
    """Lets the backend use `tile`."""
    stored = getattr(triton_attention, name)
    setattr(triton_attention, name, lambda *_: tile)
    try:
        yield
    finally:
        setattr(triton_attention, name, stored)


def sweep(rig: Rig, bandwidth: float) -> None:
    """Prints what other tiles reach."""
    print("\ndecode tiles: share of the bandwidth for", DECODES)
    for keys, warps, stages in itertools.product((32, 64, 128), (4, 8), (2, 3, 4)):
        tile = Tile(16, keys, warps, stages)
        with tile_of("decode_tile", tile):
            try:
                shares = [
                    decode_bytes(*case) / (median_ms(rig.attend(rig.batch(case[0], 1, case[1]))) * 1e-3) / bandwidth
                    for case in DECODES
                ]
            except triton.runtime.errors.OutOfResources:
                continue
        print(tuple(tile), " ".join(f"{share:5.2f}" for share in shares), flush=True)
    print("\nchunk tiles: TFLOP/s for", CHUNKS)
    for rows, keys, warps, stages in itertools.product((64, 128), (64, 128), (4, 8), (2, 3)):
        tile = Tile(rows, keys, warps, stages)
        with tile_of("chunk_tile", tile):
            try:
                rates = [
                    chunk_operations(*case) / median_ms(rig.attend(rig.batch(1, case[0], sum(case)))) / 1e9
                    for case in CHUNKS
                ]
            except triton.runtime.errors.OutOfResources:
                continue
        print(tuple(tile), " ".join(f"{each:6.0f}" for each in rates), flush=True)


def main() -> None:
    """Entry point."""
    parser = make_parser("benchmarks.gpu_kernels", __doc__)
    parser.add_argument("--sweep", action="store_true", help="try other tiles")
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth, rate = copy_bandwidth(), matrix_rate()
    limits = {"copy": f"{bandwidth / 1e12:.2f} TB/s", f"{DTYPE} product": f"{rate / 1e12:.0f} TFLOP/s"}
    words = "`python -m benchmarks.gpu_kernels`, whose help says what is measured. Medians."
    page = Page("Triton kernels", words, describe_torch_machine() | {"triton": triton.__version__} | limits)
    rig = Rig()
    page.add("", *table("decode: sequences | tokens | us | of the copy bandwidth"))
    for num_seqs, seq_len in DECODES:
        ms = median_ms(rig.attend(rig.batch(num_seqs, 1, seq_len)))
        share = decode_bytes(num_seqs, seq_len) / (ms * 1e-3) / bandwidth
        page.add(row(num_seqs, seq_len, f"{ms * 1e3:.1f}", f"{share:.2f}"))
    page.add("", *table("chunk: query tokens | tokens before | us | TFLOP/s | of the product's rate | torch's us"))
    for num_query, num_before in CHUNKS:
        ms = median_ms(rig.attend(rig.batch(1, num_query, num_query + num_before)))
        reached = chunk_operations(num_query, num_before) / (ms * 1e-3)
        torch_us = f"{torch_attention_ms(num_query, num_before) * 1e3:.1f}"
        figures = (f"{ms * 1e3:.1f}", f"{reached / 1e12:.0f}", f"{reached / rate:.2f}", torch_us)
        page.add(row(num_query, num_before, *figures))
    if args.sweep:
        sweep(rig, bandwidth)
    page.write(args.markdown)


if __name__ == "__main__":
    main()

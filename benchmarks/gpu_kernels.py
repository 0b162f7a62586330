"""Triton kernels on this machine's GPU, next to what bounds them: copy bandwidth and the rate of matrix products.

    python -m benchmarks.gpu_kernels [--sections decode chunk latents] [--markdown FILE] [--sweep]

Each figure is the median of many runs over data that does not fit the GPU's cache. Attention has 32 query heads, 8 KV
heads of 128 numbers and blocks of 16 tokens unless said.

    decode    share of the copy bandwidth at which the KV of a batch is read; the time has the storing of the new KV
    chunk     share of the rate of a large matrix product, and next to torch's attention over contiguous tensors
    latents   decodes over latents of 512 numbers with rotary parts of 64 (DeepSeek-V3; V2-Lite has 16 heads), with
              absorbed queries: share of the copy bandwidth and of the product's rate, and next to torch's operators

`--sweep` tries other tiles than the stored ones, which is how those were found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import triton
from torch.nn import functional
from triton.testing import do_bench

from benchmarks.harness.command import make_parser
from benchmarks.harness.report import Page, describe_torch_machine, row, table
from common.engine.config import Kernels, ModelConfig
from common.engine.devices.attention import AttentionArgs, AttentionMetadata, LatentExpansion
from common.engine.devices.gpu import attention as triton_attention
from common.engine.devices.gpu import latent_attention
from common.engine.devices.gpu.attention import Tile, TritonAttention
from common.engine.devices.registry import DEVICES

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
DECODES = [(1, 1024), (1, 16384), (8, 1024), (8, 8192), (32, 1024), (32, 4096), (128, 1024), (256, 512)]
CHUNKS = [(512, 0), (2048, 0), (8192, 0), (2048, 6144)]  # query tokens, tokens before them
CACHE_BLOCKS = 16384
LATENT_TILES = {  # by heads
    16: [Tile(16, *rest) for rest in [(32, 4, 3), (32, 4, 5), (32, 8, 5), (64, 4, 3), (64, 8, 5)]],
    128: [Tile(64, *rest) for rest in [(32, 8, 2), (32, 8, 3), (32, 8, 5), (64, 8, 2)]],
}
RANK, ROTARY_DIM = 512, 64
LATENT_DECODES = list(itertools.product((1, 8, 64), (1024, 8192)))
LATENT_BLOCKS = 32769  # with the null block
SECTIONS = ("decode", "chunk", "latents")
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


class Batches:
    """Batches over a cache whose blocks are in no order."""

    def __init__(self, num_blocks: int) -> None:
        self._order = torch.randperm(num_blocks - 1, device="cuda") + 1

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


class Rig(Batches):
    """One layer's KV cache of random numbers."""

    def __init__(self) -> None:
        super().__init__(CACHE_BLOCKS)
        shape = (CACHE_BLOCKS, 1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        self.attention = TritonAttention(torch.randn(shape, device="cuda", dtype=DTYPE))

    def attend(self, batch: AttentionMetadata) -> Callable[[], None]:
        """A call of the backend alone, as a graph, so that the time of launches does not count."""
        num_tokens = len(batch.slot_mapping)
        query = torch.randn(1, num_tokens, HEADS, HEAD_DIM, device="cuda", dtype=DTYPE)
        key, value = (torch.randn(1, num_tokens, KV_HEADS, HEAD_DIM, device="cuda", dtype=DTYPE) for _ in range(2))
        self.attention.begin_step(batch)

        def run() -> None:
            self.attention.attend(0, query, key, value, AttentionArgs(HEAD_DIM**-0.5))

        return recorded(run)


class LatentRig(Batches):
    """One layer's cache of random latents and rotary parts."""

    def __init__(self) -> None:
        super().__init__(LATENT_BLOCKS)
        shape = (LATENT_BLOCKS, 1, 1, 1, BLOCK_SIZE, RANK + ROTARY_DIM)
        cache = torch.randn(shape, device="cuda", dtype=DTYPE)
        device = DEVICES.find("cuda")(ModelConfig(), 0)
        kinds: Sequence[Kernels] = ("attention", "torch")
        self._backends: dict[Kernels, Any] = {kernels: device.attention(cache, kernels, DTYPE) for kernels in kinds}

    def attend(self, kernels: Kernels, num_heads: int, num_seqs: int, seq_len: int) -> Callable[[], None]:
        """Attention of absorbed queries as a graph, without the products around it."""
        backend = self._backends[kernels]
        query = torch.randn(1, num_seqs, num_heads, RANK + ROTARY_DIM, device="cuda", dtype=DTYPE)
        weight = torch.empty(num_heads, 1, RANK, device="cuda", dtype=DTYPE)
        args = AttentionArgs(0.1, expansion=LatentExpansion(weight, 0))
        backend.begin_step(self.batch(num_seqs, 1, seq_len))
        return recorded(lambda: backend.attend_absorbed(0, query, args))

    def ms(self, kernels: Kernels, num_heads: int, num_seqs: int, seq_len: int) -> float:
        """Median time of a call."""
        return median_ms(self.attend(kernels, num_heads, num_seqs, seq_len))


def recorded(run: Callable[[], object]) -> Callable[[], None]:
    """Returns a graph of a call."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def decode_bytes(num_seqs: int, seq_len: int) -> int:
    """KV that a batch of decodes must read."""
    return num_seqs * seq_len * 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize


def latent_bytes(num_seqs: int, seq_len: int) -> int:
    """Latents and rotary parts that a batch of decodes must read."""
    return num_seqs * seq_len * (RANK + ROTARY_DIM) * DTYPE.itemsize


def latent_operations(num_heads: int, num_seqs: int, seq_len: int) -> float:
    """Counts operations of the products with what is cached."""
    return 2 * num_seqs * seq_len * num_heads * (2 * RANK + ROTARY_DIM)


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
def tile_of(module: Any, name: str, tile: Tile) -> Iterator[None]:
    """Lets the backend use `tile`."""
    stored = getattr(module, name)
    setattr(module, name, lambda *_: tile)
    try:
        yield
    finally:
        setattr(module, name, stored)


def sweep_latents(rig: LatentRig) -> None:
    """Prints what other tiles take."""
    for num_heads, tiles in LATENT_TILES.items():
        print(f"\ntiles for latents with {num_heads} heads: us for", LATENT_DECODES)
        for tile in tiles:
            with tile_of(latent_attention, "latent_tile", tile):
                try:
                    times = [rig.ms("attention", num_heads, *case) for case in LATENT_DECODES]
                except triton.runtime.errors.OutOfResources:
                    continue
            print(tuple(tile), " ".join(f"{ms * 1e3:7.1f}" for ms in times), flush=True)


def sweep(rig: Rig, bandwidth: float) -> None:
    """Prints what other tiles reach."""
    print("\ndecode tiles: share of the bandwidth for", DECODES)
    for keys, warps, stages in itertools.product((32, 64, 128), (4, 8), (2, 3, 4)):
        tile = Tile(16, keys, warps, stages)
        with tile_of(triton_attention, "decode_tile", tile):
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
        with tile_of(triton_attention, "chunk_tile", tile):
            try:
                rates = [
                    chunk_operations(*case) / median_ms(rig.attend(rig.batch(1, case[0], sum(case)))) / 1e9
                    for case in CHUNKS
                ]
            except triton.runtime.errors.OutOfResources:
                continue
        print(tuple(tile), " ".join(f"{each:6.0f}" for each in rates), flush=True)


def add_decodes(page: Page, rig: Rig, bandwidth: float) -> None:
    """Adds the table of decodes."""
    page.add("", *table("decode: sequences | tokens | us | of the copy bandwidth"))
    for num_seqs, seq_len in DECODES:
        ms = median_ms(rig.attend(rig.batch(num_seqs, 1, seq_len)))
        share = decode_bytes(num_seqs, seq_len) / (ms * 1e-3) / bandwidth
        page.add(row(num_seqs, seq_len, f"{ms * 1e3:.1f}", f"{share:.2f}"))


def add_chunks(page: Page, rig: Rig, rate: float) -> None:
    """Adds the table of chunks of prompts."""
    page.add("", *table("chunk: query tokens | tokens before | us | TFLOP/s | of the product's rate | torch's us"))
    for num_query, num_before in CHUNKS:
        ms = median_ms(rig.attend(rig.batch(1, num_query, num_query + num_before)))
        reached = chunk_operations(num_query, num_before) / (ms * 1e-3)
        torch_us = f"{torch_attention_ms(num_query, num_before) * 1e3:.1f}"
        figures = (f"{ms * 1e3:.1f}", f"{reached / 1e12:.0f}", f"{reached / rate:.2f}", torch_us)
        page.add(row(num_query, num_before, *figures))


def add_latents(page: Page, rig: LatentRig, bandwidth: float, rate: float) -> None:
    """Adds the table of decodes over latents."""
    columns = "us | of the copy bandwidth | TFLOP/s | of the product's rate | torch's us | ratio"
    page.add("", *table(f"latents: heads | sequences | tokens | {columns}"))
    for num_heads, (num_seqs, seq_len) in itertools.product(LATENT_TILES, LATENT_DECODES):
        ms, torch_ms = (rig.ms(kernels, num_heads, num_seqs, seq_len) for kernels in ("attention", "torch"))
        share = latent_bytes(num_seqs, seq_len) / (ms * 1e-3) / bandwidth
        reached = latent_operations(num_heads, num_seqs, seq_len) / (ms * 1e-3)
        rates = (f"{share:.2f}", f"{reached / 1e12:.0f}", f"{reached / rate:.2f}")
        beside = (f"{torch_ms * 1e3:.1f}", f"{torch_ms / ms:.1f}")
        page.add(row(num_heads, num_seqs, seq_len, f"{ms * 1e3:.1f}", *rates, *beside))


def main() -> None:
    """Entry point."""
    parser = make_parser("benchmarks.gpu_kernels", __doc__)
    parser.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--sweep", action="store_true", help="try other tiles")
    args = parser.parse_args()
    torch.manual_seed(0)
    bandwidth, rate = copy_bandwidth(), matrix_rate()
    limits = {"copy": f"{bandwidth / 1e12:.2f} TB/s", f"{DTYPE} product": f"{rate / 1e12:.0f} TFLOP/s"}
    words = "`python -m benchmarks.gpu_kernels`, whose help says what is measured. Medians."
    page = Page("Triton kernels", words, describe_torch_machine() | {"triton": triton.__version__} | limits)
    if "decode" in args.sections or "chunk" in args.sections:
        rig = Rig()
        if "decode" in args.sections:
            add_decodes(page, rig, bandwidth)
        if "chunk" in args.sections:
            add_chunks(page, rig, rate)
        if args.sweep:
            sweep(rig, bandwidth)
    if "latents" in args.sections:
        latents = LatentRig()
        add_latents(page, latents, bandwidth, rate)
        if args.sweep:
            sweep_latents(latents)
    page.write(args.markdown)


if __name__ == "__main__":
    main()

"""Paged attention on GPUs by Triton kernels that read the cache in place.

A step of decodes only is launched the same whatever the lengths of its sequences, and reads nothing of the host's: it
can be captured as a CUDA graph. Chunks of prompts are cut into tiles on the host, so their steps cannot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from common.engine.contract.kv_groups import Window
from common.engine.devices.attention import AttentionArgs, AttentionMetadata, HeadNorms, KVSpec, ProjectedArgs, Rotary
from common.engine.devices.gpu.kernels.attention import attend_kernel, join_parts_kernel
from common.engine.devices.gpu.kernels.elementwise import prepare_kernel, store_kernel
from common.engine.devices.kv_quantization import LIMITS, head_dim_of

IS_INTERPRETED = isinstance(attend_kernel, InterpretedFunction)

# The interpreter (of Triton 3.7) multiplies bfloat16 as if it were integers, so it gets float32.
_FACTOR_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
_MAX_HEAD_DIM = 256
MIN_DOT = 16  # least size of each dimension of a product
_PROGRAMS_PER_PROCESSOR = 4  # that decodes are split into
_MAX_PARTS = 32
_FEW_PROCESSORS = 4  # of the interpreter, which has none: enough for decodes to be split


class Tile(NamedTuple):
    """Shape of one program's work, and how it is compiled."""

    rows: int  # query tokens times heads
    keys: int  # taken at a time
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class _Kind:
    """The constants that a layer's kernels are compiled for."""

    num_heads: int
    scale: float
    window: Window  # of size 0: none
    softcap: float
    sinks: torch.Tensor | None

    @classmethod
    def of(cls, num_heads: int, args: AttentionArgs) -> _Kind:
        return cls(num_heads, args.scale, args.window or Window(0), args.softcap or 0.0, args.sinks)


class TritonAttention:
    """See AttentionBackend and ProjectionAttention."""

    reads_whole_blocks = False

    def __init__(self, kv_cache: torch.Tensor) -> None:
        _, num_layers, _, num_kv_heads, block_size, self._row_numbers = kv_cache.shape
        head_dim = head_dim_of(kv_cache)
        self._limit = LIMITS.get(kv_cache.dtype, 0.0)
        if kv_cache.dtype == torch.float8_e4m3fn:
            kv_cache = kv_cache.view(torch.uint8)
        self._num_kv_heads = num_kv_heads
        self._block_size = block_size
        self._head_dim = head_dim
        self._padded_dim = max(MIN_DOT, triton.next_power_of_2(head_dim))
        self._block_stride = kv_cache.stride(0)
        self._device = kv_cache.device
        self._layers = [kv_cache[0, layer] for layer in range(num_layers)]
        self._num_processors = num_processors(kv_cache.device)
        self._batch: AttentionMetadata | None = None
        self._tiles: dict[int, torch.Tensor] = {}  # of the step's chunks, by the tokens of a tile

    def begin_step(self, batch: AttentionMetadata) -> None:
        """See AttentionBackend."""
        self._batch = batch
        self._tiles = {}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, args: AttentionArgs
    ) -> torch.Tensor:
        """See AttentionBackend."""
        assert self._batch is not None
        key, value = key[0], value[0]
        store_kernel[(len(key), self._num_kv_heads)](
            key,
            value,
            self._layers[layer],
            self._batch.slot_mapping,
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            self._block_stride,
            NUM_KV_HEADS=self._num_kv_heads,
            HEAD_DIM=self._head_dim,
            PADDED_DIM=self._padded_dim,
            BLOCK_SIZE=self._block_size,
            ROW=self._row_numbers,
            LIMIT=self._limit,
            HAS_VALUES=True,
            num_warps=1,
        )
        query = query[0].contiguous()
        out = torch.empty_like(query)
        self._attend(layer, query, query.stride(0), out, _Kind.of(query.shape[1], args))
        return out[None]

    def begin_parts(self, parts: Sequence[AttentionMetadata]) -> None:
        """See ProjectionAttention."""
        (batch,) = parts
        self.begin_step(batch)

    def attend_projections(
        self, layer: int, part: int, qkv: torch.Tensor, projected: ProjectedArgs, rotary: Rotary
    ) -> torch.Tensor:
        """See ProjectionAttention."""
        assert self._batch is not None
        num_tokens = len(qkv)
        norms = projected.norms or HeadNorms(rotary.cosines, rotary.cosines, 0.0)  # not read
        all_heads = projected.num_heads + 2 * self._num_kv_heads
        prepare_kernel[(num_tokens,)](
            qkv,
            self._layers[layer],
            norms.query,
            norms.key,
            rotary.cosines,
            rotary.sines,
            rotary.positions,
            self._batch.slot_mapping,
            norms.epsilon,
            self._block_stride,
            NUM_HEADS=projected.num_heads,
            NUM_KV_HEADS=self._num_kv_heads,
            PADDED_HEADS=triton.next_power_of_2(all_heads),
            HEAD_DIM=self._head_dim,
            PADDED_HALF=triton.next_power_of_2(self._head_dim // 2),
            BLOCK_SIZE=self._block_size,
            ROW=self._row_numbers,
            LIMIT=self._limit,
            HAS_NORMS=projected.norms is not None,
            num_warps=4,
        )
        width = projected.num_heads * self._head_dim
        out = torch.empty((num_tokens, width), dtype=qkv.dtype, device=qkv.device)
        self._attend(layer, qkv, qkv.stride(0), out, _Kind.of(projected.num_heads, projected.args))
        return out

    def _attend(self, layer: int, query: torch.Tensor, query_stride: int, out: torch.Tensor, kind: _Kind) -> None:
        """Attention of all query tokens over the cache. The heads of a token are in a row in `query` and `out`."""
        assert self._batch is not None
        if num_decodes := self._batch.num_decodes:
            parts = self._num_parts(num_decodes)
            partial_out = partial_weight = out  # not used
            if parts > 1:
                shape = (num_decodes, kind.num_heads, parts)
                partial_out = torch.empty((*shape, self._head_dim), dtype=torch.float32, device=self._device)
                partial_weight = torch.empty(shape, dtype=torch.float32, device=self._device)
            tile = self._decode_tile(kind.num_heads // self._num_kv_heads, query.dtype)
            self._launch(layer, query, query_stride, out, kind, tile, None, partial_out, partial_weight, parts)
            if parts > 1:
                join_parts_kernel[(num_decodes * kind.num_heads, 1)](
                    partial_out,
                    partial_weight,
                    out,
                    PARTS=parts,
                    PADDED_PARTS=triton.next_power_of_2(parts),
                    HEAD_DIM=self._head_dim,
                    DIMS=self._padded_dim,
                    num_warps=4,
                )
        if num_decodes < len(self._batch.seq_lens):
            group = kind.num_heads // self._num_kv_heads
            tile = self._chunk_tile(group, query.dtype)
            tiles = self._tiles_of(tile.rows // group)
            self._launch(layer, query, query_stride, out, kind, tile, tiles, out, out, 1)

    def _launch(
        self,
        layer: int,
        query: torch.Tensor,
        query_stride: int,
        out: torch.Tensor,
        kind: _Kind,
        tile: Tile,
        tiles: torch.Tensor | None,
        partial_out: torch.Tensor,
        partial_weight: torch.Tensor,
        parts: int,
    ) -> None:
        batch = self._batch
        assert batch is not None
        num_tiles = batch.num_decodes if tiles is None else len(tiles)
        attend_kernel[(num_tiles, self._num_kv_heads, parts)](
            query,
            self._layers[layer],
            query if kind.sinks is None else kind.sinks,
            batch.seq_lens_tensor if tiles is None else tiles,
            batch.seq_lens_tensor,
            batch.block_tables,
            out,
            partial_out,
            partial_weight,
            kind.scale,
            query_stride,
            batch.block_tables.stride(0),
            self._block_stride,
            NUM_KV_HEADS=self._num_kv_heads,
            GROUP=kind.num_heads // self._num_kv_heads,
            HEAD_DIM=self._head_dim,
            PADDED_DIM=self._padded_dim,
            BLOCK_SIZE=self._block_size,
            ROW=self._row_numbers,
            LIMIT=self._limit,
            ROWS=tile.rows,
            KEYS=tile.keys,
            PARTS=parts,
            WINDOW=kind.window.size,
            IS_CHUNKED=kind.window.is_chunked,
            SOFTCAP=kind.softcap,
            HAS_SINKS=kind.sinks is not None,
            FACTOR_TYPE=factor_type(query.dtype),
            IS_DECODE=tiles is None,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )

    def _decode_tile(self, group: int, dtype: torch.dtype) -> Tile:
        return decode_tile(group, self._head_dim, dtype, is_quantized=self._limit > 0)

    def _chunk_tile(self, group: int, dtype: torch.dtype) -> Tile:
        return chunk_tile(group, self._head_dim, dtype, is_quantized=self._limit > 0)

    def _num_parts(self, num_decodes: int) -> int:
        """A power of two, so that few variants are compiled."""
        wanted = _PROGRAMS_PER_PROCESSOR * self._num_processors // (num_decodes * self._num_kv_heads)
        return min(_MAX_PARTS, 1 << max(0, wanted.bit_length() - 1)) if wanted else 1

    def _tiles_of(self, num_tokens: int) -> torch.Tensor:
        """The chunks of the step cut into tiles of so many query tokens; see `attend_kernel`."""
        assert self._batch is not None
        if num_tokens not in self._tiles:
            tiles = torch.from_numpy(cut_chunks(self._batch, num_tokens))
            if self._device.type == "cuda":
                tiles = tiles.pin_memory()
            self._tiles[num_tokens] = tiles.to(self._device, non_blocking=True)
        return self._tiles[num_tokens]


class BatchInvariantTritonAttention(TritonAttention):
    """Attention whose results do not depend on what else is in a batch, nor on how a prompt was cut into chunks:
    decodes and chunks take the same keys at a time, in tiles of one shape, and decodes are not split."""

    def _decode_tile(self, group: int, dtype: torch.dtype) -> Tile:
        return batch_invariant_tile(group, self._head_dim, dtype, is_quantized=self._limit > 0)

    def _chunk_tile(self, group: int, dtype: torch.dtype) -> Tile:
        return batch_invariant_tile(group, self._head_dim, dtype, is_quantized=self._limit > 0)

    def _num_parts(self, num_decodes: int) -> int:
        return 1


def factor_type(dtype: torch.dtype) -> Any:
    """In which kernels multiply numbers of a type."""
    return _FACTOR_TYPES[torch.float32 if IS_INTERPRETED else dtype]


def cut_chunks(batch: AttentionMetadata, num_tokens: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Tiles of at most `num_tokens` query tokens: [tiles, 4], sequence, first query token, number of query tokens and
    position of the first. The longest come first, so that no long one is left to run alone at the end."""
    parts = []
    for sequence in range(batch.num_decodes, len(batch.seq_lens)):
        start, end = batch.query_start[sequence], batch.query_start[sequence + 1]
        firsts = np.arange(start, end, num_tokens)
        positions = firsts + (batch.seq_lens[sequence] - end)
        parts.append(
            np.stack([np.full_like(firsts, sequence), firsts, np.minimum(num_tokens, end - firsts), positions], axis=1)
        )
    tiles: np.ndarray[Any, np.dtype[np.int64]] = np.concatenate(parts)
    return np.ascontiguousarray(tiles[np.argsort(-tiles[:, 3], kind="stable")])


def decode_tile(group: int, head_dim: int, dtype: torch.dtype, *, is_quantized: bool = False) -> Tile:
    """Returns the tile for one query token of each sequence. Found with `benchmarks.gpu_kernels --sweep` on an H100,
    but for quantised KV: there it is the largest of these that fits the registers, as compiled for GPUs from 80 on."""
    rows = max(MIN_DOT, triton.next_power_of_2(group))
    if dtype == torch.float32:
        if is_quantized:
            return _restored_tile(rows, head_dim)
        return Tile(rows, 32 if head_dim <= 64 else 16, 4, 2)
    return Tile(rows, 32 if head_dim > 128 else 64, 4, 2)


def chunk_tile(group: int, head_dim: int, dtype: torch.dtype, *, is_quantized: bool = False) -> Tile:
    """Returns the tile for chunks of prompts; see `decode_tile`."""
    least = max(MIN_DOT, triton.next_power_of_2(group))
    if dtype == torch.float32:
        if is_quantized:
            return _restored_tile(least, head_dim)
        return Tile(max(least, 32), 32, 4, 2) if head_dim <= 64 else Tile(max(least, 32), 16, 8, 2)
    if head_dim > 128:
        return Tile(max(least, 64), 32, 8, 2)
    return Tile(max(least, 64), 64, 8, 2) if is_quantized else Tile(max(least, 128), 128, 8, 2)


def batch_invariant_tile(group: int, head_dim: int, dtype: torch.dtype, *, is_quantized: bool = False) -> Tile:
    """Returns the tile for decodes and chunks alike. The kernel takes as many keys at a time where it masks some, which
    it does with up to 64."""
    least = max(MIN_DOT, triton.next_power_of_2(group))
    if dtype == torch.float32:
        if is_quantized:
            return _restored_tile(least, head_dim)
        return Tile(least, 32 if head_dim <= 64 else 16, 4, 2)
    return Tile(max(least, 64), 32 if head_dim > 128 else 64, 4, 2)


def _restored_tile(rows: int, head_dim: int) -> Tile:
    """Returns the tile for float32 numbers that are restored: they are in registers when they are multiplied."""
    return Tile(rows, 32 if head_dim <= 64 else 16, 8, 2)


def runs_on(device: torch.device) -> bool:
    """True if the kernels run on the device: a GPU, or the CPU with Triton's interpreter."""
    return device.type == "cuda" or IS_INTERPRETED


def compiled_for(device: torch.device) -> str:
    """Names what kernels are compiled by and for, as far as it decides how they round."""
    target = torch.cuda.get_device_capability(device) if device.type == "cuda" else "interpreter"
    return f"triton {triton.__version__}, {target}"


def supports(device: torch.device, spec: KVSpec) -> bool:
    """True if the kernels can work on the KV cache of a model."""
    has_heads = spec.value_head_dim > 0 and spec.head_dim % 2 == 0 and spec.head_dim <= _MAX_HEAD_DIM
    return runs_on(device) and has_heads


def num_processors(device: torch.device) -> int:
    """Returns how many programs run side by side at least."""
    if device.type != "cuda":
        return _FEW_PROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def capability_of(device: torch.device) -> int:
    """Returns the compute capability, as 90; 0 in the interpreter."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor

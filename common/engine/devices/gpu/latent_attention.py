"""Paged attention over latents on GPUs: decodes by a Triton kernel that reads the cache in place, chunks of prompts by
torch's operators, or by the same kernel where latents are not expanded.

As with other attention, a step of decodes only is launched the same whatever the lengths, and can be captured.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
from torch.nn import functional
from torch.nn.attention.bias import CausalBias, CausalVariant

from common.engine.devices.attention import AttentionArgs, AttentionMetadata, KVSpec, LatentExpansion
from common.engine.devices.gpu.attention import MIN_DOT, Tile, capability_of, factor_type, num_processors, runs_on
from common.engine.devices.gpu.kernels.attention import join_parts_kernel
from common.engine.devices.gpu.kernels.elementwise import store_kernel
from common.engine.devices.gpu.kernels.latent_attention import attend_latents_kernel
from common.engine.devices.torch.attention import Chunk, chunks_of
from common.engine.devices.torch.latent_attention import TorchLatentAttention, expands

_MAX_DIM = 1024  # of latents and rotary parts
_MAX_ROWS = 64  # heads of a program
_PROGRAMS_PER_PROCESSOR = 2
_MAX_PARTS = 64
_HOPPER = (
    90  # whose memory of a program holds larger tiles than that of older GPUs, and of newer ones as they are compiled
)
_JOINED_DIMS = 128  # of a program that joins parts
_MAX_EXPANDED_BYTES = 512 << 20  # keys and values of some heads at a time


class TritonLatentAttention(TorchLatentAttention):
    """See AttentionBackend. For layers without window, soft cap and sinks."""

    reads_whole_blocks = False

    def __init__(self, kv_cache: torch.Tensor) -> None:
        super().__init__(kv_cache)
        self._layers = [kv_cache[0, layer] for layer in range(kv_cache.shape[1])]
        self._block_stride = kv_cache.stride(0)
        self._num_processors = num_processors(kv_cache.device)
        self._capability = capability_of(kv_cache.device)

    def begin_step(self, batch: AttentionMetadata) -> None:
        """See AttentionBackend."""
        self._batch = batch
        self._chunks = chunks_of(batch)

    def attend_absorbed(self, layer: int, query: torch.Tensor, args: AttentionArgs) -> torch.Tensor:
        """See TorchLatentAttention. The result has no rotary parts."""
        assert self._batch is not None
        num_decodes = query.shape[1]
        seq_lens, tables = self._batch.seq_lens_tensor[:num_decodes], self._batch.block_tables
        return self._attend_tokens(layer, query[0], seq_lens, tables, args)[None]

    def _write(self, layer: int, key: torch.Tensor) -> None:
        assert self._batch is not None
        store_kernel[(key.shape[1], 1)](
            key,
            key,  # there are no values
            self._layers[layer],
            self._batch.slot_mapping,
            key.stride(1),
            0,
            0,
            0,
            self._block_stride,
            NUM_KV_HEADS=1,
            HEAD_DIM=self._head_dim,
            PADDED_DIM=triton.next_power_of_2(self._head_dim),
            BLOCK_SIZE=self._block_size,
            ROW=self._head_dim,
            LIMIT=0.0,
            HAS_VALUES=False,
            num_warps=1,
        )

    def _attend_latents(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        chunk: Chunk,
        args: AttentionArgs,
        expansion: LatentExpansion,
    ) -> torch.Tensor:
        assert self._batch is not None
        if not expands(chunk, expansion):  # each token is a decode of the text up to it
            ends = torch.arange(chunk.seq_len - chunk.num_tokens, chunk.seq_len, device=query.device) + 1
            tables = self._batch.block_tables[chunk.sequence].expand(chunk.num_tokens, -1)
            absorbed = expansion.absorbed(query)[0]
            return expansion.values_of(self._attend_tokens(layer, absorbed, ends, tables, args)[None])
        cached = key[0, :, 0] if chunk.num_tokens == chunk.seq_len else self._gather_chunk(layer, chunk)[0][0, 0]
        mask = _causal_mask(chunk.num_tokens, chunk.seq_len)
        out = query.new_empty(*query.shape[:3], expansion.value_dim)
        num_numbers = chunk.seq_len * (expansion.weight.shape[1] + 2 * query.shape[3])  # expanded, keys, values
        num_at_once = max(1, _MAX_EXPANDED_BYTES // (num_numbers * query.itemsize))
        for first in range(0, query.shape[2], num_at_once):
            own = slice(first, first + num_at_once)
            keys, values = expansion._replace(weight=expansion.weight[own]).expand(cached)
            values = functional.pad(values, (0, keys.shape[2] - expansion.value_dim))
            attended = functional.scaled_dot_product_attention(
                query[:, :, own].transpose(1, 2), keys[None], values[None], attn_mask=mask, scale=args.scale
            )
            out[:, :, own] = attended[..., : expansion.value_dim].transpose(1, 2)
        return out

    def _attend_tokens(
        self, layer: int, query: torch.Tensor, seq_lens: torch.Tensor, tables: torch.Tensor, args: AttentionArgs
    ) -> torch.Tensor:
        """Attention of absorbed queries [tokens, heads, rank + rotary dim], each of the last token of a text of
        `seq_lens` tokens in the blocks `tables`. Returns [tokens, heads, rank]."""
        assert args.expansion is not None
        (num_tokens, num_heads, dim), rank = query.shape, args.expansion.rank
        tile = latent_tile(num_heads, query.dtype, self._capability)
        num_tiles = triton.cdiv(num_heads, tile.rows)
        parts = self._num_parts(num_tokens * num_tiles)
        out = query.new_empty(num_tokens, num_heads, rank)
        partial_out = partial_weight = out  # not used
        if parts > 1:
            shape = (num_tokens, num_heads, parts)
            partial_out = torch.empty((*shape, rank), dtype=torch.float32, device=query.device)
            partial_weight = torch.empty(shape, dtype=torch.float32, device=query.device)
        attend_latents_kernel[(num_tiles, num_tokens, parts)](
            query.contiguous(),
            self._layers[layer],
            seq_lens,
            tables,
            out,
            partial_out,
            partial_weight,
            args.scale,
            tables.stride(0),
            self._block_stride,
            parts,
            NUM_HEADS=num_heads,
            RANK=rank,
            ROTARY_DIM=dim - rank,
            PADDED_RANK=padded(rank),
            PADDED_ROTARY=padded(dim - rank),
            BLOCK_SIZE=self._block_size,
            ROWS=tile.rows,
            KEYS=tile.keys,
            HAS_PARTS=parts > 1,
            FACTOR_TYPE=factor_type(query.dtype),
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
        if parts > 1:
            join_parts_kernel[(num_tokens * num_heads, triton.cdiv(rank, _JOINED_DIMS))](
                partial_out,
                partial_weight,
                out,
                PARTS=parts,
                PADDED_PARTS=parts,
                HEAD_DIM=rank,
                DIMS=_JOINED_DIMS,
                num_warps=4,
            )
        return out

    def _num_parts(self, num_programs: int) -> int:
        """A power of two, so that few variants of what joins them are compiled."""
        wanted = _PROGRAMS_PER_PROCESSOR * self._num_processors // num_programs
        return 1 << (max(1, min(wanted, _MAX_PARTS)).bit_length() - 1)


def _causal_mask(num_tokens: int, seq_len: int) -> CausalBias:
    """Returns the mask of a text's last tokens, which kernels take as two lengths. Its own constructor would allocate
    its numbers on the host."""
    mask = torch.empty(0).as_subclass(CausalBias)
    CausalBias.__init__(mask, CausalVariant.LOWER_RIGHT, num_tokens, seq_len)
    return mask


def latent_tile(num_heads: int, dtype: torch.dtype, capability: int) -> Tile:
    """Returns the tile of a decode's heads and keys, on GPUs of a compute capability, as 90."""
    if dtype == torch.float32:
        return Tile(MIN_DOT, 16, 8, 2)
    rows = min(_MAX_ROWS, padded(num_heads))
    if rows == _MAX_ROWS:
        return Tile(rows, 64, 8, 2) if capability == _HOPPER else Tile(rows, 32, 8, 3)
    return Tile(rows, 32, 4 if rows == MIN_DOT else 8, 5)


def padded(size: int) -> int:
    """Returns the dimension of a matrix that holds so many."""
    return max(MIN_DOT, int(triton.next_power_of_2(size)))


def supports_latents(device: torch.device, spec: KVSpec, args: Sequence[AttentionArgs]) -> bool:
    """True if the kernel can work on what a model caches."""
    are_latents = bool(args) and all(each.expansion is not None for each in args)
    is_plain = all(each.window is None and each.softcap is None and each.sinks is None for each in args)
    return runs_on(device) and are_latents and is_plain and spec.head_dim <= _MAX_DIM

"""Paged attention in plain torch operations: for CPU, and the reference for every other backend.

Decodes are batched: their blocks are gathered into one padded [sequences, kv heads, tokens, head_dim] tensor per layer.
Lengths in a batch differ, so decodes of similar length form groups, each padded to its own longest. A prompt's chunk
runs alone through scaled_dot_product_attention, without reading the cache if nothing precedes it.

Padding is masked with -inf, which keeps it out of the softmax, but 0 * NaN is NaN: the cache must hold finite numbers
everywhere. It starts as zeros, and the runner clears each block before it begins to fill it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.nn import functional

from common.engine.contract.kv_groups import Window
from common.engine.devices.attention import AttentionArgs, AttentionMetadata
from common.engine.devices.kv_quantization import QUANTIZED, QuantizedVectors, head_dim_of, unpack

_MAX_PADDED_SHARE = 2  # a group's longest sequence has at most this many times the blocks of its shortest,
_FREE_PADDING_BLOCKS = 4  # or this many blocks more
# Gathered at once for a group of decodes. On a CPU it should stay in the cache between gathering and attending:
# measured with 9 MiB to gather per layer, a step takes a third less in groups of 2 to 8 MiB.
_MAX_GATHERED_BYTES_CPU = 4 << 20
_MAX_GATHERED_BYTES = 256 << 20
_MAX_SCORES = 1 << 22  # query tokens x visible tokens of one chunk that are masked at once


class _Gathered(NamedTuple):
    """Which rows of the cache a group reads, and which of the tokens read are visible."""

    rows: torch.Tensor  # [planes * sequences * kv heads * blocks], keys first, into the layer's view of the cache
    mask: torch.Tensor  # [sequences * kv heads, 1, tokens], 0 or -inf
    positions: torch.Tensor  # [tokens], or [sequences * kv heads, tokens]
    ends: torch.Tensor  # [sequences * kv heads, 1], one past the query's position

    @property
    def distances(self) -> torch.Tensor:
        """Positions relative to the query's, [sequences * kv heads, tokens]."""
        return self.positions - (self.ends - 1)


@dataclass(slots=True)
class DecodeGroup:
    """Decodes [start, end) of the batch."""

    start: int
    end: int
    num_blocks: int  # of the longest
    max_len: int
    by_window: dict[Window | None, _Gathered] = field(default_factory=dict)


@dataclass(slots=True)
class Chunk:
    """Query tokens [start, end) of the batch: the last ones of a sequence of `seq_len` tokens."""

    sequence: int
    start: int
    end: int
    seq_len: int
    rows: torch.Tensor | None = None
    masks: dict[tuple[Window | None, int], torch.Tensor] = field(default_factory=dict)  # by window and first of query

    @property
    def num_tokens(self) -> int:
        """The number of query tokens."""
        return self.end - self.start


def chunks_of(batch: AttentionMetadata) -> list[Chunk]:
    """Returns the chunks, which follow the decodes."""
    return [
        Chunk(i, batch.query_start[i], batch.query_start[i + 1], batch.seq_lens[i])
        for i in range(batch.num_decodes, len(batch.seq_lens))
    ]


class TorchAttention:
    """See AttentionBackend. Works on any device and dtype; softmax is computed in float32."""

    reads_whole_blocks = True

    def __init__(self, kv_cache: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """`dtype`: of queries and results; None: that of the cache, which is not quantised."""
        _, num_layers, num_planes, num_kv_heads, block_size, row_numbers = kv_cache.shape
        self._dtype = dtype = dtype or kv_cache.dtype
        self._quantized: list[list[QuantizedVectors]] = []  # by layer and plane
        if kv_cache.dtype in QUANTIZED:
            layers = range(num_layers)
            self._quantized = [[QuantizedVectors(kv_cache, layer, plane) for plane in range(2)] for layer in layers]
        self._num_planes = num_planes
        self._num_kv_heads = num_kv_heads
        self._block_size = block_size
        self._head_dim = head_dim_of(kv_cache)
        # Row (block, layer, plane, head, offset) is one token's vector. A layer's views begin at its first row, so that
        # one index, computed once per step, serves all layers.
        vectors = kv_cache.view(-1, row_numbers)
        stride = num_kv_heads * block_size
        self._key_vectors = [vectors[num_planes * layer * stride :] for layer in range(num_layers)]
        self._value_vectors = [each[stride:] for each in self._key_vectors]
        self._vectors_per_block = num_layers * num_planes * stride
        # Row (block, layer, plane, head) is a block's run of vectors for one head.
        runs = kv_cache.view(-1, block_size * row_numbers)
        self._runs = [runs[num_planes * layer * num_kv_heads :] for layer in range(num_layers)]
        self._runs_per_block = num_layers * num_planes * num_kv_heads
        # What the rows of a group are copied to. Fresh memory for each copy would cost more than the copy.
        self._workspace = runs.new_empty(0, block_size * row_numbers)
        device = kv_cache.device
        self._head_vectors = torch.arange(num_kv_heads, device=device) * block_size
        self._head_runs = torch.arange(num_planes * num_kv_heads, device=device).view(-1, 1, num_kv_heads, 1)
        max_bytes = _MAX_GATHERED_BYTES_CPU if kv_cache.is_cpu else _MAX_GATHERED_BYTES
        self._max_group_blocks = max_bytes // (num_planes * stride * self._head_dim * dtype.itemsize)
        self._hidden = torch.tensor(-torch.inf, dtype=dtype, device=device)
        self._visible = torch.zeros((), dtype=dtype, device=device)
        self._tokens = torch.arange(0, device=device)  # grows: 0, 1, 2, ...
        self._batch: AttentionMetadata | None = None
        self._write_rows = self._tokens
        self._groups: list[DecodeGroup] = []
        self._chunks: list[Chunk] = []

    def begin_step(self, batch: AttentionMetadata) -> None:
        """See AttentionBackend."""
        self._batch = batch
        block_ids = torch.div(batch.slot_mapping, self._block_size, rounding_mode="floor")
        first_rows = block_ids * (self._vectors_per_block - self._block_size) + batch.slot_mapping
        self._write_rows = (first_rows[:, None] + self._head_vectors).view(-1)  # [tokens * kv heads]
        self._groups = self._group_decodes(batch)
        self._chunks = chunks_of(batch)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, args: AttentionArgs
    ) -> torch.Tensor:
        """See AttentionBackend."""
        if self._quantized:
            self._write_quantized(layer, key, value)
        else:
            self._key_vectors[layer].index_copy_(0, self._write_rows, key.reshape(-1, self._head_dim))
            self._value_vectors[layer].index_copy_(0, self._write_rows, value.reshape(-1, self._head_dim))
        if len(self._groups) == 1 and not self._chunks:
            return self._attend_decodes(layer, query, self._groups[0], args)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for group in self._groups:
            rows = slice(group.start, group.end)
            out[:, rows] = self._attend_decodes(layer, query[:, rows], group, args)
        self._attend_chunks(layer, query, key, value, out, args)
        return out

    def _write_quantized(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Rounds keys and values [1, tokens, kv heads, head_dim] and puts them into the cache."""
        assert self._batch is not None
        for plane, vectors in zip(self._quantized[layer], (key, value), strict=True):
            plane.write(self._batch.slot_mapping, vectors[0])

    def _attend_chunks(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        args: AttentionArgs,
    ) -> None:
        """Attention of all chunks' tokens, written to their rows of `out` [1, num_tokens, heads, head_dim]."""
        for chunk in self._chunks:
            rows = slice(chunk.start, chunk.end)
            self._attend_chunk(layer, query[:, rows], key[:, rows], value[:, rows], out[:, rows], chunk, args)

    def _group_decodes(self, batch: AttentionMetadata) -> list[DecodeGroup]:
        groups: list[DecodeGroup] = []
        for i, seq_len in enumerate(batch.seq_lens[: batch.num_decodes]):
            num_blocks = -(-seq_len // self._block_size)
            if groups and self._may_join(groups[-1], num_blocks):
                groups[-1].end = i + 1
                continue
            groups.append(DecodeGroup(i, i + 1, num_blocks, seq_len))
        return groups

    def _may_join(self, group: DecodeGroup, num_blocks: int) -> bool:
        """True if one more sequence of `num_blocks` blocks fits the group."""
        longest = group.num_blocks
        if (group.end - group.start + 1) * longest > self._max_group_blocks:
            return False
        return longest <= num_blocks * _MAX_PADDED_SHARE or longest <= num_blocks + _FREE_PADDING_BLOCKS

    def _attend_decodes(self, layer: int, query: torch.Tensor, group: DecodeGroup, args: AttentionArgs) -> torch.Tensor:
        """Attention of query tokens [1, sequences, heads, head_dim]."""
        window = _within(args.window, group.max_len)
        gathered = group.by_window.get(window)
        if gathered is None:
            gathered = group.by_window[window] = self._gather_decodes(group, window)
        _, num_seqs, num_heads, head_dim = query.shape
        batch = num_seqs * self._num_kv_heads
        # [planes, sequences * kv heads, tokens, head_dim]
        planes = self._read(layer, gathered.rows).view(self._num_planes, batch, -1, head_dim)
        keys, values = planes[0], planes[-1]
        grouped = query.reshape(batch, num_heads // self._num_kv_heads, head_dim)
        if args.softcap is None:
            scores = torch.baddbmm(gathered.mask, grouped, keys.transpose(1, 2), alpha=args.scale)
        else:
            scores = torch.bmm(grouped, keys.transpose(1, 2)).mul_(args.scale)
            scores = _cap(scores, args.softcap).add_(gathered.mask)
        if args.slopes is not None:
            slopes = args.slopes.view(self._num_kv_heads, -1, 1).repeat(num_seqs, 1, 1)
            scores = scores + slopes * gathered.distances[:, None]
        if args.sinks is None:
            weights = _softmax(scores, values.dtype)
        else:
            sinks = args.sinks.view(1, self._num_kv_heads, -1, 1).expand(num_seqs, -1, -1, -1)
            weights = _softmax_with_sinks(scores, sinks.reshape(batch, -1, 1), values.dtype)
        return torch.bmm(weights, values).view(query.shape)

    def _gather_decodes(self, group: DecodeGroup, window: Window | None) -> _Gathered:
        assert self._batch is not None
        lens = self._batch.seq_lens_tensor[group.start : group.end]  # [sequences]
        tables = self._batch.block_tables[group.start : group.end, : group.num_blocks]
        ends = lens.repeat_interleave(self._num_kv_heads)[:, None]  # [sequences * kv heads, 1]
        if window is None:
            positions = self._arange(group.num_blocks * self._block_size)
            return _Gathered(self._run_rows(tables), self._decode_mask(positions >= ends), positions, ends)
        # Read the blocks that the window touches only: at most one more than it fills.
        width = min(group.num_blocks, -(-window.size // self._block_size) + 1)
        first_blocks = torch.div(window.first(lens - 1).clamp_(min=0), self._block_size, rounding_mode="floor")
        first_blocks = first_blocks.clamp_(max=group.num_blocks - width)
        tables = tables.gather(1, first_blocks[:, None] + self._arange(width))
        first_tokens = (first_blocks * self._block_size).repeat_interleave(self._num_kv_heads)[:, None]
        positions = first_tokens + self._arange(width * self._block_size)
        mask = self._decode_mask((positions >= ends) | (positions < window.first(ends - 1)))
        return _Gathered(self._run_rows(tables), mask, positions, ends)

    def _decode_mask(self, hidden: torch.Tensor) -> torch.Tensor:
        """[sequences * kv heads, 1, tokens] of 0 or -inf."""
        return torch.where(hidden, self._hidden, self._visible)[:, None]

    def _attend_chunk(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        chunk: Chunk,
        args: AttentionArgs,
    ) -> None:
        """Attention of query tokens [1, chunk tokens, heads, head_dim], whose keys and values are in the cache."""
        if chunk.num_tokens == chunk.seq_len and not self._quantized:  # nothing precedes: they need not be read back
            keys, values = key.transpose(1, 2), value.transpose(1, 2)
        else:
            keys, values = self._gather_chunk(layer, chunk)
        self._attend_to(keys, values, query, out, chunk, args)

    def _attend_to(
        self,
        keys: torch.Tensor,
        values: torch.Tensor,
        query: torch.Tensor,
        out: torch.Tensor,
        chunk: Chunk,
        args: AttentionArgs,
    ) -> None:
        """Attention of a chunk's tokens to keys and values of the whole sequence, [1, kv heads, seq_len, head_dim]."""
        window = _within(args.window, chunk.seq_len)
        plain = args.softcap is None and args.sinks is None and args.slopes is None
        query = query.transpose(1, 2)  # [1, heads, chunk tokens, head_dim]
        if plain and window is None and chunk.num_tokens == chunk.seq_len:
            attended = functional.scaled_dot_product_attention(
                query, keys, values, is_causal=True, scale=args.scale, enable_gqa=True
            )
            out.copy_(attended.transpose(1, 2))
            return
        attend = _masked_sdpa if plain else _masked_attention
        rows_at_once = max(16, _MAX_SCORES // chunk.seq_len)
        for first in range(0, chunk.num_tokens, rows_at_once):
            part = query[:, :, first : first + rows_at_once]
            mask = self._chunk_mask(chunk, window, first, part.shape[2])
            own = chunk.seq_len - chunk.num_tokens + first
            out[:, first : first + rows_at_once] = attend(part, keys, values, mask, args, own).transpose(1, 2)

    def _gather_chunk(self, layer: int, chunk: Chunk) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the whole sequence, [1, kv heads, seq_len, head_dim] each."""
        if chunk.rows is None:
            assert self._batch is not None
            num_blocks = -(-chunk.seq_len // self._block_size)
            chunk.rows = self._run_rows(self._batch.block_tables[chunk.sequence : chunk.sequence + 1, :num_blocks])
        planes = self._read(layer, chunk.rows).view(self._num_planes, 1, self._num_kv_heads, -1, self._head_dim)
        planes = planes[:, :, :, : chunk.seq_len]
        return planes[0], planes[-1]

    def _chunk_mask(self, chunk: Chunk, window: Window | None, first: int, num_rows: int) -> torch.Tensor:
        """[num_rows, seq_len] of 0 or -inf for query tokens [first, first + num_rows) of the chunk."""
        mask = chunk.masks.get((window, first))
        if mask is None:
            visible = self._arange(chunk.seq_len)[None, :]
            own = visible[:, chunk.seq_len - chunk.num_tokens + first :][:, :num_rows].transpose(0, 1)
            hidden = visible > own
            if window is not None:
                hidden |= visible < window.first(own)
            mask = chunk.masks[window, first] = torch.where(hidden, self._hidden, self._visible)
        return mask

    def _run_rows(self, tables: torch.Tensor) -> torch.Tensor:
        """Rows of a layer's runs: block tables [sequences, blocks] -> [planes * sequences * kv heads * blocks]."""
        return (tables[None, :, None, :] * self._runs_per_block + self._head_runs).view(-1)

    def _read(self, layer: int, rows: torch.Tensor) -> torch.Tensor:
        """Vectors of rows of the layer's runs, [rows, block_size * head_dim]. Valid until the next read."""
        if len(self._workspace) < len(rows):
            self._workspace = self._workspace.new_empty(len(rows) + len(rows) // 4, self._workspace.shape[1])
        found = torch.index_select(self._runs[layer], 0, rows, out=self._workspace[: len(rows)])
        if not self._quantized:
            return found
        return unpack(found.view(len(rows), self._block_size, -1), self._dtype).flatten(1)

    def _arange(self, length: int) -> torch.Tensor:
        if len(self._tokens) < length:
            self._tokens = torch.arange(max(length, 2 * len(self._tokens)), device=self._tokens.device)
        return self._tokens[:length]


def _within(window: Window | None, length: int) -> Window | None:
    """The window, if it hides anything of so many tokens."""
    return None if window is None or window.size >= length else window


def _masked_sdpa(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, args: AttentionArgs, own: int
) -> torch.Tensor:
    return functional.scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, scale=args.scale, enable_gqa=True
    )


def _masked_attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, args: AttentionArgs, own: int
) -> torch.Tensor:
    """Attention with a soft cap, sinks or ALiBi. [1, heads, tokens, head_dim] -> the same. `own`: position of the first
    token."""
    _, num_heads, num_tokens, head_dim = query.shape
    num_kv_heads = keys.shape[1]
    grouped = query.reshape(1, num_kv_heads, -1, head_dim)  # [1, kv heads, group * tokens, head_dim]
    scores = torch.matmul(grouped, keys.transpose(2, 3)).mul_(args.scale).view(num_heads, num_tokens, -1)
    scores = _cap(scores, args.softcap).add_(mask)
    if args.slopes is not None:
        positions = torch.arange(scores.shape[2], device=scores.device)
        distances = positions - (own + positions[:num_tokens, None])
        scores = scores + args.slopes.view(-1, 1, 1) * distances
    if args.sinks is None:
        weights = _softmax(scores, values.dtype)
    else:
        weights = _softmax_with_sinks(scores, args.sinks.view(-1, 1, 1), values.dtype)
    return torch.matmul(weights.view(1, num_kv_heads, -1, keys.shape[2]), values).view(query.shape)


def _cap(scores: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def _softmax(scores: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(dtype)


def _softmax_with_sinks(scores: torch.Tensor, sinks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Softmax of [batch, rows, tokens] with one more logit per row, whose share is dropped. Sinks are [batch, 1 or
    rows, 1]."""
    sinks = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return _softmax(torch.cat([scores, sinks], dim=-1), dtype)[..., :-1]

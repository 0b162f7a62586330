"""Paged attention on CPU, by compiled kernels that read the cache in place. Chunks of prompts go through torch where no
kernel fits: for blocks and heads of odd sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from common.engine.devices.attention import AttentionArgs, AttentionMetadata, HeadNorms, KVSpec, ProjectedArgs, Rotary
from common.engine.devices.cpu.kernels.attention import (
    CacheShape,
    Scores,
    decode_kernel,
    fused_decode_kernel,
    prepare_kernel,
    store_kernel,
)
from common.engine.devices.cpu.kernels.chunk_attention import (
    can_attend_chunks,
    chunk_attention_kernel,
    rows_per_task,
    whole_tiles,
)
from common.engine.devices.cpu.kernels.compiled import Call, result, threads_for
from common.engine.devices.cpu.kernels.language import element_type_of
from common.engine.devices.cpu.kernels.threads import can_run_kernels
from common.engine.devices.cpu.kernels.tiles import has_tiles
from common.engine.devices.torch.attention import Chunk, DecodeGroup, TorchAttention, chunks_of
from common.errors import ConfigError

_NUMBERS_PER_TOKEN = 32  # that attending to one token's head is worth, in numbers that an elementwise kernel computes


class _Part(NamedTuple):
    """A part of a step's batch."""

    batch: AttentionMetadata
    chunks: list[Chunk]
    decode_threads: int


class CpuAttention(TorchAttention):
    """See AttentionBackend and ProjectionAttention. For float32 and bfloat16."""

    def __init__(self, kv_cache: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """See TorchAttention."""
        super().__init__(kv_cache, dtype)
        self._cache = kv_cache
        num_layers = kv_cache.shape[1]
        self._decode: list[Call | None] = [None] * num_layers
        self._fused: list[Call | None] = [None] * num_layers
        self._prepare: list[Call | None] = [None] * num_layers
        self._store: list[Call | None] = [None] * num_layers
        self._chunk: list[Call | None] = [None] * num_layers
        self._decode_threads = 1
        self._parts: list[_Part] = []
        self._tiled = self._dtype == torch.bfloat16 and has_tiles()
        self._reads_chunks = can_attend_chunks(self._shape(1), tiled=self._tiled)

    def begin_step(self, batch: AttentionMetadata) -> None:
        """See AttentionBackend."""
        super().begin_step(batch)
        self._decode_threads = self._threads_of(batch)

    def begin_parts(self, parts: Sequence[AttentionMetadata]) -> None:
        """See ProjectionAttention."""
        self._parts = [_Part(batch, chunks_of(batch), self._threads_of(batch)) for batch in parts]

    def _threads_of(self, batch: AttentionMetadata) -> int:
        num_read = sum(batch.seq_lens[: batch.num_decodes]) * self._num_kv_heads
        return threads_for(num_read * _NUMBERS_PER_TOKEN)

    def attend_projections(
        self, layer: int, part: int, qkv: torch.Tensor, projected: ProjectedArgs, rotary: Rotary
    ) -> torch.Tensor:
        """See ProjectionAttention."""
        self._batch, self._chunks, self._decode_threads = self._parts[part]
        batch = self._batch
        width = projected.num_heads * self._head_dim
        out = result((len(qkv), width), qkv.dtype)
        num_decodes = batch.num_decodes
        if num_decodes:
            self._decode_projections(layer, qkv, out, projected, rotary, batch)
        if self._chunks:
            self._prepare_projections(layer, qkv, num_decodes, projected, rotary, batch)
            heads = qkv.view(1, len(qkv), -1, self._head_dim)
            query, key, value = torch.split(heads, [projected.num_heads, self._num_kv_heads, self._num_kv_heads], dim=2)
            self._attend_chunks(layer, query, key, value, out.view(1, len(out), -1, self._head_dim), projected.args)
        return out

    def _decode_projections(
        self,
        layer: int,
        qkv: torch.Tensor,
        out: torch.Tensor,
        projected: ProjectedArgs,
        rotary: Rotary,
        batch: AttentionMetadata,
    ) -> None:
        """The decodes, which come first, from projections to attention. The fused kernel writes what only its own
        sequence reads."""
        if batch.has_drafts:
            num_decodes = batch.num_decodes
            self._prepare_projections(layer, qkv[:num_decodes], 0, projected, rotary, batch)
            query = qkv[:num_decodes].view(1, num_decodes, -1, self._head_dim)[:, :, : projected.num_heads]
            self._attend_queries(layer, query, out, projected.args)
            return
        call = self._fused[layer] or self._fused_call(layer, projected)
        self._point(call, qkv, rotary, batch, 0)
        self._point_to_sequences(call, batch, out)
        call.run(batch.num_decodes * self._num_kv_heads, self._decode_threads)

    def _prepare_projections(
        self,
        layer: int,
        qkv: torch.Tensor,
        first_token: int,
        projected: ProjectedArgs,
        rotary: Rotary,
        batch: AttentionMetadata,
    ) -> None:
        """Norms, rotary embedding, and writing to the cache."""
        call = self._prepare[layer] or self._prepare_call(layer, projected)
        self._point(call, qkv, rotary, batch, first_token)
        num_tokens = len(qkv) - first_token
        call.run(num_tokens * self._num_kv_heads, threads_for(num_tokens * qkv.shape[1]))

    def _write_quantized(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """See TorchAttention."""
        assert self._batch is not None
        _, num_tokens, num_kv_heads, head_dim = key.shape
        call = self._store[layer] or self._store_call(layer)
        key, value = (each if each.stride()[2:] == (head_dim, 1) else each.contiguous() for each in (key, value))
        call.point("key", key)
        call.set("key_stride", key.stride(1))
        call.point("value", value)
        call.set("value_stride", value.stride(1))
        call.point("slots", self._batch.slot_mapping)
        call.run(num_tokens * num_kv_heads, threads_for(num_tokens * num_kv_heads * head_dim))

    def _group_decodes(self, batch: AttentionMetadata) -> list[DecodeGroup]:
        """All in one: kernels need no padding."""
        if not batch.num_decodes:
            return []
        return [DecodeGroup(0, batch.num_decodes, 0, batch.seq_lens[0])]

    def _attend_decodes(self, layer: int, query: torch.Tensor, group: DecodeGroup, args: AttentionArgs) -> torch.Tensor:
        """Attention of query tokens [1, sequences, heads, head_dim]."""
        out = torch.empty(query.shape, dtype=query.dtype)
        self._attend_queries(layer, query, out, args)
        return out

    def _attend_queries(self, layer: int, query: torch.Tensor, out: torch.Tensor, args: AttentionArgs) -> None:
        assert self._batch is not None
        if query.stride()[2:] != (self._head_dim, 1):
            query = query.contiguous()
        call = self._decode[layer] or self._decode_call(layer, query.shape[2], args)
        call.point("query", query)
        call.set("query_stride", query.stride(1))
        self._point_to_sequences(call, self._batch, out)
        call.run(query.shape[1] * self._num_kv_heads, self._decode_threads)

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
        """See TorchAttention."""
        if not self._reads_chunks:
            super()._attend_chunk(layer, query, key, value, out, chunk, args)
            return
        self._attend_rows(layer, query, out, chunk.sequence, 1, args)

    def _attend_rows(
        self, layer: int, query: torch.Tensor, out: torch.Tensor, first: int, num_sequences: int, args: AttentionArgs
    ) -> None:
        """Attention of the sequences from `first` on, which have as many query tokens each."""
        assert self._batch is not None
        _, num_tokens, num_heads, head_dim = query.shape
        if query.stride()[2:] != (head_dim, 1):
            query = query.contiguous()
        tokens_each = num_tokens // num_sequences
        num_tiles = -(-tokens_each * (num_heads // self._num_kv_heads) // rows_per_task(tiled=self._tiled))
        call = self._chunk[layer] or self._chunk_call(layer, num_heads, args)
        tables = self._batch.block_tables
        call.point("query", query)
        call.set("query_stride", query.stride(1))
        call.point("out", out)
        call.point("seq_lens", self._batch.seq_lens_tensor[first:])
        call.point("block_tables", tables[first:])
        call.set("table_width", tables.stride(0))
        call.set("num_tokens", tokens_each)
        call.set("num_tiles", num_tiles)
        num_read = sum(self._batch.seq_lens[first : first + num_sequences]) * tokens_each
        call.run(num_sequences * num_tiles * self._num_kv_heads, threads_for(num_read * num_heads))

    def _point(self, call: Call, qkv: torch.Tensor, rotary: Rotary, batch: AttentionMetadata, first_token: int) -> None:
        """Sets the arguments of projections, from a token on."""
        call.point("qkv", qkv[first_token:])
        call.point("slots", batch.slot_mapping[first_token:])
        call.point("positions", rotary.positions[first_token:])
        call.point("cosines", rotary.cosines)
        call.point("sines", rotary.sines)

    def _point_to_sequences(self, call: Call, batch: AttentionMetadata, out: torch.Tensor) -> None:
        call.point("seq_lens", batch.seq_lens_tensor)
        call.point("block_tables", batch.block_tables)
        call.set("table_width", batch.block_tables.shape[1])
        call.point("out", out)

    def _store_call(self, layer: int) -> Call:
        call = Call(store_kernel(self._shape(self._num_kv_heads)), cache=self._layer_address(layer))
        self._store[layer] = call
        return call

    def _decode_call(self, layer: int, num_heads: int, args: AttentionArgs) -> Call:
        kernel = decode_kernel(self._shape(num_heads), scores_of(args))
        call = Call(kernel, cache=self._layer_address(layer))
        self._decode[layer] = _with_sinks(call, args)
        return call

    def _fused_call(self, layer: int, projected: ProjectedArgs) -> Call:
        shape, has_norms = self._shape(projected.num_heads), projected.norms is not None
        call = Call(
            fused_decode_kernel(shape, scores_of(projected.args), has_norms=has_norms), cache=self._layer_address(layer)
        )
        self._fused[layer] = _with_norms(_with_sinks(call, projected.args), projected.norms)
        return call

    def _prepare_call(self, layer: int, projected: ProjectedArgs) -> Call:
        kernel = prepare_kernel(self._shape(projected.num_heads), has_norms=projected.norms is not None)
        call = Call(kernel, cache=self._layer_address(layer))
        self._prepare[layer] = _with_norms(call, projected.norms)
        return call

    def _chunk_call(self, layer: int, num_heads: int, args: AttentionArgs) -> Call:
        kernel = chunk_attention_kernel(self._shape(num_heads), scores_of(args), tiled=self._tiled)
        call = Call(kernel, cache=self._layer_address(layer), configuration=whole_tiles())
        self._chunk[layer] = _with_sinks(call, args)
        return call

    def _shape(self, num_heads: int) -> CacheShape:
        _, num_layers, _, num_kv_heads, block_size, _ = self._cache.shape
        quantized = element_type_of(self._cache.dtype) if self._quantized else None
        element = element_type_of(self._dtype)
        return CacheShape(element, num_layers, num_heads, num_kv_heads, block_size, self._head_dim, quantized)

    def _layer_address(self, layer: int) -> int:
        return self._cache[0, layer].data_ptr()


class BatchInvariantAttention(CpuAttention):
    """Attention whose results do not depend on what else is in a batch, nor on how a prompt was cut into chunks: each
    token goes through the kernel of chunks, as a decode too. Raises ConfigError if that does not take the cache."""

    def __init__(self, kv_cache: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        super().__init__(kv_cache, dtype)
        if not self._reads_chunks:
            raise ConfigError.of(
                "batch_invariant",
                "the kernels need a --block-size that is a multiple of 16, and heads whose size is one of 16 (of 32 in "
                "bfloat16 on a processor with AMX)",
            )

    def _decode_projections(
        self,
        layer: int,
        qkv: torch.Tensor,
        out: torch.Tensor,
        projected: ProjectedArgs,
        rotary: Rotary,
        batch: AttentionMetadata,
    ) -> None:
        """See CpuAttention."""
        num_decodes = batch.num_decodes
        decodes = qkv[:num_decodes]
        self._prepare_projections(layer, decodes, 0, projected, rotary, batch)
        query = decodes.view(1, num_decodes, -1, self._head_dim)[:, :, : projected.num_heads]
        self._attend_rows(layer, query, out, 0, num_decodes, projected.args)


def supports(spec: KVSpec) -> bool:
    """True if the kernels can work on the KV cache of a model."""
    return (
        can_run_kernels()
        and spec.dtype in (torch.float32, torch.bfloat16)
        and spec.head_dim == spec.value_head_dim
        and spec.head_dim % 2 == 0
    )


def scores_of(args: AttentionArgs) -> Scores:
    """How a layer turns queries and keys into scores."""
    return Scores(args.scale, args.window, args.softcap, args.sinks is not None)


def _with_sinks(call: Call, args: AttentionArgs) -> Call:
    if args.sinks is not None:
        call.keep("sinks", args.sinks.detach().float().contiguous())
    return call


def _with_norms(call: Call, norms: HeadNorms | None) -> Call:
    if norms is not None:
        call.keep("query_norm", norms.query)
        call.keep("key_norm", norms.key)
        call.keep("epsilon", torch.tensor(norms.epsilon))
    return call

"""Paged attention on CPU, by compiled kernels that read the cache in place. Chunks of prompts go through torch where no
kernel fits: in bfloat16 on processors without matrix instructions, and for blocks of odd sizes."""

from __future__ import annotations

import torch

from common.engine.attention.base import AttentionArgs, AttentionMetadata, HeadNorms, KVSpec, ProjectedArgs, Rotary
from common.engine.attention.torch_backend import Chunk, DecodeGroup, TorchAttention
from common.engine.cpu_kernels.attention import (
    CacheShape,
    Scores,
    decode_kernel,
    fused_decode_kernel,
    prepare_kernel,
)
from common.engine.cpu_kernels.chunk_attention import (
    can_attend_chunks,
    chunk_attention_kernel,
    rows_per_task,
    whole_tiles,
)
from common.engine.cpu_kernels.compiled import Call, has_openmp, threads_for
from common.engine.cpu_kernels.language import element_type_of
from common.engine.cpu_kernels.tiled_linear import has_tiles

_NUMBERS_PER_TOKEN = 32  # that attending to one token's head is worth, in numbers that an elementwise kernel computes


class CpuAttention(TorchAttention):
    """See AttentionBackend and ProjectionAttention. For float32 and bfloat16."""

    def __init__(self, kv_cache: torch.Tensor) -> None:
        super().__init__(kv_cache)
        self._cache = kv_cache
        num_layers = kv_cache.shape[1]
        self._decode: list[Call | None] = [None] * num_layers
        self._fused: list[Call | None] = [None] * num_layers
        self._prepare: list[Call | None] = [None] * num_layers
        self._chunk: list[Call | None] = [None] * num_layers
        self._decode_threads = 1
        self._tiled = kv_cache.dtype == torch.bfloat16
        self._reads_chunks = (has_tiles() or not self._tiled) and can_attend_chunks(self._shape(1), tiled=self._tiled)

    def begin_step(self, batch: AttentionMetadata) -> None:
        """See AttentionBackend."""
        super().begin_step(batch)
        num_read = sum(batch.seq_lens[: batch.num_decodes]) * self._num_kv_heads
        self._decode_threads = threads_for(num_read * _NUMBERS_PER_TOKEN)

    def attend_projections(
        self, layer: int, qkv: torch.Tensor, projected: ProjectedArgs, rotary: Rotary
    ) -> torch.Tensor:
        """See ProjectionAttention."""
        batch = self._batch
        assert batch is not None
        num_decodes = batch.num_decodes
        width = projected.num_heads * self._head_dim
        out = torch.empty((len(qkv), width), dtype=qkv.dtype)
        if num_decodes:
            call = self._fused[layer] or self._fused_call(layer, projected)
            self._point(call, qkv, rotary, batch, 0)
            self._point_to_sequences(call, batch, out)
            call.run(num_decodes * self._num_kv_heads, self._decode_threads)
        if self._chunks:
            call = self._prepare[layer] or self._prepare_call(layer, projected)
            self._point(call, qkv, rotary, batch, num_decodes)
            num_tokens = len(qkv) - num_decodes
            call.run(num_tokens * self._num_kv_heads, threads_for(num_tokens * qkv.shape[1]))
            heads = qkv.view(1, len(qkv), -1, self._head_dim)
            query, key, value = torch.split(heads, [projected.num_heads, self._num_kv_heads, self._num_kv_heads], dim=2)
            self._attend_chunks(layer, query, key, value, out.view(1, len(out), -1, self._head_dim), projected.args)
        return out

    def _group_decodes(self, batch: AttentionMetadata) -> list[DecodeGroup]:
        """All in one: kernels need no padding."""
        if not batch.num_decodes:
            return []
        return [DecodeGroup(0, batch.num_decodes, 0, batch.seq_lens[0])]

    def _attend_decodes(self, layer: int, query: torch.Tensor, group: DecodeGroup, args: AttentionArgs) -> torch.Tensor:
        """Attention of query tokens [1, sequences, heads, head_dim]."""
        assert self._batch is not None
        query = query.contiguous()
        out = torch.empty_like(query)
        call = self._decode[layer] or self._decode_call(layer, query.shape[2], args)
        call.set("query", query.data_ptr())
        self._point_to_sequences(call, self._batch, out)
        call.run(query.shape[1] * self._num_kv_heads, self._decode_threads)
        return out

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
        assert self._batch is not None
        _, num_tokens, num_heads, head_dim = query.shape
        if query.stride()[2:] != (head_dim, 1):
            query = query.contiguous()
        num_tiles = -(-num_tokens * (num_heads // self._num_kv_heads) // rows_per_task(tiled=self._tiled))
        call = self._chunk[layer] or self._chunk_call(layer, num_heads, args)
        call.set("query", query.data_ptr())
        call.set("query_stride", query.stride(1))
        call.set("out", out.data_ptr())
        call.set("block_table", self._batch.block_tables[chunk.sequence].data_ptr())
        call.set("num_tokens", num_tokens)
        call.set("num_tiles", num_tiles)
        call.set("seq_len", chunk.seq_len)
        call.run(num_tiles * self._num_kv_heads, threads_for(num_tokens * num_heads * chunk.seq_len))

    def _point(self, call: Call, qkv: torch.Tensor, rotary: Rotary, batch: AttentionMetadata, first_token: int) -> None:
        """Sets the arguments of projections, from a token on."""
        call.set("qkv", qkv[first_token:].data_ptr())
        call.set("slots", batch.slot_mapping[first_token:].data_ptr())
        call.set("positions", rotary.positions[first_token:].data_ptr())
        call.set("cosines", rotary.cosines.data_ptr())
        call.set("sines", rotary.sines.data_ptr())

    def _point_to_sequences(self, call: Call, batch: AttentionMetadata, out: torch.Tensor) -> None:
        call.set("seq_lens", batch.seq_lens_tensor.data_ptr())
        call.set("block_tables", batch.block_tables.data_ptr())
        call.set("table_width", batch.block_tables.shape[1])
        call.set("out", out.data_ptr())

    def _decode_call(self, layer: int, num_heads: int, args: AttentionArgs) -> Call:
        kernel = decode_kernel(self._shape(num_heads), _scores(args))
        call = Call(kernel, cache=self._layer_address(layer), query_stride=num_heads * self._head_dim)
        self._decode[layer] = _with_sinks(call, args)
        return call

    def _fused_call(self, layer: int, projected: ProjectedArgs) -> Call:
        shape, has_norms = self._shape(projected.num_heads), projected.norms is not None
        call = Call(
            fused_decode_kernel(shape, _scores(projected.args), has_norms=has_norms), cache=self._layer_address(layer)
        )
        self._fused[layer] = _with_norms(_with_sinks(call, projected.args), projected.norms)
        return call

    def _prepare_call(self, layer: int, projected: ProjectedArgs) -> Call:
        kernel = prepare_kernel(self._shape(projected.num_heads), has_norms=projected.norms is not None)
        call = Call(kernel, cache=self._layer_address(layer))
        self._prepare[layer] = _with_norms(call, projected.norms)
        return call

    def _chunk_call(self, layer: int, num_heads: int, args: AttentionArgs) -> Call:
        kernel = chunk_attention_kernel(self._shape(num_heads), _scores(args), tiled=self._tiled)
        call = Call(kernel, cache=self._layer_address(layer), configuration=whole_tiles())
        self._chunk[layer] = _with_sinks(call, args)
        return call

    def _shape(self, num_heads: int) -> CacheShape:
        _, num_layers, _, num_kv_heads, block_size, head_dim = self._cache.shape
        element = element_type_of(self._cache.dtype)
        return CacheShape(element, num_layers, num_heads, num_kv_heads, block_size, head_dim)

    def _layer_address(self, layer: int) -> int:
        return self._cache[0, layer].data_ptr()


def supports(device: torch.device, spec: KVSpec) -> bool:
    """True if the kernels can work on the KV cache of a model."""
    return (
        device.type == "cpu"
        and has_openmp()
        and spec.dtype in (torch.float32, torch.bfloat16)
        and spec.head_dim == spec.value_head_dim
        and spec.head_dim % 2 == 0
    )


def _scores(args: AttentionArgs) -> Scores:
    return Scores(args.scale, args.sliding_window, args.softcap, args.sinks is not None)


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

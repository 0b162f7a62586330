"""Paged attention over latents on CPU: decodes by a compiled kernel that reads the cache in place."""

from __future__ import annotations

from typing import NamedTuple

import torch

from common.engine.devices.attention import AttentionArgs, KVSpec, LatentExpansion
from common.engine.devices.cpu.attention import scores_of
from common.engine.devices.cpu.kernels.compiled import Call, threads_for
from common.engine.devices.cpu.kernels.language import element_type_of
from common.engine.devices.cpu.kernels.latent_attention import LatentShape, latent_decode_kernel
from common.engine.devices.cpu.kernels.threads import can_run_kernels
from common.engine.devices.torch.latent_attention import TorchLatentAttention

_NUMBERS_PER_TOKEN = 32  # that attending to one token with a head is worth, see CpuAttention


class _Decode(NamedTuple):
    """Computes a layer's decodes."""

    call: Call | None  # none: torch's operators do, as the kernel does not take these shapes
    num_tasks: int  # of each sequence


class CpuLatentAttention(TorchLatentAttention):
    """See AttentionBackend. For float32 and bfloat16."""

    def __init__(self, kv_cache: torch.Tensor) -> None:
        super().__init__(kv_cache)
        self._cache = kv_cache
        self._decode: list[_Decode | None] = [None] * kv_cache.shape[1]

    def attend_absorbed(self, layer: int, query: torch.Tensor, args: AttentionArgs) -> torch.Tensor:
        """See TorchLatentAttention. The result has no rotary parts."""
        assert self._batch is not None
        assert args.expansion is not None
        _, num_decodes, num_heads, _ = query.shape
        decode = self._decode[layer] or self._prepare(layer, num_heads, args, args.expansion)
        if decode.call is None:
            return super().attend_absorbed(layer, query, args)
        call = decode.call
        query, out = query.contiguous(), query.new_empty(1, num_decodes, num_heads, args.expansion.rank)
        call.point("query", query)
        call.point("out", out)
        call.point("seq_lens", self._batch.seq_lens_tensor)
        call.point("block_tables", self._batch.block_tables)
        call.set("table_width", self._batch.block_tables.stride(0))
        num_read = sum(self._batch.seq_lens[:num_decodes]) * num_heads
        call.run(num_decodes * decode.num_tasks, threads_for(num_read * _NUMBERS_PER_TOKEN))
        return out

    def _prepare(self, layer: int, num_heads: int, args: AttentionArgs, expansion: LatentExpansion) -> _Decode:
        _, num_layers, _, _, block_size, head_dim = self._cache.shape
        element, rank = element_type_of(self._cache.dtype), expansion.rank
        shape = LatentShape(element, num_layers, num_heads, block_size, rank, head_dim - rank)
        if not shape.is_supported:
            self._decode[layer] = found = _Decode(None, 0)
            return found
        call = Call(latent_decode_kernel(shape, scores_of(args)), cache=self._cache[0, layer].data_ptr())
        if args.sinks is not None:
            call.keep("sinks", args.sinks.detach().float().contiguous())
        self._decode[layer] = found = _Decode(call, num_heads // shape.group)
        return found


def supports_latents(spec: KVSpec) -> bool:
    """True if the kernel can work on what a model caches, given blocks of a usual size."""
    return can_run_kernels() and spec.dtype in (torch.float32, torch.bfloat16) and not spec.value_head_dim

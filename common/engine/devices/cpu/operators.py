"""A fused decoder's operators on CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from common.engine.devices.adapters import AdaptedLinear, AdapterBatch
from common.engine.devices.cpu.attention import BatchInvariantAttention, CpuAttention
from common.engine.devices.cpu.kernels.compiled import (
    Call,
    CannotRecordError,
    is_recording,
    result,
    threads_for,
)
from common.engine.devices.cpu.kernels.elementwise import (
    add_norm_kernel,
    copy_kernel,
    embed_kernel,
    silu_mul_kernel,
)
from common.engine.devices.cpu.kernels.language import element_type_of
from common.engine.devices.cpu.kernels.threads import can_run_kernels
from common.engine.devices.cpu.quantized_linear import compiled, has_kernels
from common.engine.devices.cpu.streamed_linear import StreamedLinear
from common.engine.devices.operators import Adapt, AddNorm, Embed, PerToken
from common.engine.devices.rms_norm import RMSNorm
from common.engine.quantization.base import AnyLinear, QuantizedLinear
from common.errors import ConfigError

_ROWS = 512  # activations of more would not stay in the cores' caches from one operator to the next
_MAX_ROWS = 768  # rather than a few rows apart, for which weights are read once more


class CpuOperators:
    """See Operators. `batch_invariant`: a token's results do not depend on what else is computed beside it."""

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self._batch_invariant = batch_invariant

    def supports(self, model: Any) -> bool:
        """See Operators."""
        return model.dtype in (torch.float32, torch.bfloat16) and can_run_kernels()

    def split(self, num_tokens: int) -> list[int]:
        """See Operators."""
        num_whole = max(0, num_tokens - _MAX_ROWS + _ROWS - 1) // _ROWS
        return [_ROWS] * num_whole + [num_tokens - num_whole * _ROWS]

    def attention(self, kv_cache: torch.Tensor, dtype: torch.dtype) -> CpuAttention:
        """See Operators."""
        return BatchInvariantAttention(kv_cache, dtype) if self._batch_invariant else CpuAttention(kv_cache, dtype)

    def embed(self, table: torch.Tensor, first: int | None = None) -> Embed:
        """See Operators."""
        return _Embed(table, first)

    def resume(self, dtype: torch.dtype) -> Embed:
        """See Operators."""
        return partial(_resume, dtype)

    def linear(self, linear: AnyLinear) -> PerToken:
        """See Operators."""
        if isinstance(linear, nn.Linear):
            return StreamedLinear(linear, batch_invariant=self._batch_invariant)
        return self._quantized(linear)

    def add_norm(self, norm: RMSNorm, dtype: torch.dtype) -> AddNorm:
        """See Operators."""
        return _AddNorm(norm, dtype)

    def copy(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """See Operators."""
        call = Call(copy_kernel(element_type_of(out.dtype), out.shape[1], out.stride(0)))
        call.point("hidden", hidden)
        call.point("out", out)
        call.run(len(hidden), threads_for(hidden.numel()))

    def gated_linear(self, gate_up: AnyLinear, adapted: Adapt | None = None) -> PerToken:
        """See Operators."""
        size, dtype = gate_up.out_features // 2, gate_up.weight.dtype
        if isinstance(gate_up, QuantizedLinear):
            quantized = self._quantized(gate_up)
            return _Gated(quantized if adapted is None else adapted(quantized), size, dtype)
        linear = StreamedLinear(gate_up, batch_invariant=self._batch_invariant, gated=True)
        with_adapters = linear if adapted is None else adapted(linear)
        if not isinstance(with_adapters, AdaptedLinear):
            return partial(_gated, linear, _Gated(linear, size, dtype))
        if self._batch_invariant:  # rows without an adapter are computed alike beside some with one
            return _Gated(with_adapters, size, dtype)
        return partial(_gated_unless_adapted, linear, _Gated(with_adapters, size, dtype), with_adapters.batch)

    def _quantized(self, linear: QuantizedLinear) -> PerToken:
        if has_kernels(linear):
            return compiled(linear, batch_invariant=self._batch_invariant)
        if self._batch_invariant:
            raise ConfigError.of("batch_invariant", f"no kernel for {type(linear).__name__}")
        return partial(_unrecorded, linear)


class _Embed:
    def __init__(self, table: torch.Tensor, first: int | None) -> None:
        self._dtype = table.dtype
        self._size = table.shape[1]
        of_part = {} if first is None else {"first": first, "zeros": len(table) - 1}
        kernel = embed_kernel(element_type_of(table.dtype), self._size, is_part=first is not None)
        self._call = Call(kernel, **of_part)
        self._call.keep("table", table.contiguous())

    def __call__(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (len(token_ids), self._size)
        hidden, delta = torch.empty(shape, dtype=torch.float32), result(shape, self._dtype)
        call = self._call
        call.point("token_ids", token_ids)
        call.point("hidden", hidden)
        call.point("delta", delta)
        call.run(len(token_ids), threads_for(hidden.numel()))
        return hidden, delta


def _resume(dtype: torch.dtype, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A recorded step has a copy already."""
    hidden = stream if is_recording() else stream.to(torch.float32, copy=True)
    return hidden, torch.zeros_like(hidden, dtype=dtype)


class _AddNorm:
    def __init__(self, norm: RMSNorm, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._call = Call(add_norm_kernel(element_type_of(dtype), len(norm.weight)))
        self._call.keep("weight", norm.weight)
        self._call.keep("epsilon", torch.tensor(norm.epsilon))

    def __call__(self, hidden: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        out = result(hidden.shape, self._dtype)
        call = self._call
        call.point("hidden", hidden)
        call.point("delta", delta)
        call.point("out", out)
        call.run(hidden.shape[0], threads_for(hidden.numel()))
        return out


def _unrecorded(linear: QuantizedLinear, inputs: torch.Tensor) -> torch.Tensor:
    """By torch's operators."""
    if is_recording():
        raise CannotRecordError(f"{type(linear).__name__} is left to torch")
    out: torch.Tensor = linear(inputs)
    return out


def _gated(linear: StreamedLinear, separate: PerToken, inputs: torch.Tensor) -> torch.Tensor:
    """At once, if there is a kernel for that."""
    gated = linear.gated(inputs)
    return separate(inputs) if gated is None else gated


def _gated_unless_adapted(
    linear: StreamedLinear, separate: PerToken, batch: AdapterBatch, inputs: torch.Tensor
) -> torch.Tensor:
    return separate(inputs) if batch.is_active else _gated(linear, separate, inputs)


class _Gated:
    def __init__(self, linear: PerToken, size: int, dtype: torch.dtype) -> None:
        self._linear = linear
        self._size = size
        self._call = Call(silu_mul_kernel(element_type_of(dtype), size))

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        gate_up = self._linear(inputs)
        num_rows = gate_up.shape[0]
        out = result((num_rows, self._size), gate_up.dtype)
        call = self._call
        call.point("gate_up", gate_up)
        call.point("out", out)
        call.run(num_rows, threads_for(2 * gate_up.numel()))
        return out

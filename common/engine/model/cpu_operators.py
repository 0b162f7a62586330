"""A fused decoder's operators on CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from common.engine.attention.cpu_backend import CpuAttention
from common.engine.cpu_kernels.compiled import Call, has_openmp, threads_for
from common.engine.cpu_kernels.elementwise import add_norm_kernel, silu_mul_kernel
from common.engine.cpu_kernels.language import element_type_of
from common.engine.model.fused_norm import RMSNorm
from common.engine.model.operators import AddNorm, PerToken
from common.engine.model.packed_linear import PackedLinear


class CpuOperators:
    """See Operators."""

    def supports(self, model: Any) -> bool:
        """See Operators."""
        return model.device.type == "cpu" and model.dtype in (torch.float32, torch.bfloat16) and has_openmp()

    def attention(self, kv_cache: torch.Tensor) -> CpuAttention:
        """See Operators."""
        return CpuAttention(kv_cache)

    def linear(self, linear: nn.Linear) -> PerToken:
        """See Operators."""
        return PackedLinear(linear)

    def add_norm(self, norm: RMSNorm, dtype: torch.dtype) -> AddNorm:
        """See Operators."""
        return _AddNorm(norm, dtype)

    def silu_mul(self, size: int, dtype: torch.dtype) -> PerToken:
        """See Operators."""
        return _SiluMul(size, dtype)


class _AddNorm:
    def __init__(self, norm: RMSNorm, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._call = Call(add_norm_kernel(element_type_of(dtype), len(norm.weight)))
        self._call.keep("weight", norm.weight)
        self._call.keep("epsilon", torch.tensor(norm.epsilon))

    def __call__(self, hidden: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        out = torch.empty(hidden.shape, dtype=self._dtype)
        call = self._call
        call.set("hidden", hidden.data_ptr())
        call.set("delta", delta.data_ptr())
        call.set("out", out.data_ptr())
        call.run(len(hidden), threads_for(hidden.numel()))
        return out


class _SiluMul:
    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self._size = size
        self._call = Call(silu_mul_kernel(element_type_of(dtype), size))

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = torch.empty((len(gate_up), self._size), dtype=gate_up.dtype)
        call = self._call
        call.set("gate_up", gate_up.data_ptr())
        call.set("out", out.data_ptr())
        call.run(len(gate_up), threads_for(2 * gate_up.numel()))
        return out

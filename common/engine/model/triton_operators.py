"""A fused decoder's operators on GPUs: linear layers by cuBLAS, the rest by Triton kernels."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import triton
from torch import nn
from torch.nn import functional

from common.engine.attention.triton_backend import TritonAttention, runs_on
from common.engine.model.fused_norm import RMSNorm
from common.engine.model.operators import AddNorm, Embed, PerToken
from common.engine.model.quantized_linear import AnyLinear
from common.engine.triton_kernels.elementwise import add_norm_kernel, silu_mul_kernel

_NUMBERS_PER_PROGRAM = 1024


class TritonOperators:
    """See Operators."""

    def supports(self, model: Any) -> bool:
        """See Operators."""
        return runs_on(model.device)

    def split(self, num_tokens: int) -> list[int]:
        """See Operators."""
        return [num_tokens]

    def attention(self, kv_cache: torch.Tensor) -> TritonAttention:
        """See Operators."""
        return TritonAttention(kv_cache)

    def embed(self, table: torch.Tensor) -> Embed:
        """See Operators."""
        return partial(_embed, table)

    def linear(self, linear: AnyLinear) -> PerToken:
        """See Operators."""
        assert isinstance(linear, nn.Linear)  # quantisation is refused on GPUs
        return partial(functional.linear, weight=linear.weight, bias=linear.bias)

    def add_norm(self, norm: RMSNorm, dtype: torch.dtype) -> AddNorm:
        """See Operators."""
        return _AddNorm(norm, dtype)

    def silu_mul(self, size: int, dtype: torch.dtype) -> PerToken:
        """See Operators."""
        return partial(_silu_mul, size)


def _embed(table: torch.Tensor, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = functional.embedding(token_ids, table)
    return rows.float(), torch.zeros_like(rows)


class _AddNorm:
    def __init__(self, norm: RMSNorm, dtype: torch.dtype) -> None:
        self._norm = norm
        self._dtype = dtype
        self._padded = triton.next_power_of_2(len(norm.weight))

    def __call__(self, hidden: torch.Tensor, delta: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(hidden, dtype=self._dtype)
        add_norm_kernel[(len(hidden),)](
            hidden,
            delta,
            self._norm.weight,
            out,
            self._norm.epsilon,
            SIZE=hidden.shape[1],
            PADDED_SIZE=self._padded,
            num_warps=4 if self._padded <= 2048 else 8,
        )
        return out


def _silu_mul(size: int, gate_up: torch.Tensor) -> torch.Tensor:
    out = torch.empty((len(gate_up), size), dtype=gate_up.dtype, device=gate_up.device)
    num_numbers = out.numel()
    silu_mul_kernel[(triton.cdiv(num_numbers, _NUMBERS_PER_PROGRAM),)](
        gate_up, out, num_numbers, SIZE=size, NUMBERS=_NUMBERS_PER_PROGRAM
    )
    return out

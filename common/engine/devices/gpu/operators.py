"""A fused decoder's operators on GPUs: linear layers by cuBLAS, or by a kernel of our own where rows may not depend on
one another; the rest by Triton kernels."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import nn
from torch.nn import functional

from common.engine.devices.gpu.attention import (
    BatchInvariantTritonAttention,
    TritonAttention,
    factor_type,
    runs_on,
)
from common.engine.devices.gpu.kernels.elementwise import add_norm_kernel, silu_mul_kernel
from common.engine.devices.gpu.kernels.grouped_linear import grouped_linear_kernel
from common.engine.devices.gpu.kernels.linear import linear_kernel
from common.engine.devices.operators import Adapt, AddNorm, Embed, PerToken, rows_of_part
from common.engine.devices.rms_norm import RMSNorm
from common.engine.quantization.base import AnyLinear, QuantizedLinear
from common.engine.quantization.grouped import GroupedLinear
from common.errors import ConfigError, ModelLoadError

_NUMBERS_PER_PROGRAM = 1024
_MAX_ERROR = 0.02  # of the norm
_FEW_ROWS = 128  # over which widening all weights costs less than widening them for each tile of rows
_MAX_WIDENED = 1 << 24  # weights that are widened at a time: what that takes for a while is in no profile of memory
_KINDS = {torch.int32: "int4", torch.int8: "int8", torch.float8_e4m3fn: "float8"}  # of codes


class TritonOperators:
    """See Operators. `batch_invariant`: a token's results do not depend on what else is computed beside it."""

    def __init__(self, *, batch_invariant: bool = False) -> None:
        self._batch_invariant = batch_invariant

    def supports(self, model: Any) -> bool:
        """See Operators."""
        return runs_on(model.device)

    def split(self, num_tokens: int) -> list[int]:
        """See Operators."""
        return [num_tokens]

    def attention(self, kv_cache: torch.Tensor, dtype: torch.dtype) -> TritonAttention:
        """See Operators."""
        return BatchInvariantTritonAttention(kv_cache) if self._batch_invariant else TritonAttention(kv_cache)

    def embed(self, table: torch.Tensor, first: int | None = None) -> Embed:
        """See Operators."""
        return partial(_embed, table, first)

    def resume(self, dtype: torch.dtype) -> Embed:
        """See Operators."""
        return partial(_resume, dtype)

    def linear(self, linear: AnyLinear) -> PerToken:
        """See Operators."""
        if isinstance(linear, GroupedLinear):
            return TritonGroupedLinear(linear, batch_invariant=self._batch_invariant)
        if isinstance(linear, QuantizedLinear):
            if self._batch_invariant:
                raise ConfigError.of("batch_invariant", f"no kernel for {type(linear).__name__}")
            return linear
        if self._batch_invariant:
            return BatchInvariantLinear(linear)
        return partial(functional.linear, weight=linear.weight, bias=linear.bias)

    def add_norm(self, norm: RMSNorm, dtype: torch.dtype) -> AddNorm:
        """See Operators."""
        return _AddNorm(norm, dtype)

    def copy(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """See Operators."""
        out.copy_(hidden)

    def gated_linear(self, gate_up: AnyLinear, adapted: Adapt | None = None) -> PerToken:
        """See Operators."""
        linear, size = self.linear(gate_up), gate_up.out_features // 2
        if adapted is not None:
            linear = adapted(linear)
        return lambda inputs: _silu_mul(size, linear(inputs))


class LinearTile(NamedTuple):
    """Shape of one program's work, and how it is compiled."""

    rows: int
    columns: int
    depth: int  # inputs that are taken at a time
    num_warps: int
    num_stages: int


def linear_tile(dtype: torch.dtype) -> LinearTile:
    """One for any number of rows."""
    return LinearTile(32, 32, 32, 4, 3) if dtype == torch.float32 else LinearTile(64, 64, 64, 4, 4)


class BatchInvariantLinear:
    """See PerToken. A row's result does not depend on how many rows there are."""

    def __init__(self, linear: nn.Linear) -> None:
        self._weight = linear.weight.detach().contiguous()
        self._bias = None if linear.bias is None else linear.bias.detach()
        self._tile = linear_tile(self._weight.dtype)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """[rows, in_features] -> [rows, out_features]"""
        (num_rows, _), (out_features, in_features) = inputs.shape, self._weight.shape
        out = torch.empty((num_rows, out_features), dtype=inputs.dtype, device=inputs.device)
        tile = self._tile
        if num_rows:
            linear_kernel[(triton.cdiv(num_rows, tile.rows), triton.cdiv(out_features, tile.columns))](
                inputs.contiguous(),
                self._weight,
                self._weight if self._bias is None else self._bias,
                out,
                num_rows,
                IN_FEATURES=in_features,
                OUT_FEATURES=out_features,
                HAS_BIAS=self._bias is not None,
                ROWS=tile.rows,
                COLUMNS=tile.columns,
                DEPTH=tile.depth,
                FACTOR_TYPE=factor_type(inputs.dtype),
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )
        return out


class TritonGroupedLinear(nn.Module):
    """See PerToken, and for use in a model's own code a module. Few rows are multiplied with weights that are widened
    in registers, more of them by cuBLAS, unless a row's result may not depend on how many rows there are."""

    def __init__(self, linear: GroupedLinear, *, batch_invariant: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight  # shape and type
        self._linear = linear
        self._is_few_only = batch_invariant
        kind = _KINDS[linear.codes.dtype]
        self._codes = linear.codes if kind == "int4" else linear.codes.view(torch.int8)
        self._tile = linear_tile(linear.weight.dtype)
        self._constants = {
            "IN_FEATURES": linear.in_features,
            "OUT_FEATURES": linear.out_features,
            "GROUP": linear.group,
            "KIND": kind,
            "HAS_SHIFT": linear.shift is not None,
            "HAS_ORDER": linear.order is not None,
            "HAS_BIAS": linear.bias is not None,
        }

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        rows = inputs.reshape(-1, self.in_features).contiguous()
        linear, tile = self._linear, self._tile
        out = torch.empty((len(rows), self.out_features), dtype=inputs.dtype, device=inputs.device)
        if len(rows) > _FEW_ROWS and not self._is_few_only:
            self._multiply_widened(rows, out)
        elif len(rows):
            grouped_linear_kernel[(triton.cdiv(len(rows), tile.rows), triton.cdiv(self.out_features, tile.columns))](
                rows,
                self._codes,
                linear.scale,
                linear.scale if linear.shift is None else linear.shift,
                linear.scale if linear.order is None else linear.order,
                linear.scale if linear.bias is None else linear.bias,
                out,
                len(rows),
                **self._constants,
                ROWS=tile.rows,
                COLUMNS=tile.columns,
                DEPTH=tile.depth,
                FACTOR_TYPE=factor_type(inputs.dtype),
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
            )
        return out.view(*inputs.shape[:-1], self.out_features)

    def _multiply_widened(self, rows: torch.Tensor, out: torch.Tensor) -> None:
        """By cuBLAS, some outputs at a time."""
        step, bias = max(1, _MAX_WIDENED // self.in_features), self._linear.bias
        for start in range(0, self.out_features, step):
            some = slice(start, start + step)
            weight = self._linear.outputs(some).dequantized().to(rows.dtype)
            out[:, some] = functional.linear(rows, weight, None if bias is None else bias[some])


def compile_linears(model: nn.Module) -> None:
    """Replaces the layers with weights in groups of a model that runs its own code. Raises ModelLoadError if the kernel
    computes something else than torch."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, GroupedLinear):
                kernels = TritonGroupedLinear(child)
                inputs = torch.ones((1, child.in_features), dtype=child.weight.dtype, device=child.codes.device)
                expected, found = child(inputs).float(), kernels(inputs).float()
                if not float((found - expected).norm()) <= _MAX_ERROR * float(expected.norm()):
                    raise ModelLoadError("the kernel for quantised weights differs from torch", param="model")
                setattr(parent, name, kernels)


def _embed(table: torch.Tensor, first: int | None, token_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if first is not None:
        token_ids = rows_of_part(token_ids, first, len(table) - 1)
    rows = functional.embedding(token_ids, table)
    return rows.float(), torch.zeros_like(rows)


def _resume(dtype: torch.dtype, stream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return stream.to(torch.float32, copy=True), torch.zeros_like(stream, dtype=dtype)


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

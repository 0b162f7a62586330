"""Quantised linear layers on compiled kernels, which are compared with torch's operators first."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import nn

from common.engine.devices.cpu.kernels.grouped_linear import Codes
from common.engine.devices.cpu.kernels.language import element_type_of
from common.engine.devices.cpu.kernels.paired_grouped_linear import can_pair
from common.engine.devices.cpu.kernels.threads import can_run_kernels
from common.engine.devices.cpu.kernels.tiled_int8_linear import can_tile_int8
from common.engine.devices.cpu.kernels.tiles import MAX_TILE_ROWS, has_tiles
from common.engine.devices.cpu.streamed_dynamic_int8_linear import (
    RoundedInputsLinear,
    StreamedDynamicInt8Linear,
    can_round,
)
from common.engine.devices.cpu.streamed_grouped_linear import StreamedGroupedLinear, can_stream
from common.engine.devices.cpu.streamed_int8_linear import StreamedInt8Linear
from common.engine.quantization.base import QuantizedLinear, places_of
from common.engine.quantization.dynamic_int8 import DynamicInt8Linear
from common.engine.quantization.grouped import PER_WORD, GroupedLinear
from common.engine.quantization.int8 import Int8Linear
from common.errors import ModelLoadError

Compiled = StreamedInt8Linear | StreamedGroupedLinear | StreamedDynamicInt8Linear | RoundedInputsLinear

_CHECKED_ROWS = (1, MAX_TILE_ROWS - 1, 2 * MAX_TILE_ROWS + 3)  # that all kernels take part in
_CHECKED_OUTPUTS = 192
_MAX_ERROR = {torch.float32: 1e-4, torch.bfloat16: 0.02}  # of the norm


class _Checked(NamedTuple):
    """The properties of a layer that its kernels are compiled for."""

    in_features: int
    out_features: int
    dtype: torch.dtype
    has_bias: bool
    codes: torch.dtype | None = None  # and the rest, of weights in groups
    group: int = 0
    has_shift: bool = False
    has_order: bool = False
    rounds: bool = False  # activations


def has_kernels(linear: QuantizedLinear) -> bool:
    """True if there are kernels for such a layer, and for activations of its type."""
    is_known = isinstance(linear, Int8Linear) or (isinstance(linear, GroupedLinear) and can_stream(linear))
    return is_known and linear.weight.dtype in _MAX_ERROR and can_run_kernels()


def compile_linears(model: nn.Module) -> None:
    """Replaces the quantised layers of a model that runs its own code. Raises ModelLoadError if the kernels compute
    something else than torch."""
    for parent, name in places_of(model, lambda child: isinstance(child, QuantizedLinear) and has_kernels(child)):
        setattr(parent, name, compiled(getattr(parent, name)))


def compiled(linear: QuantizedLinear, *, batch_invariant: bool = False) -> Compiled:
    """The layer on compiled kernels. Raises ModelLoadError if these compute something else than torch.
    `batch_invariant`: a row's result does not depend on how many rows there are."""
    if isinstance(linear, DynamicInt8Linear) and not can_round(linear):
        weights = Int8Linear(linear.integers, linear.scale, None, linear.weight.dtype)
        return RoundedInputsLinear(linear, compiled(weights, batch_invariant=batch_invariant))
    linear = _suited(linear)
    checked = _Checked(linear.in_features, linear.out_features, linear.weight.dtype, linear.bias is not None)
    if isinstance(linear, GroupedLinear):
        shift, order = linear.shift is not None, linear.order is not None
        _check_kernels(checked._replace(codes=linear.codes.dtype, group=linear.group, has_shift=shift, has_order=order))
        return StreamedGroupedLinear(linear, batch_invariant=batch_invariant)
    assert isinstance(linear, Int8Linear)
    _check_kernels(checked._replace(rounds=isinstance(linear, DynamicInt8Linear)))
    return _kernels_of(linear)


def _suited(linear: QuantizedLinear) -> QuantizedLinear:
    """The layer in the format whose kernels are faster, where two can hold it: int8 with a scale for each output."""
    dtype = linear.weight.dtype
    is_tiled = dtype == torch.bfloat16 and has_tiles() and can_tile_int8(linear.in_features, linear.out_features)
    if isinstance(linear, DynamicInt8Linear):
        return linear
    if isinstance(linear, Int8Linear):
        if not is_tiled and can_pair(element_type_of(dtype), Codes.INT8, linear.in_features):
            return GroupedLinear(linear.integers.T, linear.scale[None], None, linear.bias, dtype)
        return linear
    assert isinstance(linear, GroupedLinear)
    has_scales_only = len(linear.scale) == 1 and linear.shift is None and linear.order is None
    if is_tiled and linear.codes.dtype == torch.int8 and has_scales_only:
        return Int8Linear(linear.codes.T.contiguous(), linear.scale[0], linear.bias, dtype)
    return linear


@cache
def _check_kernels(checked: _Checked) -> None:
    """Compares the kernels of a layer with torch's operators, on random numbers."""
    generator = torch.Generator().manual_seed(0)
    linear = _random_int8(checked, generator) if checked.codes is None else _random_groups(checked, generator)
    dtype = checked.dtype
    inputs = torch.randn(max(_CHECKED_ROWS), checked.in_features, generator=generator).to(dtype)
    expected = linear(inputs).float()
    kernels = _kernels_of(linear)
    for num_rows in _CHECKED_ROWS:
        found = kernels(inputs[:num_rows]).float()
        error = float((found - expected[:num_rows]).norm() / expected[:num_rows].norm())
        if not error <= _MAX_ERROR[dtype]:
            reason = f"the kernels for quantised weights differ from torch (relative error {error:.2g})"
            raise ModelLoadError(reason, param="quantization")


def _kernels_of(linear: Int8Linear | GroupedLinear) -> Compiled:
    if isinstance(linear, GroupedLinear):
        return StreamedGroupedLinear(linear)
    return StreamedDynamicInt8Linear(linear) if isinstance(linear, DynamicInt8Linear) else StreamedInt8Linear(linear)


def _num_outputs(checked: _Checked) -> int:
    return min(checked.out_features, _CHECKED_OUTPUTS + checked.out_features % _CHECKED_OUTPUTS)


def _random_bias(checked: _Checked, generator: torch.Generator) -> torch.Tensor | None:
    bias = torch.randn(_num_outputs(checked), generator=generator).to(checked.dtype)
    return bias if checked.has_bias else None


def _random_int8(checked: _Checked, generator: torch.Generator) -> Int8Linear:
    shape = _num_outputs(checked), checked.in_features
    integers = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
    scale = torch.rand(len(integers), generator=generator) / 128
    layer = DynamicInt8Linear if checked.rounds else Int8Linear
    return layer(integers, scale, _random_bias(checked, generator), checked.dtype)


def _random_groups(checked: _Checked, generator: torch.Generator) -> GroupedLinear:
    shape = checked.in_features, _num_outputs(checked)
    groups = (shape[0] // checked.group, shape[1])
    match checked.codes:
        case torch.int32:
            shape = (shape[0] // PER_WORD, shape[1])
            codes = torch.randint(-(1 << 31), 1 << 31, shape, generator=generator).to(torch.int32)
        case torch.int8:
            codes = torch.randint(-127, 128, shape, dtype=torch.int8, generator=generator)
        case _:
            codes = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(groups, generator=generator)
    shift = torch.randn(groups, generator=generator) if checked.has_shift else None
    order = torch.randperm(checked.in_features, generator=generator) if checked.has_order else None
    return GroupedLinear(codes, scale, shift, _random_bias(checked, generator), checked.dtype, order)

"""Linear layers with int8 weights and activations on the CPU kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from common.engine.devices.cpu.huge_pages import use_huge_pages
from common.engine.devices.cpu.kernels.compiled import (
    Call,
    CannotRecordError,
    is_recording,
    result,
    threads_for,
)
from common.engine.devices.cpu.kernels.dynamic_int8_linear import (
    BLOCK,
    DEPTH,
    dynamic_int8_linear_kernel,
    multiplies_int8,
    round_rows_kernel,
    scale_sums_kernel,
)
from common.engine.devices.cpu.kernels.language import MAX_LANES, element_type_of
from common.engine.quantization.dynamic_int8 import DynamicInt8Linear, rounded_rows

_PER_NUMBER = 16  # weights that are multiplied in the time of a number of elementwise kernels
_FEW_ROWS = 64  # that are multiplied while weights are read; more of them are left to oneDNN
_MAX_ROWS = 1024  # whose scales there is room for; oneDNN multiplies so many at once


class StreamedDynamicInt8Linear(nn.Module):
    """See PerToken, and for use in a model's own code a module. A row's result does not depend on how many rows there
    are. `linear` may be given up."""

    rounds_inputs = True

    def __init__(self, linear: DynamicInt8Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight  # shape and type
        self._element = element_type_of(linear.weight.dtype)
        self._padding, in_padding = -self.out_features % BLOCK, -self.in_features % DEPTH
        self._weight = functional.pad(linear.integers, (0, in_padding, 0, self._padding)).contiguous()
        use_huge_pages(self._weight.data_ptr(), self._weight.nbytes)
        bias = None if linear.bias is None else functional.pad(linear.bias.detach().float(), (0, self._padding))
        scale = functional.pad(linear.scale, (0, self._padding))
        self._scales = torch.empty(_MAX_ROWS)
        self._round = Call(round_rows_kernel(self._element), size=self.in_features, padded=self._weight.shape[1])
        self._multiply = Call(dynamic_int8_linear_kernel(self._element, has_bias=bias is not None))
        self._scale_sums = Call(scale_sums_kernel(self._element, has_bias=bias is not None))
        self._multiply.keep("weight", self._weight)
        self._multiply.keep("weight_sum", self._weight.sum(1, dtype=torch.int32))
        self._multiply.set("in_features", self._weight.shape[1])
        self._round.keep("scale", self._scales)
        for call in (self._multiply, self._scale_sums):
            call.set("out_features", len(self._weight))
            call.keep("weight_scale", scale)
            call.keep("scale", self._scales)
            if bias is not None:
                call.keep("bias", bias)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        rows = inputs.reshape(-1, self.in_features).contiguous()
        parts = [self._of(part) for part in rows.split(_MAX_ROWS)]  # type: ignore[no-untyped-call]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if self._padding:
            if is_recording():
                raise CannotRecordError("a linear layer is padded by torch")
            out = out[:, : self.out_features].contiguous()
        return out.view(*inputs.shape[:-1], self.out_features)

    __call__ = forward  # without nn.Module's hooks, which take as long as a small operator

    def _of(self, rows: torch.Tensor) -> torch.Tensor:
        num_rows = len(rows)
        rounded = result((num_rows, self._weight.shape[1]), torch.int8)
        self._round.point("inputs", rows)
        self._round.point("rounded", rounded)
        self._round.run(num_rows, threads_for(rows.numel()))
        out = result((num_rows, len(self._weight)), rows.dtype)
        if num_rows <= _FEW_ROWS:
            self._multiply.point("inputs", rounded)
            self._multiply.point("out", out)
            self._multiply.set("num_rows", num_rows)
            self._multiply.run(len(self._weight) // BLOCK, threads_for(self._weight.numel() // _PER_NUMBER))
            return out
        if is_recording():
            raise CannotRecordError(f"{num_rows} rows of a linear layer are left to oneDNN")
        sums = torch._int_mm(rounded, self._weight.T)  # noqa: SLF001
        self._scale_sums.point("sums", sums)
        self._scale_sums.point("out", out)
        self._scale_sums.run(num_rows, threads_for(out.numel()))
        return out


class RoundedInputsLinear(nn.Module):
    """See StreamedDynamicInt8Linear, for other processors: rounded activations go through kernels for int8 weights."""

    rounds_inputs = True

    def __init__(self, linear: DynamicInt8Linear, multiply: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """`multiply`: by the layer's weight, without its bias."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight  # shape and type
        self.bias = linear.bias
        self._multiply = multiply

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        if is_recording():
            raise CannotRecordError("activations are rounded by torch")
        rounded, scale = rounded_rows(inputs)
        out = self._multiply(rounded.to(inputs.dtype)).float() * scale
        return (out if self.bias is None else out.add_(self.bias)).to(inputs.dtype)

    __call__ = forward  # without nn.Module's hooks, which take as long as a small operator


def can_round(linear: DynamicInt8Linear) -> bool:
    """True if the processor has instructions for it, and the kernels take inputs of this size."""
    return multiplies_int8() and linear.in_features % MAX_LANES == 0

"""Linear layers with int8 weights on the CPU kernels."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import functional

from common.engine.devices.cpu.huge_pages import use_huge_pages
from common.engine.devices.cpu.kernels import tiled_int8_linear
from common.engine.devices.cpu.kernels.compiled import (
    Call,
    CannotRecordError,
    is_recording,
    result,
    threads_for,
)
from common.engine.devices.cpu.kernels.language import ElementType, element_type_of
from common.engine.devices.cpu.kernels.linear import GRANULE, ROWS_PER_TASK, block_of, linear_kernel
from common.engine.devices.cpu.kernels.tiled_int8_linear import can_tile_int8
from common.engine.devices.cpu.kernels.tiles import MAX_TILE_ROWS, TILE, configuration, has_tiles, rest_configuration
from common.engine.quantization.int8 import Int8Linear

_PER_NUMBER = 4  # weights that are multiplied in the time of a number of elementwise kernels


class StreamedInt8Linear(nn.Module):
    """See PerToken, and for use in a model's own code a module. A row's result does not depend on how many rows there
    are. `linear` may be given up."""

    def __init__(self, linear: Int8Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight  # shape and type
        self._out_padding, self._in_padding = -self.out_features % GRANULE, -self.in_features % GRANULE
        integers = functional.pad(linear.integers, (0, self._in_padding, 0, self._out_padding))
        scale = functional.pad(linear.scale, (0, self._out_padding))
        bias = None if linear.bias is None else functional.pad(linear.bias.detach().float(), (0, self._out_padding))
        tiles = linear.weight.dtype == torch.bfloat16 and has_tiles() and can_tile_int8(*reversed(integers.shape))
        self._kernels = (_Tiles if tiles else _Vectors)(integers, scale, bias, linear.weight.dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        if is_recording() and (self._in_padding or self._out_padding):
            raise CannotRecordError("a linear layer is padded by torch")
        rows = inputs.reshape(-1, self.in_features)
        rows = functional.pad(rows, (0, self._in_padding)) if self._in_padding else rows.contiguous()
        out = result((len(rows), self.out_features + self._out_padding), rows.dtype)
        most = self._kernels.most_rows
        for few, few_out in zip(rows.split(most), out.split(most), strict=True):  # type: ignore[no-untyped-call]
            if len(few):
                self._kernels(few, few_out)
        if self._out_padding:
            out = out[:, : self.out_features].contiguous()
        return out.view(*inputs.shape[:-1], self.out_features)

    __call__ = forward  # without nn.Module's hooks, which take as long as a small operator


class _Vectors:
    """Kernels of vector instructions with the weight that they read."""

    most_rows = sys.maxsize

    def __init__(
        self, integers: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        out_features, in_features = integers.shape
        block = block_of(out_features)
        kernel = linear_kernel(element_type_of(dtype), block, has_bias=bias is not None, weights=ElementType.INT8)
        self._call = Call(kernel, in_features=in_features, out_features=out_features)
        _keep(self._call, _in_blocks(integers, block), scale, bias)
        self._num_blocks, self._num_weights = out_features // block, integers.numel()

    def __call__(self, inputs: torch.Tensor, out: torch.Tensor) -> None:
        num_tasks = -(-len(inputs) // ROWS_PER_TASK) * self._num_blocks
        _run(self._call, inputs, out, num_tasks, self._num_weights)


class _Tiles:
    """Kernels of matrix instructions with the weight that they read."""

    most_rows = tiled_int8_linear.MAX_ROWS

    def __init__(
        self, integers: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype
    ) -> None:
        assert dtype == torch.bfloat16
        out_features, in_features = integers.shape
        has_bias = bias is not None
        few = [tiled_int8_linear.few_int8_rows_kernel(num_tiles=tiles, has_bias=has_bias) for tiles in (1, 2)]
        many = tiled_int8_linear.many_int8_rows_kernel(tiled_int8_linear.piece_of(in_features), has_bias=has_bias)
        weight = _in_blocks(integers, tiled_int8_linear.BLOCK)
        self._few, self._many = [Call(kernel) for kernel in few], Call(many)
        self._many.keep("whole", configuration(MAX_TILE_ROWS))
        for call in (*self._few, self._many):
            call.set("in_features", in_features)
            call.set("out_features", out_features)
            _keep(call, weight, scale, bias)
        self._num_blocks, self._num_weights = out_features // tiled_int8_linear.BLOCK, integers.numel()

    def __call__(self, inputs: torch.Tensor, out: torch.Tensor) -> None:
        num_rows = len(inputs)
        if num_rows <= MAX_TILE_ROWS:
            call = self._few[num_rows > TILE]
            call.point("configuration", configuration(num_rows))
        else:
            call = self._many
            call.point("rest", rest_configuration(num_rows))
        _run(call, inputs, out, self._num_blocks, self._num_weights)


def _in_blocks(integers: torch.Tensor, block: int) -> torch.Tensor:
    """[out_features / block, in_features, block]"""
    return integers.view(-1, block, integers.shape[1]).transpose(1, 2).contiguous()


def _keep(call: Call, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
    use_huge_pages(weight.data_ptr(), weight.nbytes)
    call.keep("weight", weight)
    call.keep("scale", scale)
    if bias is not None:
        call.keep("bias", bias)


def _run(call: Call, inputs: torch.Tensor, out: torch.Tensor, num_tasks: int, num_weights: int) -> None:
    call.point("inputs", inputs)
    call.point("out", out)
    call.set("num_rows", len(inputs))
    call.run(num_tasks, threads_for(num_weights // _PER_NUMBER))

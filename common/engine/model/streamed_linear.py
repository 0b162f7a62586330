"""Packed linear layers with kernels of our own for few rows, which read the weight where oneDNN has packed it.

oneDNN does not say how it lays weights out. The kernels are used where a packed weight, compared with the weight
itself, turns out to have the layout that they read.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from common.engine.cpu_kernels.compiled import Call, CannotRecordError, Kernel, is_recording, result, threads_for
from common.engine.cpu_kernels.language import element_type_of
from common.engine.cpu_kernels.linear import MAX_ROWS, can_stream, linear_kernel, pair_of
from common.engine.cpu_kernels.tiled_linear import can_tile, tiled_linear_kernel
from common.engine.cpu_kernels.tiles import TILE, configuration, has_tiles
from common.engine.model.huge_pages import use_huge_pages
from common.engine.model.packed_linear import PackedLinear
from common.errors import ConfigError

_BLOCKS = (64, 48, 32, 16)  # outputs in a block
_COMPARED = 1 << 22  # weights at once
_PER_NUMBER = 4  # weights that are multiplied in the time of a number of elementwise kernels
_MAX_ROWS_BFLOAT16 = 8  # that vector instructions multiply while the weight is read


class _Blocks(NamedTuple):
    """A packed weight [out_features / width, in_features / pair, width, pair]."""

    address: int
    width: int


class StreamedLinear:
    """See PerToken. A linear layer on CPU.

    `batch_invariant`: a row's result does not depend on how many rows there are, as only our kernels see to; raises
    ConfigError if they do not take the layer.
    """

    def __init__(self, linear: nn.Linear, *, batch_invariant: bool = False) -> None:
        self._packed = PackedLinear(linear)
        self._out_features = linear.out_features
        blocks = blocks_of(linear.weight.detach(), self._packed.packed)
        if blocks is not None:
            use_huge_pages(blocks.address, linear.weight.nbytes)
        self._few_rows = None if blocks is None else _few_rows(linear, blocks)
        self._most_numbers = 0 if self._few_rows is None else self._few_rows.most_rows * linear.in_features
        self._batch_invariant = batch_invariant
        if batch_invariant and self._few_rows is None:
            raise ConfigError(
                f"batch_invariant: no kernel for a linear layer of {linear.in_features} x {linear.out_features} in "
                f"{linear.weight.dtype} on this processor",
                param="batch_invariant",
            )

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """[rows, in_features] -> [rows, out_features]"""
        is_few = inputs.numel() <= self._most_numbers
        if self._few_rows is None or not (is_few or self._batch_invariant) or not inputs.numel():
            if is_recording():
                raise CannotRecordError(f"{inputs.shape[0]} rows of a linear layer are left to oneDNN")
            return self._packed(inputs)
        out = result((inputs.shape[0], self._out_features), inputs.dtype)
        inputs = inputs.contiguous()
        if is_few:
            self._few_rows(inputs, out)
        else:
            most = self._few_rows.most_rows
            for few, few_out in zip(inputs.split(most), out.split(most), strict=True):  # type: ignore[no-untyped-call]
                self._few_rows(few, few_out)
        return out


class _FewRows:
    """A layer's weight with the kernels that read it."""

    def __init__(self, linear: nn.Linear, blocks: _Blocks, kernels: Sequence[Kernel], rows_per_kernel: int) -> None:
        """`kernels`: for up to `rows_per_kernel` rows, for twice as many, and so on."""
        self.most_rows = len(kernels) * rows_per_kernel
        self._rows_per_kernel = rows_per_kernel
        self._num_blocks = linear.out_features // blocks.width
        self._num_weights = linear.weight.numel()
        sizes = {"in_features": linear.in_features, "out_features": linear.out_features}
        self._calls = [Call(kernel, weight=blocks.address, **sizes) for kernel in kernels]
        if linear.bias is not None:
            bias = linear.bias.detach().float()
            for call in self._calls:
                call.keep("bias", bias)

    def __call__(self, inputs: torch.Tensor, out: torch.Tensor) -> None:
        num_rows = inputs.shape[0]
        call = self._calls[(num_rows - 1) // self._rows_per_kernel]
        call.point("inputs", inputs)
        call.point("out", out)
        call.set("num_rows", num_rows)
        self._shape(call, num_rows)
        call.run(self._num_blocks, threads_for(self._num_weights // _PER_NUMBER))

    def _shape(self, call: Call, num_rows: int) -> None:
        """Sets what else depends on the number of rows."""


class _FewTiledRows(_FewRows):
    def _shape(self, call: Call, num_rows: int) -> None:
        call.point("configuration", configuration(num_rows))


def _few_rows(linear: nn.Linear, blocks: _Blocks) -> _FewRows:
    """With matrix instructions where the processor has them."""
    dtype, has_bias = linear.weight.dtype, linear.bias is not None
    if dtype == torch.bfloat16 and has_tiles() and can_tile(linear.in_features, linear.out_features, blocks.width):
        tiles = (tiled_linear_kernel(blocks.width, num_tiles=tiles, has_bias=has_bias) for tiles in (1, 2))
        return _FewTiledRows(linear, blocks, list(tiles), TILE)
    kernel = linear_kernel(element_type_of(dtype), blocks.width, has_bias=has_bias)
    return _FewRows(linear, blocks, [kernel], MAX_ROWS if dtype == torch.float32 else _MAX_ROWS_BFLOAT16)


def blocks_of(weight: torch.Tensor, packed: torch.Tensor | None) -> _Blocks | None:
    """Where the packed weight is, if it has the layout of a kernel."""
    if packed is None or not all(hasattr(torch.ops.mkldnn, name) for name in ("data_ptr", "_nbytes")):
        return None
    num_bytes = torch.ops.mkldnn._nbytes(packed)  # noqa: SLF001
    if num_bytes != weight.numel() * weight.itemsize:
        return None  # with padding
    address: int = torch.ops.mkldnn.data_ptr(packed)
    content = torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=weight.dtype)
    for width in _BLOCKS:
        if can_stream(element_type_of(weight.dtype), weight.shape[1], weight.shape[0], width) and _is_packed_in(
            width, content, weight
        ):
            return _Blocks(address, width)
    return None


def _is_packed_in(width: int, content: torch.Tensor, weight: torch.Tensor) -> bool:
    in_features, pair = weight.shape[1], pair_of(element_type_of(weight.dtype))
    rows_at_once = max(1, _COMPARED // (width * in_features)) * width
    for start in range(0, len(weight), rows_at_once):
        rows = weight[start : start + rows_at_once]
        blocks = rows.reshape(-1, width, in_features // pair, pair).transpose(1, 2)
        found = content[start * in_features : start * in_features + rows.numel()]
        if not torch.equal(found.view(blocks.shape), blocks):
            return False
    return True

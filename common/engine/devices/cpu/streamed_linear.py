"""Packed linear layers with kernels of our own, which read the weight where oneDNN has packed it.

They take all rows where they are as fast as oneDNN, otherwise few. oneDNN does not say how it lays weights out: the
kernels are used where a packed weight, compared with the weight itself, turns out to have the layout that they read.

x86 processors without instructions for bfloat16 widen it, which the kernels do for several rows at once and oneDNN for
each row again, so there weights in bfloat16 are packed here.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional

from common.engine.devices.cpu.huge_pages import use_huge_pages
from common.engine.devices.cpu.kernels import pairs
from common.engine.devices.cpu.kernels.compiled import (
    Call,
    CannotRecordError,
    Kernel,
    is_recording,
    result,
    threads_for,
)
from common.engine.devices.cpu.kernels.language import ElementType, element_type_of
from common.engine.devices.cpu.kernels.linear import BLOCKS, ROWS_PER_TASK, can_stream, linear_kernel, pair_of
from common.engine.devices.cpu.kernels.processor import is_x86
from common.engine.devices.cpu.kernels.tiled_linear import can_tile, tiled_gated_linear_kernel, tiled_linear_kernel
from common.engine.devices.cpu.kernels.tiles import MAX_TILE_ROWS, configuration, has_tiles, rest_configuration
from common.engine.devices.cpu.packed_linear import PackedLinear
from common.errors import ConfigError, ModelLoadError

_COMPARED = 1 << 22  # weights at once
_PER_NUMBER = 4  # weights that are multiplied in the time of a number of elementwise kernels
_MAX_ROWS_BFLOAT16 = 8  # of the kernel where oneDNN has better instructions
_MAX_ROWS_TILED = 768  # that matrix instructions multiply; other parts of a step have no more
_MAX_CACHED = 1 << 20  # bytes of a block that a core's second cache has room for, beside the next one
_TASKS_PER_THREAD = 4
_CHECKED_ROWS = ((1, 32), (31, 32), (67, 96), (67, 32))  # and those of a task
_MAX_ERROR = 0.02  # of the norm
_MAX_ROWS_AT_ONCE = 256  # of oneDNN in bfloat16, which leaves cores idle with some numbers of rows above 400


class _Blocks(NamedTuple):
    """A packed weight [out_features / width, in_features / pair, width, pair]."""

    address: int
    width: int
    own: torch.Tensor | None = None  # the memory, unless oneDNN has packed it


class StreamedLinear:
    """See PerToken. A linear layer on CPU.

    `batch_invariant`: a row's result does not depend on how many rows there are, as only our kernels see to; raises
    ConfigError if they do not take the layer. `gated`: that method will be called.
    """

    def __init__(self, linear: nn.Linear, *, batch_invariant: bool = False, gated: bool = False) -> None:
        blocks = own_blocks_of(linear, num_parts=2 if gated else 1)
        self._packed = PackedLinear(linear, is_packed=blocks is not None)
        blocks = blocks or blocks_of(linear.weight.detach(), self._packed.packed)
        if blocks is not None:
            use_huge_pages(blocks.address, linear.weight.nbytes)
        self._streamed = None if blocks is None else _Streamed(linear, blocks, any_rows=batch_invariant)
        self._gated = None
        if gated and self._streamed is not None and blocks is not None and not linear.out_features % (2 * blocks.width):
            self._gated = _Streamed(linear, blocks, any_rows=batch_invariant, gated=True)
        if batch_invariant and self._streamed is None:
            raise ConfigError.of(
                "batch_invariant",
                f"no kernel for a linear layer of {linear.in_features} x {linear.out_features} in "
                f"{linear.weight.dtype} on this processor",
            )

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """[rows, in_features] -> [rows, out_features]"""
        if self._streamed is not None and self._streamed.takes(inputs):
            return self._streamed(inputs)
        if is_recording():
            raise CannotRecordError(f"{inputs.shape[0]} rows of a linear layer are left to oneDNN")
        if inputs.dtype == torch.float32 or len(inputs) <= _MAX_ROWS_AT_ONCE:
            return self._packed(inputs)
        return torch.cat([self._packed(part) for part in torch.split(inputs, _MAX_ROWS_AT_ONCE)])

    def gated(self, inputs: torch.Tensor) -> torch.Tensor | None:
        """silu(gate) * up [rows, out_features / 2], where gate and up are the halves of the layer's outputs. None if
        there is no kernel for it."""
        if self._gated is not None and self._gated.takes(inputs):
            return self._gated(inputs)
        return None


class CompiledLinear(PackedLinear):
    """See PackedLinear. Few rows go through our kernels, if they take the layer: also one of a smaller weight."""

    def __init__(self, linear: nn.Linear) -> None:
        blocks = own_blocks_of(linear)
        super().__init__(linear, is_packed=blocks is not None)
        blocks = blocks or blocks_of(linear.weight.detach(), self.packed)
        self._streamed = None if blocks is None else _Streamed(linear, blocks, any_rows=False)
        if blocks is not None:
            self._plain_below = 0
            use_huge_pages(blocks.address, linear.weight.nbytes)

    @staticmethod
    def takes(linear: nn.Linear) -> bool:
        """See PackedLinear."""
        return _own_width(linear) > 0 or PackedLinear.takes(linear)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        if self._streamed is None:
            return super().forward(inputs)
        rows = inputs.reshape(-1, self.in_features)
        if not self._streamed.takes(rows):
            return super().forward(inputs)
        return self._streamed(rows).view(*inputs.shape[:-1], self.out_features)

    __call__ = forward  # see PackedLinear


class _Streamed:
    """A layer's weight with the kernel that reads it: of matrix instructions where the processor has them."""

    def __init__(self, linear: nn.Linear, blocks: _Blocks, *, any_rows: bool, gated: bool = False) -> None:
        """`any_rows`: the kernel takes more rows than it is fast for. `gated`: see StreamedLinear.gated.
        Raises ModelLoadError if a kernel of matrix instructions computes something else than torch."""
        self._dtype = dtype = linear.weight.dtype
        has_bias = linear.bias is not None
        self._is_tiled = _is_tiled(linear, blocks)
        if self._is_tiled:
            _check_tiled(linear.in_features, blocks.width, has_bias=has_bias, gated=gated)
            kernel = _tiled_kernel(blocks.width, has_bias=has_bias, gated=gated)
            is_cached = linear.in_features * blocks.width * linear.weight.itemsize <= _MAX_CACHED
            self._most_rows = _MAX_ROWS_TILED if is_cached else MAX_TILE_ROWS
        else:
            kernel = linear_kernel(element_type_of(dtype), blocks.width, has_bias=has_bias, gated=gated)
            multiplies_fast = dtype == torch.float32 or (pairs.MULTIPLIES_PAIRS and not has_tiles())
            any_rows = any_rows or blocks.own is not None
            self._most_rows = sys.maxsize if multiplies_fast or any_rows else _MAX_ROWS_BFLOAT16
        self._own = blocks.own
        self._any_rows = any_rows
        self._out_features = linear.out_features // 2 if gated else linear.out_features
        self._num_blocks = self._out_features // blocks.width
        self._num_weights = linear.weight.numel()
        sizes = {"in_features": linear.in_features, "out_features": linear.out_features}
        self._call = Call(kernel, weight=blocks.address, **sizes)
        if has_bias:
            self._call.keep("bias", linear.bias.detach().float())
        if self._is_tiled:
            self._call.keep("whole", configuration(MAX_TILE_ROWS))

    def takes(self, inputs: torch.Tensor) -> bool:
        """True if the kernel is for so many rows."""
        return self._any_rows or 0 < inputs.shape[0] <= self._most_rows

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """[rows, in_features] -> [rows, out_features]"""
        if inputs.dtype != self._dtype:
            raise TypeError(f"inputs are of {inputs.dtype}, weights of {self._dtype}")
        inputs = inputs.contiguous()
        out = result((inputs.shape[0], self._out_features), inputs.dtype)
        if not len(inputs):
            return out
        if len(inputs) <= self._most_rows:
            self._multiply(inputs, out)
        else:
            most = self._most_rows
            for few, few_out in zip(inputs.split(most), out.split(most), strict=True):  # type: ignore[no-untyped-call]
                self._multiply(few, few_out)
        return out

    def _multiply(self, inputs: torch.Tensor, out: torch.Tensor) -> None:
        num_rows = inputs.shape[0]
        self._call.point("inputs", inputs)
        self._call.point("out", out)
        self._call.set("num_rows", num_rows)
        num_threads = threads_for(self._num_weights // _PER_NUMBER)
        rows_per_task = ROWS_PER_TASK
        if self._is_tiled:
            rows_per_task = _rows_per_task(num_rows, self._num_blocks, num_threads)
            self._call.set("rows_per_task", rows_per_task)
            self._call.point("rest", rest_configuration(num_rows))
        self._call.run(-(-num_rows // rows_per_task) * self._num_blocks, num_threads)


def _rows_per_task(num_rows: int, num_blocks: int, num_threads: int) -> int:
    """All rows, or fewer where there are too few blocks for the threads."""
    num_parts = -(-_TASKS_PER_THREAD * num_threads // num_blocks)
    return -(-num_rows // (num_parts * MAX_TILE_ROWS)) * MAX_TILE_ROWS


def _tiled_kernel(width: int, *, has_bias: bool, gated: bool) -> Kernel:
    return (tiled_gated_linear_kernel if gated else tiled_linear_kernel)(width, has_bias=has_bias)


@cache
def _check_tiled(in_features: int, width: int, *, has_bias: bool, gated: bool) -> None:
    """Compares a kernel with torch's operators, on random numbers."""
    generator = torch.Generator().manual_seed(0)
    out_features = 2 * width
    weight = (torch.randn(out_features, in_features, generator=generator) / in_features**0.5).bfloat16()
    bias = torch.randn(out_features, generator=generator)
    packed = weight.view(-1, width, in_features // 2, 2).transpose(1, 2).contiguous()
    call = Call(
        _tiled_kernel(width, has_bias=has_bias, gated=gated),
        weight=packed.data_ptr(),
        bias=bias.data_ptr(),
        whole=configuration(MAX_TILE_ROWS).data_ptr(),
        in_features=in_features,
        out_features=out_features,
    )
    for num_rows, rows_per_task in _CHECKED_ROWS:
        inputs = torch.randn(num_rows, in_features, generator=generator).bfloat16()
        expected = functional.linear(inputs.float(), weight.float(), bias if has_bias else None)
        if gated:
            gate, up = expected.chunk(2, dim=1)
            expected = functional.silu(gate) * up
        found = torch.empty(expected.shape, dtype=torch.bfloat16)
        call.point("inputs", inputs)
        call.point("out", found)
        call.point("rest", rest_configuration(num_rows))
        call.set("num_rows", num_rows)
        call.set("rows_per_task", rows_per_task)
        call.run(-(-num_rows // rows_per_task) * (found.shape[1] // width), 1)
        error = float((found.float() - expected).norm() / expected.norm())
        if not error <= _MAX_ERROR:
            raise ModelLoadError(f"the bfloat16 kernels differ from torch (relative error {error:.2g})", param="dtype")


def _is_tiled(linear: nn.Linear, blocks: _Blocks) -> bool:
    if linear.weight.dtype != torch.bfloat16 or not has_tiles():
        return False
    return can_tile(linear.in_features, linear.out_features, blocks.width)


def own_blocks_of(linear: nn.Linear, num_parts: int = 1) -> _Blocks | None:
    """Returns the weight packed for a kernel, if that is faster than oneDNN with any number of rows. No block has
    outputs of two of the parts, if there is such a size."""
    width = _own_width(linear, num_parts) or _own_width(linear)
    if not width:
        return None
    pair = pair_of(ElementType.BFLOAT16)
    pairs_of_weights = linear.weight.detach().contiguous().view(torch.int32)
    packed = pairs_of_weights.view(-1, width, linear.in_features // pair).transpose(1, 2).contiguous()
    return _Blocks(packed.data_ptr(), width, packed)


def only_widens_bfloat16() -> bool:
    """True on x86 processors without instructions for bfloat16, where torch and oneDNN are slow in it."""
    return is_x86() and not (pairs.MULTIPLIES_PAIRS or has_tiles())


def _own_width(linear: nn.Linear, num_parts: int = 1) -> int:
    """Outputs in a block of a weight that is packed here; 0 for others."""
    if linear.weight.dtype != torch.bfloat16 or not only_widens_bfloat16():
        return 0
    out_features, in_features = linear.weight.shape
    size = out_features // num_parts
    return next((width for width in BLOCKS if can_stream(ElementType.BFLOAT16, in_features, size, width)), 0)


def blocks_of(weight: torch.Tensor, packed: torch.Tensor | None) -> _Blocks | None:
    """Returns the packed weight's blocks, if it has the layout of a kernel."""
    if packed is None or not all(hasattr(torch.ops.mkldnn, name) for name in ("data_ptr", "_nbytes")):
        return None
    num_bytes = torch.ops.mkldnn._nbytes(packed)  # noqa: SLF001
    if num_bytes != weight.numel() * weight.itemsize:
        return None  # with padding
    address: int = torch.ops.mkldnn.data_ptr(packed)
    content = torch.frombuffer((ctypes.c_char * num_bytes).from_address(address), dtype=weight.dtype)
    for width in BLOCKS:
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

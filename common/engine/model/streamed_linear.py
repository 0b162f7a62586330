"""Packed linear layers with a kernel of our own for few rows, which reads the weight where oneDNN has packed it.

oneDNN does not say how it lays weights out. The kernel is used where a packed weight, compared with the weight itself,
turns out to have the layout that the kernel reads.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from llvmlite import binding
from torch import nn

from common.engine.cpu_kernels.compiled import Call, threads_for
from common.engine.cpu_kernels.language import element_type_of
from common.engine.cpu_kernels.linear import MAX_ROWS, can_stream, linear_kernel, pair_of
from common.engine.model.packed_linear import PackedLinear

_BLOCKS = (64, 48, 32, 16)  # outputs in a block
_COMPARED = 1 << 22  # weights at once
_PER_NUMBER = 4  # weights that are multiplied in the time of a number of elementwise kernels


class _Blocks(NamedTuple):
    """A packed weight [out_features / width, in_features / pair, width, pair]."""

    address: int
    width: int


class StreamedLinear:
    """See PerToken. A linear layer on CPU."""

    def __init__(self, linear: nn.Linear) -> None:
        self._packed = PackedLinear(linear)
        self._in_features, self._out_features = linear.in_features, linear.out_features
        self._most_streamed = 0  # numbers of inputs
        blocks = _blocks_of(linear.weight.detach(), self._packed.packed)
        if blocks is None:
            return
        kernel = linear_kernel(element_type_of(linear.weight.dtype), blocks.width, has_bias=linear.bias is not None)
        self._call = Call(kernel, weight=blocks.address, in_features=self._in_features, out_features=self._out_features)
        if linear.bias is not None:
            self._call.keep("bias", linear.bias.detach().float())
        self._num_blocks = self._out_features // blocks.width
        self._num_weights = linear.weight.numel()
        self._most_streamed = _most_rows(linear.weight.dtype) * self._in_features

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        """[rows, in_features] -> [rows, out_features]"""
        if not 0 < inputs.numel() <= self._most_streamed:
            return self._packed(inputs)
        num_rows = inputs.shape[0]
        out = torch.empty((num_rows, self._out_features), dtype=inputs.dtype)
        inputs = inputs.contiguous()
        call = self._call
        call.set("inputs", inputs.data_ptr())
        call.set("out", out.data_ptr())
        call.set("num_rows", num_rows)
        call.run(self._num_blocks, threads_for(self._num_weights // _PER_NUMBER))
        return out


def _most_rows(dtype: torch.dtype) -> int:
    """Rows up to which our kernel is not slower than oneDNN's, which in bfloat16 uses matrix instructions (AMX)."""
    if dtype == torch.bfloat16:
        return 1 if binding.get_host_cpu_features().get("amx-bf16") else 8
    return MAX_ROWS


def _blocks_of(weight: torch.Tensor, packed: torch.Tensor | None) -> _Blocks | None:
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

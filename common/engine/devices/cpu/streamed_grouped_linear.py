"""Linear layers with weights in groups on the CPU kernels."""

from __future__ import annotations

import sys

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
from common.engine.devices.cpu.kernels.grouped_linear import (
    FLOAT8_FACTOR,
    Codes,
    dequantize_kernel,
    grouped_linear_kernel,
    piece_of,
    reorder_kernel,
)
from common.engine.devices.cpu.kernels.language import ElementType, element_type_of
from common.engine.devices.cpu.kernels.linear import GRANULE, ROWS_PER_TASK, block_of, linear_kernel
from common.engine.devices.cpu.kernels.linear import can_stream as can_multiply
from common.engine.devices.cpu.kernels.paired_grouped_linear import (
    MAX_ROWS,
    can_pair,
    dequantize_pairs_kernel,
    paired_grouped_linear_kernel,
)
from common.engine.devices.cpu.kernels.tiles import has_tiles
from common.engine.devices.cpu.streamed_linear import only_widens_bfloat16
from common.engine.quantization.grouped import GroupedLinear, to_int32

_PER_NUMBER = 4  # weights that are multiplied in the time of a number of elementwise kernels
_FEW_ROWS = 64  # that cost less than over weights that are widened first, where other instructions multiply those
_WIDENED = 1 << 21  # of these weights at once
_SIGNS = -0x77777778  # 0x88888888: the bits in which codes from -8 to 7 differ from those from 0 to 15
_CODES = {torch.int32: Codes.INT4, torch.int8: Codes.INT8, torch.float8_e4m3fn: Codes.FLOAT8}


class StreamedGroupedLinear(nn.Module):
    """See PerToken, and for use in a model's own code a module. `linear` may be given up.

    `batch_invariant`: a row's result does not depend on how many rows there are; else weights for bfloat16 are
    widened for many rows, where other instructions than the kernel's multiply them faster."""

    def __init__(self, linear: GroupedLinear, *, batch_invariant: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight  # shape and type
        dtype, codes, group = linear.weight.dtype, _CODES[linear.codes.dtype], linear.group
        element = element_type_of(dtype)
        self._padding = -self.out_features % GRANULE
        self._padded = self.out_features + self._padding
        self._block = block_of(self._padded)
        in_pairs = can_pair(element, codes, group)
        weight = self._in_blocks(linear.codes.view(torch.int8) if codes is Codes.FLOAT8 else linear.codes)
        if codes is Codes.INT4:
            weight = weight ^ _SIGNS
        factor = FLOAT8_FACTOR if codes is Codes.FLOAT8 and not in_pairs else 1.0
        kept = {"weight": _in_pairs(weight, codes) if in_pairs else weight}
        kept["scale"] = self._in_blocks(linear.scale * factor)
        if linear.shift is not None:
            kept["shift"] = self._in_blocks(linear.shift)
        bias = None if linear.bias is None else functional.pad(linear.bias.detach().float(), (0, self._padding))
        has_shift, has_bias = linear.shift is not None, bias is not None
        use_huge_pages(kept["weight"].data_ptr(), kept["weight"].nbytes)
        self._bias = bias
        shape = codes, self._block, group
        self._dequantize: Call | None = None
        self._multiply_widened: Call | None = None
        if in_pairs:
            self._rows_at_once, self._rows_per_task = MAX_ROWS, MAX_ROWS
            kernel = paired_grouped_linear_kernel(*shape, has_shift=has_shift, has_bias=has_bias)
            takes_all = batch_invariant
        else:
            self._rows_at_once, self._rows_per_task = sys.maxsize, ROWS_PER_TASK
            kernel = grouped_linear_kernel(element, *shape, has_shift=has_shift, has_bias=has_bias)
            takes_all = batch_invariant or element is ElementType.FLOAT32 or only_widens_bfloat16()
        if not takes_all and in_pairs:
            packed = not has_tiles() and can_multiply(element, self.in_features, self._padded, self._block)
            self._dequantize = Call(dequantize_pairs_kernel(*shape, has_shift=has_shift, packed=packed))
            if packed:
                self._multiply_widened = Call(linear_kernel(element, self._block, has_bias=has_bias))
                self._multiply_widened.set("in_features", self.in_features)
                self._multiply_widened.set("out_features", self._padded)
        elif not takes_all:
            self._dequantize = Call(dequantize_kernel(element, *shape, has_shift=has_shift))
        self._multiply = Call(kernel)
        for call in (self._multiply, self._dequantize):
            if call is not None:
                call.set("in_features", self.in_features)
                for name, tensor in kept.items():
                    call.keep(name, tensor)
        self._multiply.set("out_features", self._padded)
        if bias is not None:
            self._multiply.keep("bias", bias)
        self._reorder = None if linear.order is None else _Reorder(linear.order, dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        rows = inputs.reshape(-1, self.in_features).contiguous()
        if self._reorder is not None:
            rows = self._reorder(rows)
        if self._dequantize is not None and len(rows) > _FEW_ROWS:
            out = self._of_widened(self._dequantize, rows)
        else:
            out = self._of(rows)
        if self._padding:
            if is_recording():
                raise CannotRecordError("a linear layer is padded by torch")
            out = out[:, : self.out_features].contiguous()
        return out.view(*inputs.shape[:-1], self.out_features)

    __call__ = forward  # without nn.Module's hooks, which take as long as a small operator

    def _of(self, rows: torch.Tensor) -> torch.Tensor:
        out = result((len(rows), self._padded), rows.dtype)
        most = self._rows_at_once
        for some, some_out in zip(rows.split(most), out.split(most), strict=True):  # type: ignore[no-untyped-call]
            self._multiply.point("inputs", some)
            self._multiply.point("out", some_out)
            self._multiply.set("num_rows", len(some))
            num_parts = -(-len(some) // self._rows_per_task)
            self._multiply.run(num_parts * (self._padded // self._block), self._threads(self._padded))
        return out

    def _of_widened(self, dequantize: Call, rows: torch.Tensor) -> torch.Tensor:
        """Widens some of the weights, multiplies them, and so on."""
        if is_recording():
            raise CannotRecordError(f"weights are widened for {len(rows)} rows")
        out = torch.empty((len(rows), self._padded), dtype=rows.dtype)
        num_blocks = self._padded // self._block
        at_once = max(1, _WIDENED // (self.in_features * self._block))
        for first in range(0, num_blocks, at_once):
            last = min(first + at_once, num_blocks)
            start, stop = first * self._block, last * self._block
            widened = torch.empty((self.in_features, stop - start), dtype=rows.dtype)
            dequantize.point("out", widened)
            dequantize.set("first_block", first)
            is_packed = self._multiply_widened is not None
            dequantize.set("stride", self._block if is_packed else stop - start)
            dequantize.set("block_stride", self.in_features * self._block if is_packed else self._block)
            dequantize.run(last - first, self._threads(stop - start))
            if self._multiply_widened is not None:
                self._multiply_packed(self._multiply_widened, rows, widened, out, start)
            elif self._bias is None:
                torch.mm(rows, widened, out=out[:, start:stop])
            else:
                torch.addmm(self._bias[start:stop].to(rows.dtype), rows, widened, out=out[:, start:stop])
        return out

    def _multiply_packed(
        self, call: Call, rows: torch.Tensor, widened: torch.Tensor, out: torch.Tensor, start: int
    ) -> None:
        """Computes the outputs from `start` on, as many as there are weights of."""
        call.point("inputs", rows)
        call.point("weight", widened)
        call.point("out", out[:, start:])
        call.set("num_rows", len(rows))
        if self._bias is not None:
            call.point("bias", self._bias[start:])
        num_tasks = -(-len(rows) // ROWS_PER_TASK) * (widened.shape[1] // self._block)
        call.run(num_tasks, self._threads(widened.shape[1]))

    def _threads(self, num_outputs: int) -> int:
        return threads_for(num_outputs * self.in_features // _PER_NUMBER)

    def _in_blocks(self, tensor: torch.Tensor) -> torch.Tensor:
        """[rows, out_features] -> [out_features / block, rows, block]"""
        padded = functional.pad(tensor, (0, self._padding))
        return padded.view(len(tensor), -1, self._block).transpose(0, 1).contiguous()


class _Reorder:
    def __init__(self, order: torch.Tensor, dtype: torch.dtype) -> None:
        self._call = Call(reorder_kernel(element_type_of(dtype)), size=len(order))
        self._call.keep("order", order)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        out = result(tuple(inputs.shape), inputs.dtype)
        self._call.point("inputs", inputs)
        self._call.point("out", out)
        self._call.run(len(inputs), threads_for(inputs.numel()))
        return out


def can_stream(linear: GroupedLinear) -> bool:
    """True if there are kernels for groups of so many inputs."""
    return piece_of(linear.group) is not None


def _in_pairs(weight: torch.Tensor, codes: Codes) -> torch.Tensor:
    """Codes in blocks [blocks, rows, block] as the kernels for pairs take them."""
    num_blocks, num_rows, block = weight.shape
    match codes:
        case Codes.INT8:
            return weight
        case Codes.INT4:  # those of even inputs in the lower half of a word, those of odd ones in the upper half
            shifts = ((4 * i, 4 * (i // 2) + 16 * (i % 2)) for i in range(8))
            words = weight.to(torch.int64)
            return to_int32(sum((words >> own & 15) << other for own, other in shifts))  # type: ignore[arg-type]
        case Codes.FLOAT8:  # of four outputs the first two inputs, then the next two
            quads = weight.view(num_blocks, num_rows // 4, 2, 2, block // 4, 4)
            return quads.permute(0, 1, 4, 2, 5, 3).contiguous()

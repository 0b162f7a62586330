"""Linear layers with weights in groups on the CPU kernels."""

from __future__ import annotations

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
    MAX_ROWS,
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
    can_pair,
    dequantize_pairs_kernel,
    paired_grouped_linear_kernel,
)
from common.engine.devices.cpu.kernels.tiles import has_tiles
from common.engine.devices.cpu.streamed_linear import only_widens_bfloat16
from common.engine.quantization.grouped import GroupedLinear, to_int32

_PER_NUMBER = 4  # weights that are multiplied in the time of a number of elementwise kernels
_FEW_ROWS = 64  # that cost less over packed weights than over those that are widened first
_WIDENED = 1 << 21  # weights that are widened at once for more rows
_SIGNS = -0x77777778  # 0x88888888: the bits in which codes from -8 to 7 differ from those from 0 to 15
_CODES = {torch.int32: Codes.INT4, torch.int8: Codes.INT8, torch.float8_e4m3fn: Codes.FLOAT8}


class StreamedGroupedLinear(nn.Module):
    """See PerToken, and for use in a model's own code a module. `linear` may be given up.

    `batch_invariant`: a row's result does not depend on how many rows there are; else weights are widened for many."""

    def __init__(self, linear: GroupedLinear, *, batch_invariant: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight  # shape and type
        dtype, codes, group = linear.weight.dtype, _CODES[linear.codes.dtype], linear.group
        element = element_type_of(dtype)
        self._most_rows = MAX_ROWS if batch_invariant else _FEW_ROWS
        self._batch_invariant = batch_invariant
        self._padding = -self.out_features % GRANULE
        self._block = block_of(self.out_features + self._padding)
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
        if in_pairs:
            kernel = paired_grouped_linear_kernel(codes, self._block, group, has_shift=has_shift, has_bias=has_bias)
            packed, weights = not has_tiles() and self._can_multiply(element), element
            widening = dequantize_pairs_kernel(codes, self._block, group, has_shift=has_shift, packed=packed)
        else:
            kernel = grouped_linear_kernel(element, codes, self._block, group, has_shift=has_shift, has_bias=has_bias)
            is_kernel = element is ElementType.FLOAT32 or only_widens_bfloat16()
            packed = is_kernel and self._can_multiply(ElementType.FLOAT32)
            weights = ElementType.FLOAT32 if packed else element
            widening = dequantize_kernel(weights, codes, self._block, group, has_shift=has_shift)
        self._widened_dtype = weights.dtype
        self._multiply, self._dequantize = Call(kernel), Call(widening)
        for call in (self._multiply, self._dequantize):
            call.set("in_features", self.in_features)
            for name, tensor in kept.items():
                call.keep(name, tensor)
        self._multiply.set("out_features", self.out_features + self._padding)
        if bias is not None:
            self._multiply.keep("bias", bias)
        self._bias = bias
        self._multiply_widened: Call | None = None
        if packed:
            self._multiply_widened = Call(linear_kernel(element, self._block, has_bias=has_bias, weights=weights))
            self._multiply_widened.set("in_features", self.in_features)
            self._multiply_widened.set("out_features", self.out_features + self._padding)
        self._reorder = None if linear.order is None else _Reorder(linear.order, dtype)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        rows = inputs.reshape(-1, self.in_features).contiguous()
        if self._reorder is not None:
            rows = self._reorder(rows)
        if len(rows) <= self._most_rows or self._batch_invariant:
            out = self._of_few(rows)
        else:
            out = self._of_many(rows)
        if self._padding:
            if is_recording():
                raise CannotRecordError("a linear layer is padded by torch")
            out = out[:, : self.out_features].contiguous()
        return out.view(*inputs.shape[:-1], self.out_features)

    __call__ = forward  # without nn.Module's hooks, which take as long as a small operator

    def _of_few(self, rows: torch.Tensor) -> torch.Tensor:
        out = result((len(rows), self.out_features + self._padding), rows.dtype)
        most = self._most_rows
        for few, few_out in zip(rows.split(most), out.split(most), strict=True):  # type: ignore[no-untyped-call]
            self._multiply.point("inputs", few)
            self._multiply.point("out", few_out)
            self._multiply.set("num_rows", len(few))
            self._multiply.run(out.shape[1] // self._block if len(few) else 0, self._threads(out.shape[1]))
        return out

    def _of_many(self, rows: torch.Tensor) -> torch.Tensor:
        """Widens some of the weights, multiplies them, and so on."""
        if is_recording():
            raise CannotRecordError(f"weights are widened for {len(rows)} rows")
        out = torch.empty((len(rows), self.out_features + self._padding), dtype=rows.dtype)
        num_blocks = out.shape[1] // self._block
        at_once = max(1, _WIDENED // (self.in_features * self._block))
        for first in range(0, num_blocks, at_once):
            last = min(first + at_once, num_blocks)
            start, stop = first * self._block, last * self._block
            widened = torch.empty((self.in_features, stop - start), dtype=self._widened_dtype)
            self._dequantize.point("out", widened)
            self._dequantize.set("first_block", first)
            is_packed = self._multiply_widened is not None
            self._dequantize.set("stride", self._block if is_packed else stop - start)
            self._dequantize.set("block_stride", self.in_features * self._block if is_packed else self._block)
            self._dequantize.run(last - first, self._threads(stop - start))
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

    def _can_multiply(self, element: ElementType) -> bool:
        return can_multiply(element, self.in_features, self.out_features + self._padding, self._block)

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

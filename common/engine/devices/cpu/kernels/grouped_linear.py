"""Linear layers whose weights are codes of 4 or 8 bits with a scale, and perhaps a shift, for each group of inputs.

Weights stay packed in memory: with few rows a linear layer takes as long as reading them. Codes become float32 numbers
in registers, four rows at a time. For more rows each block of outputs is widened piece by piece in the core's cache,
once for all rows of a task.
The products of an output are added up in the same order whatever the number of rows.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir

from common.engine.devices.cpu.kernels import linear
from common.engine.devices.cpu.kernels.compiled import KernelSource, kernel_factory
from common.engine.devices.cpu.kernels.language import (
    FLOAT,
    INT32,
    MAX_LANES,
    Builder,
    ElementType,
    Operand,
    Pointer,
    Value,
    constant,
    like,
)
from common.engine.devices.cpu.kernels.processor import is_x86

FLOAT8_FACTOR = 256.0  # by which scales of FLOAT8 codes are larger

_FEW_ROWS = 4  # that take turns over codes in registers
_VECTORS = 4  # of outputs at once, at most
_PIECES = (64, 32, 16)  # inputs in a piece
_PER_WORD, _BITS = 8, 4
_LOOKS_UP = MAX_LANES == 16 and is_x86()


class Codes(enum.Enum):
    """Kinds of codes."""

    INT4 = enum.auto()  # integers from -8 to 7, eight inputs' in 32 bits, the first one lowest
    INT8 = enum.auto()
    FLOAT8 = enum.auto()  # e4m3

    @property
    def inputs(self) -> int:
        """Inputs of an element of the weight."""
        return _PER_WORD if self is Codes.INT4 else 1

    @property
    def element(self) -> ElementType:
        """Type of the elements: of words it says the size only."""
        return ElementType.FLOAT32 if self is Codes.INT4 else ElementType.INT8


def piece_of(group: int) -> int | None:
    """Inputs in a piece of the weight; None if there is no kernel for groups of so many."""
    return next((piece for piece in _PIECES if group % piece == 0), None)


@kernel_factory
def grouped_linear_kernel(
    element: ElementType, codes: Codes, block: int, group: int, *, has_shift: bool, has_bias: bool
) -> KernelSource:
    """out = inputs @ (numbers * scale + shift).T + bias; tasks are those of `linear_kernel`.

    inputs [num_rows, in_features] and out [num_rows, out_features] of `element`; weight
    [out_features / block, in_features / codes.inputs, block]; scale and shift [out_features / block,
    in_features / group, block] and bias [out_features] float32.
    """
    piece = piece_of(group)
    assert piece is not None

    def body(b: Builder, task: Value, a: Any) -> None:
        number, first_row, num_rows = linear.place_of(b, task, a.num_rows)
        weights = _Weights(b, a, number, codes, block, group, has_shift=has_shift)
        inputs = a.inputs.at(first_row * a.in_features)
        totals = b.scratch(linear.ROWS_PER_TASK * block)
        with b.loop(0, num_rows * block, MAX_LANES) as place:
            totals.at(place).store(b.number(0.0, MAX_LANES))
        for count in range(1, _FEW_ROWS + 1):
            with b.when((num_rows >= count) & (num_rows < count + 1)):
                rows = [inputs.at(a.in_features * i) for i in range(count)]
                add_products(b, a, rows, weights, [totals.at(i * block) for i in range(count)])
        with b.when(num_rows >= _FEW_ROWS + 1):
            multiply_widened(b, a, inputs, num_rows, weights, totals)
        with b.loop(0, num_rows) as row, b.loop(0, block, MAX_LANES) as place:
            output, total = number * block + place, totals.at(row * block + place).load(MAX_LANES)
            result = total + a.bias.at(output).load(MAX_LANES) if has_bias else total
            a.out.at((first_row + row) * a.out_features + output).store(result)

    def add_products(b: Builder, a: Any, rows: list[Pointer], weights: _Weights, totals: list[Pointer]) -> None:
        """totals += inputs @ weights, for some rows."""
        width = min(block, _VECTORS * MAX_LANES, MAX_LANES // len(rows) * MAX_LANES)
        while block % width:
            width -= MAX_LANES
        for start in range(0, block, width):
            places = range(start, start + width, MAX_LANES)
            sums = [[b.variable(total.at(place).load(MAX_LANES)) for place in places] for total in totals]
            with b.loop(0, a.in_features, group) as first:
                for k, vectors in weights.of_group(first, 0, group, places):
                    for source, row in zip(rows, sums, strict=True):
                        one = b.number(source.at(k).load(), MAX_LANES)
                        for vector, sum_ in zip(vectors, row, strict=True):
                            sum_.set(b.fma(one, vector, sum_.get()))
            for total, row in zip(totals, sums, strict=True):
                for place, sum_ in zip(places, row, strict=True):
                    total.at(place).store(sum_.get())

    def multiply_widened(
        b: Builder, a: Any, inputs: Pointer, num_rows: Value, weights: _Weights, totals: Pointer
    ) -> None:
        widened, wide_inputs = b.scratch(piece * block), b.scratch(linear.ROWS * piece)
        with b.loop(0, a.in_features, group) as group_start, b.loop(0, group, piece) as part:
            first = group_start + part
            weights.widen(group_start, part, piece, widened)

            def multiply(row: Value, count: int, first: Value = first) -> None:
                sources = [inputs.at((row + i) * a.in_features + first) for i in range(count)]
                if element is not ElementType.FLOAT32:
                    for i, source in enumerate(sources):
                        sources[i] = wide_inputs.at(i * piece)
                        linear.copy_widened(b, source, sources[i], piece, MAX_LANES)
                sums = [totals.at((row + i) * block) for i in range(count)]
                linear.add_products(b, sources, widened, sums, block, (0, piece))

            linear.for_rows(b, num_rows, multiply)

    return KernelSource("grouped_linear", arguments_of(element, codes), body)


@kernel_factory
def dequantize_kernel(element: ElementType, codes: Codes, block: int, group: int, *, has_shift: bool) -> KernelSource:
    """out = numbers * scale + shift; a task is one block of outputs, of which the first is number `first_block`. In out
    there are `stride` numbers from one input to the next and `block_stride` from one block to the next. Others are as
    in `grouped_linear_kernel`."""
    piece = piece_of(group)
    assert piece is not None

    def body(b: Builder, task: Value, a: Any) -> None:
        weights = _Weights(b, a, task + a.first_block, codes, block, group, has_shift=has_shift)
        widened = b.scratch(piece * block)
        with b.loop(0, a.in_features, group) as group_start, b.loop(0, group, piece) as part:
            weights.widen(group_start, part, piece, widened)
            with b.loop(0, piece) as k, b.loop(0, block, MAX_LANES) as place:
                target = a.out.at((group_start + part + k) * a.stride + task * a.block_stride + place)
                target.store(widened.at(k * block + place).load(MAX_LANES))

    return KernelSource("dequantize", arguments_of(element, codes, "first_block", "stride", "block_stride"), body)


@kernel_factory
def reorder_kernel(element: ElementType) -> KernelSource:
    """out[row, k] = inputs[row, order[k]], of `size` numbers each; a task is a row."""

    def body(b: Builder, task: Value, a: Any) -> None:
        source, target = a.inputs.at(task * a.size), a.out.at(task * a.size)
        with b.loop(0, a.size) as k:
            target.at(k).store(source.at(a.order.at(k).load()).load())

    arguments = {"inputs": element, "order": ElementType.INT64, "out": element, "size": None}
    return KernelSource("reorder", arguments, body)


def arguments_of(element: ElementType, codes: Codes, *others: str) -> dict[str, ElementType | None]:
    """Arguments of a kernel with weights in groups."""
    floats = dict.fromkeys(("scale", "shift", "bias"), ElementType.FLOAT32)
    sizes = dict.fromkeys(("num_rows", "in_features", "out_features", *others))
    return {"inputs": element, "weight": codes.element, "out": element} | floats | sizes


class _Weights:
    """A block of outputs, whose weights are float32 numbers in registers."""

    def __init__(
        self, b: Builder, a: Any, number: Value, codes: Codes, block: int, group: int, *, has_shift: bool
    ) -> None:
        self._b = b
        self._codes, self._block, self._group = codes, block, group
        self._weight = a.weight.at(number * (a.in_features // codes.inputs) * block)
        of_block = number * (a.in_features // group) * block
        self._scale, self._shift = a.scale.at(of_block), a.shift.at(of_block) if has_shift else None
        self._number = {Codes.INT4: self._int4, Codes.INT8: self._int8, Codes.FLOAT8: self._float8}[codes]
        table = [float(code if code < _PER_WORD else code - 2 * _PER_WORD) for code in range(2 * _PER_WORD)]
        self._table = ir.Constant(like(FLOAT, len(table)), table)

    def of_group(
        self, group_start: Value, start: Operand, count: int, places: range
    ) -> Iterator[tuple[Value, list[Value]]]:
        """Loops over `count` inputs of a group, of which it is `start`; gives the number of each input with the weights
        of the outputs at `places`."""
        b, block = self._b, self._block
        of_group = group_start // self._group * block
        scales = [self._scale.at(of_group + place).load(MAX_LANES) for place in places]
        shifts = None
        if self._shift is not None:
            shifts = [self._shift.at(of_group + place).load(MAX_LANES) for place in places]
        with b.loop(0, count, _PER_WORD) as eight:
            first = group_start + start + eight
            number_at = self._number(first, places)
            for i in range(_PER_WORD):
                numbers = [number_at(i, place) for place in range(len(places))]
                if shifts is None:
                    yield first + i, [number * scale for number, scale in zip(numbers, scales, strict=True)]
                else:
                    yield first + i, list(map(b.fma, numbers, scales, shifts))

    def widen(self, group_start: Value, start: Value, piece: int, widened: Pointer) -> None:
        """Writes a piece of the weights, [piece, block]."""
        width = min(self._block, _VECTORS * MAX_LANES)
        while self._block % width:
            width -= MAX_LANES
        for first_place in range(0, self._block, width):
            places = range(first_place, first_place + width, MAX_LANES)
            for k, vectors in self.of_group(group_start, start, piece, places):
                for place, vector in zip(places, vectors, strict=True):
                    widened.at((k - group_start - start) * self._block + place).store(vector)

    def _int4(self, first: Value, places: range) -> Callable[[int, int], Value]:
        b = self._b
        row = self._weight.at(first // _PER_WORD * self._block)
        words = [b.read(row.at(place), INT32, MAX_LANES) for place in places]

        def number_at(i: int, place: int) -> Value:
            if _LOOKS_UP:  # only the lowest bits of a lane count
                shifted = b.ir.lshr(words[place], constant(INT32, _BITS * i, MAX_LANES))
                kind = self._table.type
                return Value(b, b.intrinsic("llvm.x86.avx512.permvar.sf.512", kind, [self._table, shifted]))
            above = b.ir.shl(words[place], constant(INT32, 32 - _BITS * (i + 1), MAX_LANES))
            integers = b.ir.ashr(above, constant(INT32, 32 - _BITS, MAX_LANES))
            return Value(b, b.ir.sitofp(integers, like(FLOAT, MAX_LANES)))

        return number_at

    def _int8(self, first: Value, places: range) -> Callable[[int, int], Value]:
        return lambda i, place: self._weight.at((first + i) * self._block + places[place]).load(MAX_LANES)

    def _float8(self, first: Value, places: range) -> Callable[[int, int], Value]:
        """By way of float16, whose exponents are 8 larger."""
        b, halves = self._b, ir.IntType(16)

        def number_at(i: int, place: int) -> Value:
            raw = b.read(self._weight.at((first + i) * self._block + places[place]), ir.IntType(8), MAX_LANES)
            wide = b.ir.zext(raw, like(halves, MAX_LANES))
            sign = b.ir.shl(b.ir.and_(wide, constant(halves, 0x80, MAX_LANES)), constant(halves, 8, MAX_LANES))
            rest = b.ir.shl(b.ir.and_(wide, constant(halves, 0x7F, MAX_LANES)), constant(halves, 7, MAX_LANES))
            half = b.ir.bitcast(b.ir.or_(sign, rest), like(ir.HalfType(), MAX_LANES))
            return Value(b, b.ir.fpext(half, like(FLOAT, MAX_LANES)))

        return number_at

"""Linear layers with weights in groups, for activations in bfloat16 on processors that multiply pairs of such numbers.

Codes become pairs of numbers in bfloat16, which holds them exactly: those of 4 bits by one lookup for two inputs of 16
outputs, float8 by two lookups for four. The sums of a group are float32 and scaled when they are complete, so that the
scale costs nothing; its shift is multiplied with the sum of the group's inputs. Six rows take turns over codes in
registers, the others of a step over those in the core's first cache.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from llvmlite import ir

from common.engine.devices.cpu.kernels.compiled import KernelSource, kernel_factory
from common.engine.devices.cpu.kernels.grouped_linear import Codes, arguments_of
from common.engine.devices.cpu.kernels.language import (
    INT32,
    MAX_LANES,
    Builder,
    ElementType,
    Pointer,
    Value,
    constant,
    like,
)
from common.engine.devices.cpu.kernels.pairs import (
    MULTIPLIES_PAIRS,
    fma_pairs,
    halves_of,
    load_pair,
    load_pairs,
    paired,
    paired_integers,
)
from common.engine.devices.cpu.kernels.processor import features, is_x86

MAX_ROWS = 384

_ROWS = 6  # computed at once, with sums in registers
_VECTORS = 4  # of outputs at once, at most
_PIECE = 32  # inputs; groups are a multiple
_BITS = 4
_BYTES = 64  # in a register
_IS_X86 = is_x86()
_LOOKS_UP_BYTES = bool(features().get("avx512vbmi"))
_STEPS = {Codes.INT4: 8, Codes.FLOAT8: 4, Codes.INT8: 2}  # inputs that are decoded together


def can_pair(element: ElementType, codes: Codes, group: int) -> bool:
    """True if the kernel takes such weights."""
    is_decoded = codes is not Codes.FLOAT8 or _LOOKS_UP_BYTES
    return element is ElementType.BFLOAT16 and MULTIPLIES_PAIRS and _IS_X86 and is_decoded and group % _PIECE == 0


@kernel_factory
def paired_grouped_linear_kernel(
    codes: Codes, block: int, group: int, *, has_shift: bool, has_bias: bool
) -> KernelSource:
    """Makes a `grouped_linear_kernel` for bfloat16. Of the weight, codes for one output are next to each other as the
    processor takes them: see `in_pairs`."""

    def body(b: Builder, task: Value, a: Any) -> None:
        weights = PairedWeights(b, a, task, codes, block, group, has_shift=has_shift)
        totals = b.scratch(MAX_ROWS * block)
        with b.loop(0, a.num_rows * block, MAX_LANES) as place:
            totals.at(place).store(b.number(0.0, MAX_LANES))
        with b.loop(0, a.in_features, group) as first:
            rest = a.num_rows % _ROWS
            with b.loop(0, a.num_rows - rest, _ROWS) as row:
                add_products(b, a, weights, totals, first, row, _ROWS)
            for num_rows in range(1, _ROWS):
                with b.when((rest >= num_rows) & (rest < num_rows + 1)):
                    add_products(b, a, weights, totals, first, a.num_rows - rest, num_rows)
        with b.loop(0, a.num_rows) as row, b.loop(0, block, MAX_LANES) as place:
            output, total = task * block + place, totals.at(row * block + place).load(MAX_LANES)
            result = total + a.bias.at(output).load(MAX_LANES) if has_bias else total
            a.out.at(row * a.out_features + output).store(result)

    def add_products(
        b: Builder, a: Any, weights: PairedWeights, totals: Pointer, first: Value, row: Value, num_rows: int
    ) -> None:
        """totals += inputs @ weights of a group, for some rows from `row` on."""
        sources = [a.inputs.at((row + i) * a.in_features) for i in range(num_rows)]
        input_sums = [_sum_of(b, source.at(first), group) for source in sources] if has_shift else []
        for places in weights.parts():
            sums = [[b.variable(b.number(0.0, MAX_LANES)) for _ in places] for _ in sources]
            for k, pairs in weights.of_group(first, places):
                for source, own in zip(sources, sums, strict=True):
                    two = load_pair(source.at(k), MAX_LANES)
                    for pair, sum_ in zip(pairs, own, strict=True):
                        sum_.set(fma_pairs(b, two, pair, sum_.get()))
            scales, shifts = weights.scales(first, places)
            for i, own in enumerate(sums):
                for number, place in enumerate(places):
                    total = totals.at((row + i) * block + place)
                    found = b.fma(own[number].get(), scales[number], total.load(MAX_LANES))
                    total.store(b.fma(input_sums[i], shifts[number], found) if shifts else found)

    return KernelSource("paired_grouped_linear", arguments_of(ElementType.BFLOAT16, codes), body)


@kernel_factory
def dequantize_pairs_kernel(codes: Codes, block: int, group: int, *, has_shift: bool, packed: bool) -> KernelSource:
    """Makes a `dequantize_kernel` for such weights. `packed`: as `linear_kernel` reads them, without gaps."""

    def body(b: Builder, task: Value, a: Any) -> None:
        weights = PairedWeights(b, a, task + a.first_block, codes, block, group, has_shift=has_shift)
        with b.loop(0, a.in_features, group) as first:
            for places in weights.parts():
                scales, shifts = weights.scales(first, places)
                for k, pairs in weights.of_group(first, places):
                    for number, place in enumerate(places):
                        scale = scales[number]
                        halves = [
                            b.fma(half, scale, shifts[number]) if shifts else half * scale
                            for half in halves_of(b, pairs[number])
                        ]
                        if packed:
                            target = a.out.at((task * a.in_features + k) * block + 2 * place)
                            target.of(ElementType.FLOAT32).store(paired(b, *halves))
                        else:
                            for i, weight in enumerate(halves):
                                a.out.at((k + i) * a.stride + task * a.block_stride + place).store(weight)

    names = ("first_block", "stride", "block_stride")
    return KernelSource("dequantize_pairs", arguments_of(ElementType.BFLOAT16, codes, *names), body)


def _sum_of(b: Builder, inputs: Pointer, count: int) -> Value:
    """The sum of so many numbers, in every lane."""
    sum_, ones = b.variable(b.number(0.0, MAX_LANES)), _pairs_of_ones(b)
    with b.loop(0, count, 2 * MAX_LANES) as k:
        sum_.set(fma_pairs(b, load_pairs(inputs.at(k), MAX_LANES), ones, sum_.get()))
    return b.broadcast(b.sum(sum_.get()), MAX_LANES)


def _pairs_of_ones(b: Builder) -> Value:
    kind = like(INT32, MAX_LANES)
    return Value(b, b.ir.bitcast(constant(INT32, 0x3F803F80, MAX_LANES), like(ir.FloatType(), kind.count)))


class PairedWeights:
    """A block of outputs, whose weights are pairs of numbers in registers."""

    def __init__(
        self, b: Builder, a: Any, number: Value, codes: Codes, block: int, group: int, *, has_shift: bool
    ) -> None:
        self._b = b
        self._codes, self._block, self._group = codes, block, group
        self._weight = a.weight.at(number * (a.in_features // codes.inputs) * block)
        of_block = number * (a.in_features // group) * block
        self._scale, self._shift = a.scale.at(of_block), a.shift.at(of_block) if has_shift else None

    def parts(self) -> Iterator[range]:
        """Outputs that are computed at once."""
        width = min(self._block, _VECTORS * MAX_LANES)
        while self._block % width:
            width -= MAX_LANES
        for start in range(0, self._block, width):
            yield range(start, start + width, MAX_LANES)

    def scales(self, group_start: Value, places: range) -> tuple[list[Value], list[Value]]:
        """Scales and shifts of a group; no shifts if there are none."""
        of_group = group_start // self._group * self._block
        pointers = [pointer for pointer in (self._scale, self._shift) if pointer is not None]
        found = [[each.at(of_group + place).load(MAX_LANES) for place in places] for each in pointers]
        return found[0], found[1] if len(found) > 1 else []

    def of_group(self, group_start: Value, places: range) -> Iterator[tuple[Value, list[Value]]]:
        """Loops over the inputs of a group; gives the number of every other with the numbers of it and the next one for
        the outputs at `places`."""
        step = _STEPS[self._codes]
        with self._b.loop(0, self._group, step) as several:
            first = group_start + several
            decoded = [self._decode(first, place) for place in places]
            for i in range(step // 2):
                yield first + 2 * i, [pairs[i] for pairs in decoded]

    def _decode(self, first: Value, place: int) -> list[Value]:
        """The pairs of some inputs from `first` on."""
        b = self._b
        match self._codes:
            case Codes.INT4:
                word = b.read(self._weight.at(first // 8 * self._block + place), INT32, MAX_LANES)
                halves = b.ir.bitcast(word, like(ir.IntType(16), 2 * MAX_LANES))
                return [_looked_up(b, halves, _BITS * i) for i in range(_STEPS[Codes.INT4] // 2)]
            case Codes.INT8:
                rows = [self._weight.at((first + i) * self._block + place).load(MAX_LANES) for i in range(2)]
                return [paired_integers(b, *rows)]
            case Codes.FLOAT8:
                source = self._weight.at(first * self._block + _STEPS[Codes.FLOAT8] * place)
                return _float8_pairs(b, b.read(source, ir.IntType(8), _BYTES))


def _looked_up(b: Builder, halves: Any, place: int) -> Value:
    """Integers from -8 to 7 of four bits of each half of a lane, as bfloat16."""
    shifted = b.ir.lshr(halves, constant(ir.IntType(16), place, 2 * MAX_LANES))
    # Only the lowest five bits of a half count; the table has all numbers twice, whatever the fifth is.
    numbers = [float(code if code < 8 else code - 16) for code in range(16)] * 2
    table = ir.Constant(shifted.type, list(map(_bfloat16_bits, numbers)))
    found = b.intrinsic("llvm.x86.avx512.permvar.hi.512", shifted.type, [table, shifted])
    return Value(b, b.ir.bitcast(found, like(ir.FloatType(), MAX_LANES)))


def _float8_pairs(b: Builder, codes: Any) -> list[Value]:
    """Two pairs of e4m3 numbers of each output, as bfloat16: upper and lower bytes are looked up, and the sign kept."""
    bits = [_bfloat16_bits(_float8(code)) for code in range(2 * _BYTES)]
    lower, upper = (_look_up_bytes(b, codes, [number >> shift & 0xFF for number in bits]) for shift in (0, 8))
    upper = b.ir.or_(upper, b.ir.and_(codes, constant(ir.IntType(8), 0x80, _BYTES)))
    pairs = []
    for half in range(2):  # of each 16 bytes, as the processor interleaves them
        order = [
            lane * 16 + 8 * half + byte // 2 + byte % 2 * _BYTES for lane in range(_BYTES // 16) for byte in range(16)
        ]
        mixed = b.ir.shuffle_vector(lower, upper, ir.Constant(ir.VectorType(INT32, _BYTES), order))
        pairs.append(Value(b, b.ir.bitcast(mixed, like(ir.FloatType(), MAX_LANES))))
    return pairs


def _look_up_bytes(b: Builder, index: Any, table: list[int]) -> Any:
    """Entries of a table of 128 bytes, by the lowest seven bits."""
    halves = [ir.Constant(index.type, table[:_BYTES]), ir.Constant(index.type, table[_BYTES:])]
    return b.intrinsic("llvm.x86.avx512.vpermi2var.qi.512", index.type, [halves[0], index, halves[1]])


def _float8(code: int) -> float:
    exponent, mantissa = code >> 3, code & 7
    return float((mantissa if exponent == 0 else 8 + mantissa) * 2.0 ** (max(exponent, 1) - 10))


def _bfloat16_bits(number: float) -> int:
    return int.from_bytes(struct.pack("<f", number), "little") >> 16

"""Linear layers over weights as oneDNN packs them.

With few rows a linear layer takes as long as reading its weight from memory. Each block of it is read from front to
back in one loop, with the sums of up to six rows in registers; the processor fetches ahead by itself. More rows take
turns over a part of the block, which stays in the core's second cache, and many are several tasks. The products of an
output are added up in the same order whatever the number of rows. Pairs of bfloat16 numbers are multiplied as they are
where the processor can; elsewhere many rows share a part of the block that is widened to float32 before.
"""

from __future__ import annotations

from typing import Any

from common.engine.devices.cpu.kernels.compiled import KernelSource, kernel_factory
from common.engine.devices.cpu.kernels.elementwise import silu
from common.engine.devices.cpu.kernels.language import (
    MAX_LANES,
    Builder,
    ElementType,
    Operand,
    Pointer,
    Value,
    Variable,
)
from common.engine.devices.cpu.kernels.pairs import MULTIPLIES_PAIRS, fma_pairs, halves_of, load_pair, load_pairs

ROWS_PER_TASK = 96
ROWS = 6  # computed at once, with sums in registers
_MAX_VECTORS = MAX_LANES * 3 // 2  # of sums, in 32 or 16 registers
_PIECE = 16  # inputs, or pairs of them; those of a layer are a multiple
_UNROLLED = 4  # of these
_PART = 1 << 17  # bytes of a block that rows take turns over
_MANY_ROWS = 2 * ROWS  # for which it is widened


def pair_of(element: ElementType) -> int:
    """Inputs whose weights for one output lie side by side."""
    return 2 if element is ElementType.BFLOAT16 else 1


def can_stream(element: ElementType, in_features: int, out_features: int, block: int) -> bool:
    """True if the kernel takes weights of this size, packed in blocks of so many outputs."""
    return not (in_features % (_PIECE * pair_of(element)) or out_features % block or block % MAX_LANES)


@kernel_factory
def linear_kernel(
    element: ElementType, block: int, *, has_bias: bool, gated: bool = False, weights: ElementType | None = None
) -> KernelSource:
    """out = inputs @ weight.T + bias; a task is one block of outputs of ROWS_PER_TASK rows, or of the rest.

    inputs [num_rows, in_features], out [num_rows, out_features], bias [out_features] float32, weight
    [out_features / block, in_features / pair, block, pair]; sizes as `can_stream` says. Tasks of a block lie together.
    `gated`: out [num_rows, out_features / 2] = silu(gate) * up, which are the halves of what else would be outputs.
    `weights`: FLOAT32 for wider ones than inputs and outputs, which are of `element`.
    """
    weights = weights or element
    pair = pair_of(weights)
    piece = _PIECE * pair
    widens = pair == 2 and not MULTIPLIES_PAIRS
    size = max(piece, _PART // (block * (ElementType.FLOAT32 if widens else weights).size) // piece * piece)

    def sums(b: Builder, a: Any, first_output: Value, first_row: Value, num_rows: Value) -> Pointer:
        """[ROWS_PER_TASK, block]"""
        weight = a.weight.at(first_output * a.in_features)
        totals = b.scratch(ROWS_PER_TASK * block)
        with b.loop(0, num_rows) as row, b.loop(0, block, MAX_LANES) as output:
            bias = a.bias.at(first_output + output).load(MAX_LANES) if has_bias else b.number(0.0, MAX_LANES)
            totals.at(row * block + output).store(bias)
        with b.loop(0, a.in_features, size) as first:
            last = b.select(first + size < a.in_features, first + size, a.in_features)

            def multiply(weight: Pointer, row: Value, count: int, part: tuple[Value, Value] = (first, last)) -> None:
                rows = [row + i for i in range(count)]
                inputs = [a.inputs.at((first_row + each) * a.in_features) for each in rows]
                if weight.element is not element:
                    inputs = [_widened_inputs(b, each, size, part) for each in inputs]
                add_products(b, inputs, weight, [totals.at(each * block) for each in rows], block, part)

            def multiply_all(weight: Pointer) -> None:
                rest = num_rows % ROWS
                with b.loop(0, num_rows - rest, ROWS) as row:
                    multiply(weight, row, ROWS)
                for count in range(1, ROWS):
                    with b.when((rest >= count) & (rest < count + 1)):
                        multiply(weight, num_rows - rest, count)

            if widens:
                is_many = num_rows >= _MANY_ROWS
                with b.when(is_many):
                    multiply_all(_widened(b, weight, block, size, (first, last)))
                with b.otherwise(is_many):
                    multiply_all(weight)
            else:
                multiply_all(weight)
        return totals

    def body(b: Builder, task: Value, a: Any) -> None:
        num_parts = (a.num_rows + (ROWS_PER_TASK - 1)) // ROWS_PER_TASK
        first_output, first_row = task // num_parts * block, task % num_parts * ROWS_PER_TASK
        left = a.num_rows - first_row
        num_rows = b.select(left < ROWS_PER_TASK, left, ROWS_PER_TASK)
        size = a.out_features // 2 if gated else a.out_features
        totals = sums(b, a, first_output, first_row, num_rows)
        ups = sums(b, a, first_output + size, first_row, num_rows) if gated else None
        with b.loop(0, num_rows) as row, b.loop(0, block, MAX_LANES) as output:
            place = row * block + output
            total = totals.at(place).load(MAX_LANES)
            if ups is not None:
                total = silu(b, total) * ups.at(place).load(MAX_LANES)
            a.out.at((first_row + row) * size + first_output + output).store(total)

    arguments = {"inputs": element, "weight": weights, "bias": ElementType.FLOAT32, "out": element}
    names = ("num_rows", "in_features", "out_features")
    return KernelSource("gated_linear" if gated else "linear", arguments | dict.fromkeys(names), body)


def _widened(b: Builder, weight: Pointer, block: int, size: int, part: tuple[Value, Value]) -> Pointer:
    """Copies the part of a block of pairs for inputs from one to another, at most `size`, to one of float32, with one
    input after the other. Returns the place where the block's first input would be."""
    first, last = part
    wide = b.scratch(size * block).at(first * -block)
    with b.loop(first, last, 2) as k, b.loop(0, block, MAX_LANES) as place:
        halves = halves_of(b, load_pairs(weight.at(k * block + place * 2), MAX_LANES))
        for i, half in enumerate(halves):
            wide.at((k + i) * block + place).store(half)
    return wide


def _widened_inputs(b: Builder, inputs: Pointer, size: int, part: tuple[Value, Value]) -> Pointer:
    """See `_widened`."""
    first, last = part
    wide = b.scratch(size).at(first * -1)
    with b.loop(first, last, MAX_LANES) as k:
        wide.at(k).store(inputs.at(k).load(MAX_LANES))
    return wide


def add_products(
    b: Builder,
    inputs: list[Pointer],
    weights: Pointer,
    totals: list[Pointer],
    block: int,
    part: tuple[Operand, Operand],
) -> None:
    """totals += inputs @ weights, from one input to another, for 1 to ROWS rows.

    Of inputs and totals there is one pointer per row; weights [in_features / pair, block, pair].
    """
    pair = pair_of(weights.element)
    width = min(block, _MAX_VECTORS // len(inputs) * MAX_LANES)
    while block % width:
        width -= MAX_LANES
    for start in range(0, block, width):
        places = range(start, start + width, MAX_LANES)
        sums = [[b.variable(total.at(place).load(MAX_LANES)) for place in places] for total in totals]
        with b.loop(*part, _UNROLLED * pair) as first:
            for k in range(0, _UNROLLED * pair, pair):
                columns = [weights.at((first + k) * block + place * pair) for place in places]
                factors = [load_pairs(each, MAX_LANES) if pair == 2 else each.load(MAX_LANES) for each in columns]
                for row, source in zip(sums, inputs, strict=True):
                    _add_products(b, row, source.at(first + k), factors, are_pairs=pair == 2)
        for total, row in zip(totals, sums, strict=True):
            for place, sum_ in zip(places, row, strict=True):
                total.at(place).store(sum_.get())


def _add_products(b: Builder, sums: list[Variable], source: Pointer, factors: list[Any], *, are_pairs: bool) -> None:
    """sums += one input, or a pair of them, times its weights."""
    if are_pairs:
        two = load_pair(source, MAX_LANES)
        for sum_, factor in zip(sums, factors, strict=True):
            sum_.set(fma_pairs(b, two, factor, sum_.get()))
    else:
        one = b.number(source.load(), MAX_LANES)
        for sum_, factor in zip(sums, factors, strict=True):
            sum_.set(b.fma(one, factor, sum_.get()))

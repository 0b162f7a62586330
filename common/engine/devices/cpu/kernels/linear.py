"""Linear layers over weights as oneDNN packs them.

With few rows a linear layer takes as long as reading its weight from memory. Each block of it is read from front to
back in one loop, with the sums of up to six rows in registers; the processor fetches ahead by itself. More rows take
turns over a part of the block, which stays in the core's second cache, and many are several tasks. The products of an
output are added up in the same order whatever the number of rows. Pairs of bfloat16 numbers are multiplied as they are
where the processor can; elsewhere, and of int8, many rows share a part of the block that is widened to float32 before.
"""

from __future__ import annotations

from collections.abc import Callable
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
GRANULE = 16  # inputs, or pairs of them; those of a layer are a multiple
_UNROLLED = 4  # of these
_PART = 1 << 17  # bytes of a block that rows take turns over
_MANY_ROWS = 2 * ROWS  # for which it is widened, of bfloat16
_INT8_INPUTS = 64  # of a part of int8, which is fetched while rows take turns over the one before
_LINE = 64  # bytes that are fetched at once
BLOCKS = (64, 48, 32, 16)  # outputs in a block
PART_SIZE = 3  # numbers of a part of routed rows


def pair_of(element: ElementType) -> int:
    """Inputs whose weights for one output lie side by side."""
    return 2 if element is ElementType.BFLOAT16 else 1


def can_stream(element: ElementType, in_features: int, out_features: int, block: int) -> bool:
    """True if the kernel takes weights of this size, packed in blocks of so many outputs."""
    return not (in_features % (GRANULE * pair_of(element)) or out_features % block or block % MAX_LANES)


def block_of(out_features: int) -> int:
    """Outputs in a block of a weight that is packed here; of `out_features` 16 are a divisor."""
    return next(block for block in BLOCKS if out_features % block == 0)


@kernel_factory
def linear_kernel(
    element: ElementType,
    block: int,
    *,
    has_bias: bool,
    gated: bool = False,
    weights: ElementType | None = None,
    routed: bool = False,
) -> KernelSource:
    """out = inputs @ weight.T + bias; a task is one block of outputs of ROWS_PER_TASK rows, or of the rest.

    inputs [num_rows, in_features], out [num_rows, out_features], bias [out_features] float32, weight
    [out_features / block, in_features / pair, block, pair]; sizes as `can_stream` says. Tasks of a block lie together.
    `gated`: out [num_rows, out_features / 2] = silu(gate) * up, which are the halves of what else would be outputs.
    `weights`: INT8 for integers, which `scale` [out_features] float32 multiplies once their products are added up.
    `routed`: weight, scale and bias are those of several experts. `rows` has the row of inputs of each row of outputs;
    each of the `num_parts` in `parts` is an expert, the first of its rows of outputs, and how many there are, at most
    ROWS_PER_TASK. A task is a block of outputs of a part.
    """
    weights = weights or element
    is_int8 = weights is ElementType.INT8
    pair = pair_of(weights)
    piece = GRANULE * pair
    widens = is_int8 or (pair == 2 and not MULTIPLIES_PAIRS)
    size = max(piece, _PART // (block * (ElementType.FLOAT32 if widens else weights).size) // piece * piece)
    if is_int8:
        size = _INT8_INPUTS

    def sums(b: Builder, a: Any, first_output: Value, first_row: Value, num_rows: Value) -> Pointer:
        """[ROWS_PER_TASK, block]; `first_output`: of all experts'."""
        weight = a.weight.at(first_output * a.in_features)
        totals = b.scratch(ROWS_PER_TASK * block)
        with b.loop(0, num_rows) as row, b.loop(0, block, MAX_LANES) as output:
            start = b.number(0.0, MAX_LANES)
            if has_bias and not is_int8:
                start = a.bias.at(first_output + output).load(MAX_LANES)
            totals.at(row * block + output).store(start)
        with b.loop(0, a.in_features, size) as first:
            last = b.select(first + size < a.in_features, first + size, a.in_features)

            def multiply(weight: Pointer, row: Value, count: int, part: tuple[Value, Value] = (first, last)) -> None:
                rows = [row + i for i in range(count)]
                sources = [a.rows.at(first_row + each).load() if routed else first_row + each for each in rows]
                inputs = [a.inputs.at(each * a.in_features) for each in sources]
                if weight.element is ElementType.FLOAT32 and element is not ElementType.FLOAT32:
                    inputs = [_widened_inputs(b, each, size, part) for each in inputs]
                add_products(b, inputs, weight, [totals.at(each * block) for each in rows], block, part)

            def multiply_all(weight: Pointer, fetched: Pointer | None = None) -> None:
                def turn(row: Value, count: int) -> None:
                    if fetched is not None and count == ROWS:
                        num_turns = num_rows // ROWS
                        share = (num_turns + (size * block // _LINE - 1)) // num_turns
                        with b.loop(row // ROWS * share, (row // ROWS + 1) * share) as line:
                            b.prefetch(fetched.at(line * _LINE), 1)
                    multiply(weight, row, count)

                for_rows(b, num_rows, turn)

            if widens:
                is_many = num_rows >= (ROWS + 1 if is_int8 else _MANY_ROWS)
                with b.when(is_many):
                    following = weight.at(last * block) if is_int8 else None
                    multiply_all(_widened(b, weight, block, size, (first, last)), following)
                with b.otherwise(is_many):
                    multiply_all(weight)
            else:
                multiply_all(weight)
        return totals

    def result(b: Builder, a: Any, total: Value, output: Value) -> Value:
        if not is_int8:
            return total
        scale = a.scale.at(output).load(MAX_LANES)
        return b.fma(total, scale, a.bias.at(output).load(MAX_LANES)) if has_bias else total * scale

    def body(b: Builder, task: Value, a: Any) -> None:
        if routed:
            number, part = task // a.num_parts, a.parts.at(task % a.num_parts * PART_SIZE)
            expert, first_row, num_rows = (part.at(i).load() for i in range(PART_SIZE))
            first_output = expert * a.out_features + number * block
        else:
            number, first_row, num_rows = place_of(b, task, a.num_rows)
            first_output = number * block
        size = a.out_features // 2 if gated else a.out_features
        totals = sums(b, a, first_output, first_row, num_rows)
        ups = sums(b, a, first_output + size, first_row, num_rows) if gated else None
        with b.loop(0, num_rows) as row, b.loop(0, block, MAX_LANES) as output:
            place = row * block + output
            total = result(b, a, totals.at(place).load(MAX_LANES), first_output + output)
            if ups is not None:
                up = result(b, a, ups.at(place).load(MAX_LANES), first_output + size + output)
                total = silu(b, total) * up
            a.out.at((first_row + row) * size + number * block + output).store(total)

    arguments = {"inputs": element, "weight": weights, "bias": ElementType.FLOAT32, "out": element}
    if is_int8:
        arguments["scale"] = ElementType.FLOAT32
    if routed:
        arguments |= {"rows": ElementType.INT64, "parts": ElementType.INT64}
    names = ("num_parts" if routed else "num_rows", "in_features", "out_features")
    return KernelSource("gated_linear" if gated else "linear", arguments | dict.fromkeys(names), body)


def place_of(b: Builder, task: Value, num_rows: Value) -> tuple[Value, Value, Value]:
    """A task's block of outputs, its first row, and its number of rows."""
    num_parts = (num_rows + (ROWS_PER_TASK - 1)) // ROWS_PER_TASK
    first_row = task % num_parts * ROWS_PER_TASK
    left = num_rows - first_row
    return task // num_parts, first_row, b.select(left < ROWS_PER_TASK, left, ROWS_PER_TASK)


def for_rows(b: Builder, num_rows: Value, multiply: Callable[[Value, int], None]) -> None:
    """Calls `multiply` for the first row, and the number, of those that are computed at once: ROWS, or the rest."""
    rest = num_rows % ROWS
    with b.loop(0, num_rows - rest, ROWS) as row:
        multiply(row, ROWS)
    for count in range(1, ROWS):
        with b.when((rest >= count) & (rest < count + 1)):
            multiply(num_rows - rest, count)


def _widened(b: Builder, weight: Pointer, block: int, size: int, part: tuple[Value, Value]) -> Pointer:
    """Copies the part of a block for inputs from one to another, at most `size`, to one of float32, where one input is
    after the other. Returns the place where the block's first input would be."""
    first, last = part
    wide = b.scratch(size * block).at(first * -block)
    if weight.element is ElementType.INT8:
        copy_widened(b, weight.at(first * block), wide.at(first * block), (last - first) * block, block)
        return wide
    with b.loop(first, last, 2) as k, b.loop(0, block, MAX_LANES) as place:
        halves = halves_of(b, load_pairs(weight.at(k * block + place * 2), MAX_LANES))
        for i, half in enumerate(halves):
            wide.at((k + i) * block + place).store(half)
    return wide


def _widened_inputs(b: Builder, inputs: Pointer, size: int, part: tuple[Value, Value]) -> Pointer:
    """See `_widened`."""
    first, last = part
    wide = b.scratch(size).at(first * -1)
    copy_widened(b, inputs.at(first), wide.at(first), last - first, MAX_LANES)
    return wide


def copy_widened(b: Builder, source: Pointer, target: Pointer, count: Operand, step: int) -> None:
    """Widens `count` numbers to float32, `step` at once."""
    with b.loop(0, count, step) as start:
        for place in range(0, step, MAX_LANES):
            target.at(start + place).store(source.at(start + place).load(MAX_LANES))


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

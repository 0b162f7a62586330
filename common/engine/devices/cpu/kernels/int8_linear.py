"""Linear layers whose weights are int8 with one scale per output.

With few rows a linear layer takes as long as reading its weight from memory, and int8 is half of bfloat16. They are
multiplied as in `linear`, with numbers that are widened to float32 in registers. For more rows each block of outputs is
widened piece by piece in the core's cache, and all rows are multiplied with the piece.
Activations keep their type and an output is scaled when it is complete: rounding the weights is all that int8 changes.
The products of an output are added up in the same order whatever the number of rows.
"""

from __future__ import annotations

from typing import Any

from common.engine.devices.cpu.kernels import linear
from common.engine.devices.cpu.kernels.compiled import KernelSource, kernel_factory
from common.engine.devices.cpu.kernels.language import MAX_LANES, Builder, ElementType, Pointer, Value

MAX_ROWS = 384
GRANULE = 16  # sizes of a layer are multiples of it

_BLOCKS = (64, 48, 32, 16)  # outputs in a block
_PIECES = (32, 16)  # inputs in a piece
_ROWS = (4, 2, 1)  # computed at once, with sums in registers
_MAX_VECTORS = MAX_LANES  # of sums: half of the registers, of which there are 32 or 16
_UNROLLED = 8  # inputs
_AHEAD = 2  # pieces from the one that is multiplied to the one that is fetched
_LINE = 64  # bytes that are fetched at once


def block_of(out_features: int) -> int:
    """Outputs in a block of the weight."""
    return next(block for block in _BLOCKS if out_features % block == 0)


def piece_of(in_features: int) -> int:
    """Inputs in a piece of the weight."""
    return next(piece for piece in _PIECES if in_features % piece == 0)


@kernel_factory
def int8_linear_kernel(element: ElementType, block: int, piece: int, *, has_bias: bool) -> KernelSource:
    """out = inputs @ weight.T * scale + bias; a task is one block of outputs.

    inputs [num_rows, in_features] and out [num_rows, out_features] of `element`, scale and bias [out_features] float32,
    weight [out_features / block, in_features, block] int8; 1 to MAX_ROWS rows, sizes are multiples of piece and block.
    """
    num_lines = piece * block // _LINE

    def body(b: Builder, task: Value, a: Any) -> None:
        weight = a.weight.at(task * a.in_features * block)
        totals = b.scratch(MAX_ROWS * block)
        with b.loop(0, a.num_rows * block, MAX_LANES) as place:
            totals.at(place).store(b.number(0.0, MAX_LANES))
        for num_rows in range(1, linear.ROWS + 1):
            with b.when((a.num_rows >= num_rows) & (a.num_rows < num_rows + 1)):
                rows = [a.inputs.at(a.in_features * i) for i in range(num_rows)]
                sums = [totals.at(i * block) for i in range(num_rows)]
                linear.add_products(b, rows, weight, sums, block, (0, a.in_features))
        with b.when(a.num_rows >= linear.ROWS + 1):
            widen(b, a, weight, totals)
        write_scaled(b, a, totals, first_output=task * block, block=block, lanes=MAX_LANES, has_bias=has_bias)

    def widen(b: Builder, a: Any, weight: Pointer, totals: Pointer) -> None:
        widened, inputs = b.scratch(piece * block), b.scratch(_ROWS[0] * piece)
        num_shares = (a.num_rows + (_ROWS[0] - 1)) // _ROWS[0]
        share = (num_shares + (num_lines - 1)) // num_shares
        with b.loop(0, a.in_features, piece) as first:
            packed = weight.at(first * block)
            copy_widened(b, packed, widened, piece * block)
            start = b.number(0)
            for num_rows in _ROWS:
                end = a.num_rows - a.num_rows % num_rows
                with b.loop(start, end, num_rows) as row:
                    first_line = row // _ROWS[0] * share
                    with b.loop(first_line, first_line + share) as line:
                        b.prefetch(packed.at(line * _LINE + _AHEAD * piece * block), 1)
                    sources = [a.inputs.at((row + i) * a.in_features + first) for i in range(num_rows)]
                    if element is not ElementType.FLOAT32:
                        for i, source in enumerate(sources):
                            sources[i] = inputs.at(i * piece)
                            copy_widened(b, source, sources[i], piece)
                    sums = [totals.at((row + i) * block) for i in range(num_rows)]
                    multiply_piece(b, sources, widened, sums, block, piece)
                start = end

    return KernelSource("int8_linear", arguments_of(element), body)


def arguments_of(element: ElementType, *configurations: str) -> dict[str, ElementType | None]:
    """Arguments of a kernel with int8 weights."""
    floats = ElementType.FLOAT32
    numbers = {"inputs": element, "weight": ElementType.INT8, "scale": floats, "bias": floats, "out": element}
    others = dict.fromkeys(("num_rows", "in_features", "out_features"))
    return numbers | dict.fromkeys(configurations, ElementType.INT8) | others


def write_scaled(
    b: Builder, a: Any, totals: Pointer, *, first_output: Value, block: int, lanes: int, has_bias: bool
) -> None:
    """out = totals * scale + bias, for a block of outputs of all rows; totals are [rows, block]."""
    with b.loop(0, a.num_rows) as row, b.loop(0, block, lanes) as place:
        output = first_output + place
        total, scale = totals.at(row * block + place).load(lanes), a.scale.at(output).load(lanes)
        result = b.fma(total, scale, a.bias.at(output).load(lanes)) if has_bias else total * scale
        a.out.at(row * a.out_features + output).store(result)


def copy_widened(b: Builder, source: Pointer, target: Pointer, count: int) -> None:
    """Widens numbers to float32."""
    step = min(count, 4 * MAX_LANES)
    with b.loop(0, count, step) as start:
        for place in range(0, step, MAX_LANES):
            target.at(start + place).store(source.at(start + place).load(MAX_LANES))


def multiply_piece(
    b: Builder, inputs: list[Pointer], weights: Pointer, totals: list[Pointer], block: int, piece: int
) -> None:
    """totals += inputs @ one piece of the weights, for some rows."""
    width = min(block, _MAX_VECTORS // len(inputs) * MAX_LANES)
    while block % width:
        width -= MAX_LANES
    for start in range(0, block, width):
        places = range(start, start + width, MAX_LANES)
        sums = [[b.variable(total.at(place).load(MAX_LANES)) for place in places] for total in totals]
        with b.loop(0, piece, _UNROLLED) as first:
            for k in range(_UNROLLED):
                factors = [weights.at((first + k) * block + place).load(MAX_LANES) for place in places]
                for row, source in zip(sums, inputs, strict=True):
                    one = b.number(source.at(first + k).load(), MAX_LANES)
                    for factor, sum_ in zip(factors, row, strict=True):
                        sum_.set(b.fma(one, factor, sum_.get()))
        for total, row in zip(totals, sums, strict=True):
            for place, sum_ in zip(places, row, strict=True):
                total.at(place).store(sum_.get())

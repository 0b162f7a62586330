"""Linear layers for a few rows, over weights as oneDNN packs them.

With few rows a linear layer takes as long as reading its weight from memory. Each block of it is read from front to
back, piece by piece: while a piece is multiplied with all rows, one further on is fetched, a share of it beside each
few rows. The products of an output are added up in the same order whatever the number of rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from common.engine.devices.cpu.kernels.compiled import Kernel
from common.engine.devices.cpu.kernels.language import MAX_LANES, Builder, ElementType, Pointer, Value
from common.engine.devices.cpu.kernels.pairs import fma_pairs, load_pair, load_pairs

MAX_ROWS = 64
_ROWS = (4, 2, 1)  # computed at once, with sums in registers
_MAX_VECTORS = MAX_LANES  # of sums: half of the registers, of which there are 32 or 16
_PIECE = 16  # inputs, or pairs of them
_AHEAD = 2  # pieces from the one that is multiplied to the one that is fetched
_LINE = 64  # bytes that are fetched at once


def pair_of(element: ElementType) -> int:
    """Inputs whose weights for one output lie side by side."""
    return 2 if element is ElementType.BFLOAT16 else 1


def can_stream(element: ElementType, in_features: int, out_features: int, block: int) -> bool:
    """True if the kernel takes weights of this size, packed in blocks of so many outputs."""
    return not (in_features % (_PIECE * pair_of(element)) or out_features % block or block % MAX_LANES)


@cache
def linear_kernel(element: ElementType, block: int, *, has_bias: bool) -> Kernel:
    """out = inputs @ weight.T + bias; a task is one block of outputs.

    inputs [num_rows, in_features], out [num_rows, out_features], bias [out_features] float32, weight
    [out_features / block, in_features / pair, block, pair]; 1 to MAX_ROWS rows, sizes as `can_stream` says.
    """
    pair = pair_of(element)
    piece = _PIECE * pair
    num_lines = piece * block * element.value // _LINE

    def body(b: Builder, task: Value, a: Any) -> None:
        weight = a.weight.at(task * a.in_features * block)
        first_output = task * block
        totals = b.scratch(MAX_ROWS * block)
        with b.loop(0, a.num_rows) as row, b.loop(0, block, MAX_LANES) as output:
            bias = a.bias.at(first_output + output).load(MAX_LANES) if has_bias else b.number(0.0, MAX_LANES)
            totals.at(row * block + output).store(bias)
        num_shares = (a.num_rows + (_ROWS[0] - 1)) // _ROWS[0]
        share = (num_shares + (num_lines - 1)) // num_shares
        with b.loop(0, a.in_features, piece) as first:
            weights = weight.at(first * block)
            start = b.number(0)
            for num_rows in _ROWS:
                end = a.num_rows - a.num_rows % num_rows
                with b.loop(start, end, num_rows) as row:
                    fetched = weights.at(_AHEAD * piece * block)
                    first_line = row // _ROWS[0] * share
                    with b.loop(first_line, first_line + share) as line:
                        b.prefetch(fetched.at(line * (_LINE // element.value)), 1)
                    rows = [row + i for i in range(num_rows)]
                    inputs = [a.inputs.at(each * a.in_features + first) for each in rows]
                    _multiply(b, inputs, weights, [totals.at(each * block) for each in rows], block)
                start = end
        with b.loop(0, a.num_rows) as row, b.loop(0, block, MAX_LANES) as output:
            total = totals.at(row * block + output).load(MAX_LANES)
            a.out.at(row * a.out_features + first_output + output).store(total)

    arguments = {"inputs": element, "weight": element, "bias": ElementType.FLOAT32, "out": element}
    return Kernel("linear", arguments | dict.fromkeys(("num_rows", "in_features", "out_features")), body)


def _multiply(b: Builder, inputs: list[Pointer], weights: Pointer, totals: list[Pointer], block: int) -> None:
    """totals += inputs @ one piece of the weights, for some rows."""
    pair = pair_of(weights.element)
    width = min(block, _MAX_VECTORS // len(inputs) * MAX_LANES)
    while block % width:
        width -= MAX_LANES
    for start in range(0, block, width):
        places = range(start, start + width, MAX_LANES)
        sums = [[total.at(place).load(MAX_LANES) for place in places] for total in totals]
        for k in range(0, _PIECE * pair, pair):
            columns = [weights.at(k * block + place * pair) for place in places]
            factors = [load_pairs(each, MAX_LANES) if pair == 2 else each.load(MAX_LANES) for each in columns]
            for row, source in zip(sums, inputs, strict=True):
                if pair == 2:
                    two = load_pair(source.at(k), MAX_LANES)
                    row[:] = [fma_pairs(b, two, factor, sum_) for factor, sum_ in zip(factors, row, strict=True)]
                else:
                    one = b.number(source.at(k).load(), MAX_LANES)
                    row[:] = [b.fma(one, factor, sum_) for factor, sum_ in zip(factors, row, strict=True)]
        for total, row in zip(totals, sums, strict=True):
            for place, sum_ in zip(places, row, strict=True):
                total.at(place).store(sum_)

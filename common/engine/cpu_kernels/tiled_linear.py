"""Linear layers in bfloat16 for a few rows, with the matrix instructions of x86 processors (AMX).

As `linear`, but a tile of 16 rows is multiplied at once, so that reading the weight takes the time up to 32 rows.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from common.engine.cpu_kernels.compiled import Kernel
from common.engine.cpu_kernels.language import MAX_LANES, Builder, ElementType, Value
from common.engine.cpu_kernels.tiles import (
    INPUTS,
    SUMS,
    TILE,
    WEIGHTS,
    configure_tiles,
    load_tile,
    multiply_tiles,
    release_tiles,
    store_tile,
)

_DEPTH = 2 * TILE  # inputs that a tile has of each row
_AHEAD = 2  # tiles of weights from the one that is multiplied to the one that is fetched


def can_tile(in_features: int, out_features: int, block: int) -> bool:
    """True if the kernel takes weights of this size, packed in blocks of so many outputs."""
    return not (in_features % _DEPTH or out_features % block or block % (2 * TILE))


@cache
def tiled_linear_kernel(block: int, *, num_tiles: int, has_bias: bool) -> Kernel:
    """out = inputs @ weight.T + bias; a task is one block of outputs. `num_tiles` of rows: 1, or 2 for more than 16.

    inputs [num_rows, in_features], out [num_rows, out_features], bias [out_features] float32, weight
    [out_features / block, in_features / 2, block, 2]; configuration is that of num_rows, sizes are as `can_tile` says.
    """

    def body(b: Builder, task: Value, a: Any) -> None:
        weight = a.weight.at(task * a.in_features * block)
        first_output = task * block
        sums = b.scratch(num_tiles * TILE * block)
        rows = [a.inputs.at(a.in_features * (tile * TILE)) for tile in range(num_tiles)]
        for start in range(0, block, 2 * TILE):
            configure_tiles(a.configuration)
            with b.loop(0, a.in_features, _DEPTH) as k:
                if start == 0:
                    b.prefetch(weight.at((k + _AHEAD * _DEPTH) * block), _DEPTH * block)
                for register, row in zip(INPUTS, rows, strict=False):
                    load_tile(register, row.at(k), a.in_features)
                for register, column in zip(WEIGHTS, (start, start + TILE), strict=True):
                    load_tile(register, weight.at(k * block + 2 * column), 2 * block)
                for tile in range(num_tiles):
                    for column in range(2):
                        multiply_tiles(b, SUMS[2 * tile + column], INPUTS[tile], WEIGHTS[column])
            for tile in range(num_tiles):
                for column in range(2):
                    place = sums.at(tile * TILE * block + start + column * TILE)
                    store_tile(SUMS[2 * tile + column], place, block)
            release_tiles(b)
        with b.loop(0, a.num_rows) as row, b.loop(0, block, MAX_LANES) as output:
            total = sums.at(row * block + output).load(MAX_LANES)
            if has_bias:
                total = total + a.bias.at(first_output + output).load(MAX_LANES)
            a.out.at(row * a.out_features + first_output + output).store(total)

    numbers, floats = ElementType.BFLOAT16, ElementType.FLOAT32
    arguments = {"inputs": numbers, "weight": numbers, "bias": floats, "out": numbers, "configuration": numbers}
    return Kernel("tiled_linear", arguments | dict.fromkeys(("num_rows", "in_features", "out_features")), body)

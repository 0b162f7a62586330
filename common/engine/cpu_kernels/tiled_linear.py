"""Linear layers in bfloat16 for a few rows, with the matrix instructions of x86 processors (AMX).

As `linear`, but a tile of 16 rows is multiplied at once, so that reading the weight takes the time up to 32 rows.
"""

from __future__ import annotations

import ctypes
import sys
from functools import cache
from typing import Any

import torch
from llvmlite import binding

from common.engine.cpu_kernels.compiled import Kernel
from common.engine.cpu_kernels.language import MAX_LANES, MULTIPLIES_PAIRS, Builder, ElementType, Value

TILE = 16  # rows of a tile, and its columns: single float32 numbers, or pairs in bfloat16
MAX_ROWS = 2 * TILE
_DEPTH = 2 * TILE  # inputs that a tile has of each row
_AHEAD = 2  # tiles of weights from the one that is multiplied to the one that is fetched

# Registers: sums of two tiles of rows by two of columns, the inputs of both tiles of rows, two tiles of weights.
_SUMS, _INPUTS, _WEIGHTS = (0, 1, 2, 3), (4, 5), (6, 7)
_PALETTE, _FIRST_BYTES, _FIRST_ROWS = 1, 16, 48  # of a configuration, in the processor's format

_ARCH_PRCTL = 158
_REQUEST_PERMISSION, _TILE_DATA = 0x1023, 18  # Linux grants a process tile registers when it asks for them


@cache
def has_tiles() -> bool:
    """True if the processor has the instructions and the kernel lets this process use them."""
    if sys.platform != "linux" or not binding.get_host_cpu_features().get("amx-bf16"):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


def instructions() -> str:
    """Names what the kernels are compiled for, as far as it decides how they round."""
    return f"{MAX_LANES} lanes, pairs {MULTIPLIES_PAIRS}, tiles {has_tiles()}"


@cache
def configuration(num_rows: int) -> torch.Tensor:
    """Shapes of the tile registers for so many rows, as the kernel's argument."""
    upper, lower = min(num_rows, TILE), max(0, num_rows - TILE)
    rows = [upper, upper, lower, lower, upper, lower, TILE, TILE]
    raw = bytearray(64)
    raw[0] = _PALETTE
    for register, count in enumerate(rows):
        raw[_FIRST_BYTES + 2 * register] = 4 * TILE if count else 0
        raw[_FIRST_ROWS + register] = count
    return torch.tensor(list(raw), dtype=torch.uint8)


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
            b.configure_tiles(a.configuration)
            with b.loop(0, a.in_features, _DEPTH) as k:
                if start == 0:
                    b.prefetch(weight.at((k + _AHEAD * _DEPTH) * block), _DEPTH * block)
                for register, row in zip(_INPUTS, rows, strict=False):
                    b.load_tile(register, row.at(k), a.in_features)
                for register, column in zip(_WEIGHTS, (start, start + TILE), strict=True):
                    b.load_tile(register, weight.at(k * block + 2 * column), 2 * block)
                for tile in range(num_tiles):
                    for column in range(2):
                        b.multiply_tiles(_SUMS[2 * tile + column], _INPUTS[tile], _WEIGHTS[column])
            for tile in range(num_tiles):
                for column in range(2):
                    place = sums.at(tile * TILE * block + start + column * TILE)
                    b.store_tile(_SUMS[2 * tile + column], place, block)
            b.release_tiles()
        with b.loop(0, a.num_rows) as row, b.loop(0, block, MAX_LANES) as output:
            total = sums.at(row * block + output).load(MAX_LANES)
            if has_bias:
                total = total + a.bias.at(first_output + output).load(MAX_LANES)
            a.out.at(row * a.out_features + first_output + output).store(total)

    numbers, floats = ElementType.BFLOAT16, ElementType.FLOAT32
    arguments = {"inputs": numbers, "weight": numbers, "bias": floats, "out": numbers, "configuration": numbers}
    return Kernel("tiled_linear", arguments | dict.fromkeys(("num_rows", "in_features", "out_features")), body)

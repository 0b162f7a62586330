"""Linear layers in bfloat16 with the matrix instructions of x86 processors (AMX), over weights as oneDNN packs them.

Two tiles of 16 rows are multiplied with a block of the weight while it is read from memory; further rows find the block
in the core's cache. Unlike oneDNN's, the kernels are not compiled for a number of rows: batches with prompts have
another one in almost every step.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from common.engine.devices.cpu.kernels.compiled import KernelSource, kernel_factory
from common.engine.devices.cpu.kernels.elementwise import silu
from common.engine.devices.cpu.kernels.language import MAX_LANES, Builder, ElementType, Pointer, Value
from common.engine.devices.cpu.kernels.tiles import (
    INPUTS,
    MAX_TILE_ROWS,
    SUMS,
    TILE,
    WEIGHTS,
    clear_tile,
    each_tile_rows,
    load_tile,
    multiply_tiles,
    release_tiles,
    store_tile,
)

_DEPTH = 2 * TILE  # inputs that a tile has of each row
_COLUMNS = 2 * TILE  # outputs that are computed at once
_LINE = 32  # numbers that are fetched at once
_AHEAD = 2  # tiles of weights from the one that is multiplied to the one that is fetched
_Place = tuple[Value, Value]  # row and output, within MAX_TILE_ROWS rows of one block


def can_tile(in_features: int, out_features: int, block: int) -> bool:
    """True if the kernels take weights of this size, packed in blocks of so many outputs."""
    return not (in_features % _DEPTH or out_features % block or block % _COLUMNS)


@kernel_factory
def tiled_linear_kernel(block: int, *, has_bias: bool) -> KernelSource:
    """out = inputs @ weight.T + bias; a task is one block of outputs for `rows_per_task` rows.

    inputs [num_rows, in_features], out [num_rows, out_features], bias [out_features] float32, weight
    [out_features / block, in_features / 2, block, 2]; sizes are as `can_tile` says, `whole` and `rest` as
    `each_tile_rows` does. rows_per_task is a multiple of MAX_TILE_ROWS; tasks of the same rows follow each other.
    """

    def body(b: Builder, task: Value, a: Any) -> None:
        sums = b.scratch(MAX_TILE_ROWS * block)
        layer = _Layer(b, a, task, block, a.out_features // block)
        for first_row, num_tiles in layer.each_tile_rows():
            layer.multiply(layer.block_number, first_row, num_tiles, sums)
            for place, out in layer.each_output(first_row, a.out_features):
                out.store(layer.total(sums, layer.block_number, place, has_bias=has_bias))
        release_tiles(b)

    return KernelSource("tiled_linear", _arguments(), body)


@kernel_factory
def tiled_gated_linear_kernel(block: int, *, has_bias: bool) -> KernelSource:
    """Makes a `tiled_linear_kernel` with out = silu(gate) * up [num_rows, out_features / 2]: gate and up are the halves
    of the layer's outputs. A task has one block of each; out_features / 2 is a multiple of `block`."""

    def body(b: Builder, task: Value, a: Any) -> None:
        gates, ups = b.scratch(MAX_TILE_ROWS * block), b.scratch(MAX_TILE_ROWS * block)
        half = a.out_features // 2
        layer = _Layer(b, a, task, block, half // block)
        up = layer.block_number + half // block
        for first_row, num_tiles in layer.each_tile_rows():
            layer.multiply(layer.block_number, first_row, num_tiles, gates)
            layer.multiply(up, first_row, num_tiles, ups)
            for place, out in layer.each_output(first_row, half):
                gate = layer.total(gates, layer.block_number, place, has_bias=has_bias)
                out.store(silu(b, gate) * layer.total(ups, up, place, has_bias=has_bias))
        release_tiles(b)

    return KernelSource("tiled_gated_linear", _arguments(), body)


class _Layer:
    """The shared part of the kernels: MAX_TILE_ROWS rows at a time are multiplied with a block of the weight, then
    written."""

    def __init__(self, b: Builder, a: Any, task: Value, block: int, num_blocks: Value) -> None:
        self._b = b
        self._a = a
        self._block = block
        self.block_number = task % num_blocks
        self._start = task // num_blocks * a.rows_per_task
        end = self._start + a.rows_per_task
        self._end = b.select(end < a.num_rows, end, a.num_rows)
        num_lines = _DEPTH * block // _LINE  # of the weight in each step
        # In a single pass over a block, what comes next of it is fetched; in several passes, the block that follows.
        num_passes = (self._end - self._start + (MAX_TILE_ROWS - 1)) // MAX_TILE_ROWS
        self._share = (num_passes + (num_lines - 1)) // num_passes  # of a step's lines
        self._distance = b.select(num_passes < 2, _AHEAD * _DEPTH, a.in_features) * block

    def each_tile_rows(self) -> Iterator[tuple[Value, int]]:
        """Loops over the task's rows."""
        return each_tile_rows(self._b, self._start, self._end, self._a.whole, self._a.rest)

    def multiply(self, block_number: Value, first_row: Value, num_tiles: int, sums: Pointer) -> None:
        """sums [MAX_TILE_ROWS, block] = inputs @ weight.T"""
        b, a, block = self._b, self._a, self._block
        weight = a.weight.at(block_number * a.in_features * block)
        fetched = weight.at(self._distance)
        first_step = (first_row - self._start) // MAX_TILE_ROWS * (a.in_features // _DEPTH)
        for start in range(0, block, _COLUMNS):
            places = [
                (SUMS[2 * tile + column], sums.at(tile * TILE * block + start + column * TILE))
                for tile in range(num_tiles)
                for column in range(2)
            ]
            for register, _ in places:
                clear_tile(b, register)
            with b.loop(0, a.in_features, _DEPTH) as k:
                if start == 0:
                    with b.loop(0, self._share) as line:
                        place = (first_step + k // _DEPTH) * self._share + line
                        b.prefetch(fetched.at(place * _LINE), 1, near=False)
                for tile in range(num_tiles):
                    inputs = a.inputs.at((first_row + tile * TILE) * a.in_features + k)
                    load_tile(INPUTS[tile], inputs, a.in_features)
                for column in range(2):
                    load_tile(WEIGHTS[column], weight.at(k * block + 2 * (start + column * TILE)), 2 * block)
                for tile in range(num_tiles):
                    for column in range(2):
                        multiply_tiles(b, SUMS[2 * tile + column], INPUTS[tile], WEIGHTS[column])
            for register, place in places:
                store_tile(register, place, block)

    def each_output(self, first_row: Value, out_features: Value) -> Iterator[tuple[_Place, Pointer]]:
        """Loops over a block's outputs, MAX_LANES at a time: their places in the sums, and in `out`."""
        b, a = self._b, self._a
        num_rows = b.select(first_row + MAX_TILE_ROWS < self._end, MAX_TILE_ROWS, self._end - first_row)
        with b.loop(0, num_rows) as row, b.loop(0, self._block, MAX_LANES) as output:
            out = a.out.at((first_row + row) * out_features + self.block_number * self._block + output)
            yield (row, output), out

    def total(self, sums: Pointer, block_number: Value, place: _Place, *, has_bias: bool) -> Value:
        """Outputs of the linear layer."""
        row, output = place
        total: Value = sums.at(row * self._block + output).load(MAX_LANES)
        if not has_bias:
            return total
        bias: Pointer = self._a.bias.at(block_number * self._block + output)
        return total + bias.load(MAX_LANES)


def _arguments() -> dict[str, ElementType | None]:
    numbers, floats = ElementType.BFLOAT16, ElementType.FLOAT32
    pointers = {"inputs": numbers, "weight": numbers, "bias": floats, "out": numbers, "whole": numbers, "rest": numbers}
    return pointers | dict.fromkeys(("num_rows", "rows_per_task", "in_features", "out_features"))

"""Linear layers with int8 weights for activations in bfloat16, with the matrix instructions of x86 processors (AMX).

Weights are widened to bfloat16, which holds them exactly, as tile registers take them. Up to 32 rows are multiplied
while the weight is read; for more of them, a piece of the weight is widened at a time. An output is scaled when it is
complete: rounding the weights is all that int8 changes.
"""

from __future__ import annotations

from typing import Any

from common.engine.devices.cpu.kernels.compiled import KernelSource, kernel_factory
from common.engine.devices.cpu.kernels.language import Builder, ElementType, Pointer, Value
from common.engine.devices.cpu.kernels.pairs import paired_integers
from common.engine.devices.cpu.kernels.tiles import (
    INPUTS,
    SUMS,
    TILE,
    WEIGHTS,
    configure_tiles,
    each_tile_rows,
    load_tile,
    multiply_tiles,
    release_tiles,
    store_tile,
)

BLOCK = 2 * TILE  # outputs in a block
MAX_ROWS = 768

_DEPTH = 2 * TILE  # inputs that a tile has of each row
_WIDENED = 2 * TILE * TILE  # pairs of weights, each in the place of a float32: two tiles side by side
_PIECE = 256  # inputs whose weights are widened at once, at most
_AHEAD = 4  # depths from the weights that are widened to those that are fetched


def can_tile_int8(in_features: int, out_features: int) -> bool:
    """True if the kernels take weights of this size."""
    return not (in_features % _DEPTH or out_features % BLOCK)


def piece_of(in_features: int) -> int:
    """Inputs whose weights are widened at once."""
    return next(piece for piece in range(_PIECE, 0, -_DEPTH) if in_features % piece == 0)


@kernel_factory
def few_int8_rows_kernel(*, num_tiles: int, has_bias: bool) -> KernelSource:
    """out = inputs @ weight.T * scale + bias, for up to 16 rows in one tile, or 17 to 32 in two; a task is one block.

    inputs [num_rows, in_features] and out [num_rows, out_features] bfloat16, scale and bias [out_features] float32,
    weight [out_features / BLOCK, in_features, BLOCK] int8; `configuration` is that of num_rows, see `tiles`.
    """

    def body(b: Builder, task: Value, a: Any) -> None:
        weight = a.weight.at(task * a.in_features * BLOCK)
        widened, sums = b.scratch(2 * _WIDENED), b.scratch(num_tiles * TILE * BLOCK)
        configure_tiles(a.configuration)
        _widen(b, weight, widened)
        with b.loop(0, a.in_features, _DEPTH) as k:
            following = b.select(k + _DEPTH < a.in_features, k + _DEPTH, k)
            _widen(b, weight.at(following * BLOCK), widened.at((k // _DEPTH + 1) % 2 * _WIDENED))
            _multiply(b, a.inputs.at(k), a.in_features, widened.at(k // _DEPTH % 2 * _WIDENED), num_tiles)
        for register, place in _places(sums, num_tiles):
            store_tile(register, place, BLOCK)
        release_tiles(b)
        _write_scaled(b, a, sums, task * BLOCK, has_bias=has_bias)

    return KernelSource("few_int8_rows", _arguments("configuration"), body)


@kernel_factory
def many_int8_rows_kernel(piece: int, *, has_bias: bool) -> KernelSource:
    """Makes a `few_int8_rows_kernel` for up to MAX_ROWS rows; in_features is a multiple of `piece`; `each_tile_rows`
    describes `whole` and `rest`."""

    def body(b: Builder, task: Value, a: Any) -> None:
        weight = a.weight.at(task * a.in_features * BLOCK)
        widened, totals = b.scratch(piece // _DEPTH * _WIDENED), b.scratch(MAX_ROWS * BLOCK)
        with b.loop(0, a.num_rows * BLOCK, TILE) as place:
            totals.at(place).store(b.number(0.0, TILE))
        with b.loop(0, a.in_features, piece) as first:
            with b.loop(0, piece // _DEPTH) as depth:
                _widen(b, weight.at((first + depth * _DEPTH) * BLOCK), widened.at(depth * _WIDENED))
            for row, num_tiles in each_tile_rows(b, 0, a.num_rows, a.whole, a.rest):
                inputs = a.inputs.at(row * a.in_features + first)
                for register, sums in _places(totals.at(row * BLOCK), num_tiles):
                    load_tile(register, sums, BLOCK)
                with b.loop(0, piece // _DEPTH) as depth:
                    part = widened.at(depth * _WIDENED)
                    _multiply(b, inputs.at(depth * _DEPTH), a.in_features, part, num_tiles)
                for register, sums in _places(totals.at(row * BLOCK), num_tiles):
                    store_tile(register, sums, BLOCK)
        release_tiles(b)
        _write_scaled(b, a, totals, task * BLOCK, has_bias=has_bias)

    return KernelSource("many_int8_rows", _arguments("whole", "rest"), body)


def _arguments(*configurations: str) -> dict[str, ElementType | None]:
    floats, halves = ElementType.FLOAT32, ElementType.BFLOAT16
    numbers = {"inputs": halves, "weight": ElementType.INT8, "scale": floats, "bias": floats, "out": halves}
    others = dict.fromkeys(("num_rows", "in_features", "out_features"))
    return numbers | dict.fromkeys(configurations, ElementType.INT8) | others


def _write_scaled(b: Builder, a: Any, totals: Pointer, first_output: Value, *, has_bias: bool) -> None:
    """out = totals * scale + bias, for a block of outputs of all rows; totals are [rows, BLOCK]."""
    with b.loop(0, a.num_rows) as row, b.loop(0, BLOCK, TILE) as place:
        output = first_output + place
        total, scale = totals.at(row * BLOCK + place).load(TILE), a.scale.at(output).load(TILE)
        result = b.fma(total, scale, a.bias.at(output).load(TILE)) if has_bias else total * scale
        a.out.at(row * a.out_features + output).store(result)


def _widen(b: Builder, weight: Pointer, widened: Pointer) -> None:
    """One depth of a block's weights, and fetches those further on."""
    b.prefetch(weight.at(_AHEAD * _DEPTH * BLOCK), _DEPTH * BLOCK)
    for pair in range(TILE):
        for column in range(0, BLOCK, TILE):
            first, second = (weight.at((2 * pair + i) * BLOCK + column).load(TILE) for i in range(2))
            widened.at((column + pair) * TILE).store(paired_integers(b, first, second))


def _multiply(b: Builder, inputs: Pointer, in_features: Value, widened: Pointer, num_tiles: int) -> None:
    """Adds the products of one depth to the sums."""
    for tile in range(num_tiles):
        load_tile(INPUTS[tile], inputs.at(in_features * (tile * TILE)), in_features)
    for column in range(2):
        load_tile(WEIGHTS[column], widened.at(column * TILE * TILE), TILE)
    for tile in range(num_tiles):
        for column in range(2):
            multiply_tiles(b, SUMS[2 * tile + column], INPUTS[tile], WEIGHTS[column])


def _places(sums: Pointer, num_tiles: int) -> list[tuple[int, Pointer]]:
    """Registers of sums with their places in [rows, BLOCK]."""
    tiles = [(tile, column) for tile in range(num_tiles) for column in range(2)]
    return [(SUMS[2 * tile + column], sums.at((tile * BLOCK + column) * TILE)) for tile, column in tiles]

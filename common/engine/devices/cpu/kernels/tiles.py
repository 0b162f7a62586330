"""The tile registers of x86 processors (AMX): may they be used, their shapes, and the instructions on them.

A tile has up to 16 rows of 64 bytes: 16 float32 numbers, or 32 of bfloat16. Kernels here use the eight registers in one
way: sums of two tiles of rows by two of columns, the inputs of both tiles of rows, and two tiles of weights.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import torch
from llvmlite import ir

from common.engine.devices.cpu.kernels.language import Builder, Operand, Pointer, Value
from common.engine.devices.cpu.kernels.processor import features

TILE = 16  # rows of a tile, and its columns: single float32 numbers, or pairs in bfloat16
MAX_TILE_ROWS = 2 * TILE
SUMS, INPUTS, WEIGHTS = (0, 1, 2, 3), (4, 5), (6, 7)  # registers

_PALETTE, _FIRST_BYTES, _FIRST_ROWS = 1, 16, 48  # of a configuration, in the processor's format
_ARCH_PRCTL = 158
_REQUEST_PERMISSION, _TILE_DATA = 0x1023, 18  # Linux grants a process tile registers when it asks for them


@cache
def has_tiles() -> bool:
    """True if the processor has the instructions and the operating system lets this process use them."""
    if sys.platform != "linux" or not features().get("amx-bf16"):
        return False
    return bool(ctypes.CDLL(None).syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0)


@cache
def configuration(num_rows: int) -> torch.Tensor:
    """Shapes of the registers for so many rows, MAX_TILE_ROWS at most, as a kernel's argument."""
    upper, lower = min(num_rows, TILE), max(0, num_rows - TILE)
    rows = [upper, upper, lower, lower, upper, lower, TILE, TILE]
    raw = bytearray(64)
    raw[0] = _PALETTE
    for register, count in enumerate(rows):
        raw[_FIRST_BYTES + 2 * register] = 4 * TILE if count else 0
        raw[_FIRST_ROWS + register] = count
    return torch.tensor(list(raw), dtype=torch.uint8)


def rest_configuration(num_rows: int) -> torch.Tensor:
    """Returns the configuration of the rows beyond the last multiple of MAX_TILE_ROWS; of MAX_TILE_ROWS if there are
    none."""
    return configuration(num_rows % MAX_TILE_ROWS or MAX_TILE_ROWS)


def each_tile_rows(
    b: Builder, start: Operand, end: Value, whole: Pointer, rest: Pointer
) -> Iterator[tuple[Value, int]]:
    """Loops over rows from `start` to `end`, MAX_TILE_ROWS at a time, for which it gives the first one and the number
    of tiles, 1 or 2.

    `start` is a multiple of MAX_TILE_ROWS, `whole` the configuration for so many, `rest` the rest configuration for
    `end`.
    """
    num_rest = end % MAX_TILE_ROWS
    whole_end = end - num_rest
    pair_end = b.select(num_rest < TILE + 1, whole_end, end)
    first = b.number(start)
    for last, num_tiles, shapes in ((whole_end, 2, whole), (pair_end, 2, rest), (end, 1, rest)):
        with b.when(first < last):
            configure_tiles(shapes)
            with b.loop(first, last, MAX_TILE_ROWS) as row:
                yield row, num_tiles
        first = last


def configure_tiles(shapes: Pointer) -> None:
    """Gives the registers the shapes of a configuration; they are zero then."""
    _call(shapes.builder, "ldtilecfg", [], [shapes.address])


def release_tiles(b: Builder) -> None:
    """Ends the use of the registers."""
    _call(b, "tilerelease", [], [])


def clear_tile(b: Builder, tile: int) -> None:
    """Makes a tile zero."""
    _call(b, "tilezero", [tile], [])


def load_tile(tile: int, pointer: Pointer, stride: Operand) -> None:
    """Reads the rows of a tile, `stride` numbers from one to the next."""
    _call(pointer.builder, "tileloadd64", [tile], [pointer.address, _bytes(pointer, stride)])


def store_tile(tile: int, pointer: Pointer, stride: Operand) -> None:
    """Writes the rows of a tile, `stride` numbers from one to the next."""
    _call(pointer.builder, "tilestored64", [tile], [pointer.address, _bytes(pointer, stride)])


def multiply_tiles(b: Builder, total: int, first: int, second: int) -> None:
    """total += first @ second, of bfloat16 numbers: first [rows, 2k], second [k, columns, 2], total float32."""
    _call(b, "tdpbf16ps", [total, first, second], [])


def _call(b: Builder, name: str, tiles: Sequence[int], operands: Sequence[Any]) -> None:
    numbers = [ir.Constant(ir.IntType(8), tile) for tile in tiles]
    b.intrinsic(f"llvm.x86.{name}", ir.VoidType(), [*numbers, *operands])


def _bytes(pointer: Pointer, count: Operand) -> Any:
    return (pointer.builder.number(count) * pointer.element.size).node

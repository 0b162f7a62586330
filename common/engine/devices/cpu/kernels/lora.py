"""LoRA adapters for a few rows, each adapter of the batch read once. A row's results do not depend on the others.

`routes` are those of `AdapterRows`: how many adapters there are, their slots, where the rows of each begin, and the
rows. `table` has four numbers for each slot: the addresses of the two matrices, the sum of the ranks of all parts of
the layer, padded to whole blocks of BLOCK, and the rank of one part.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from common.engine.devices.cpu.kernels.compiled import KernelSource, kernel_factory
from common.engine.devices.cpu.kernels.experts import BLOCK, by_rows, part_of, products
from common.engine.devices.cpu.kernels.language import Builder, ElementType, Pointer, Value

MAX_ROWS = 64  # beyond which products of matrices are faster
MAX_PARTS = 3  # of a layer, whose ranks are side by side
TABLE_WIDTH = 4
_A, _B, _RANKS, _RANK = range(TABLE_WIDTH)
_INTS = ElementType.INT64
_WIDTHS = (4, 2, 1)  # blocks of outputs in a task
_ROWS = 4  # that are computed at once


def can_add(in_features: int, sizes: Sequence[int]) -> bool:
    """True if the kernels take layers of these inputs and outputs, computed as one."""
    return len(sizes) <= MAX_PARTS and not (in_features % BLOCK or any(size % BLOCK for size in sizes))


def width_of(sizes: Sequence[int]) -> int:
    """Outputs of a task of the second kernel; no task has outputs of two parts."""
    return next(width for width in (BLOCK * each for each in _WIDTHS) if not any(size % width for size in sizes))


@kernel_factory
def lora_down_kernel(element: ElementType, in_features: int, num_slots: int, max_blocks: int) -> KernelSource:
    """low [rows by adapter, stride] float32 = A x. A task is one of the adapters, by its place in the routes, and BLOCK
    of its ranks, of at most `max_blocks` such blocks.

    inputs [rows, in_features]; A [ranks, in_features].
    """

    def body(b: Builder, task: Value, a: Any) -> None:
        place, first = task // max_blocks, task % max_blocks * BLOCK
        with b.when(place < a.routes.load()):
            row_of_table = a.table.at(a.routes.at(place + 1).load() * TABLE_WIDTH)
            with b.when(first < row_of_table.at(_RANKS).load()):
                weight = b.pointer(row_of_table.at(_A).load(), element).at(first * in_features)
                start, stop = (a.routes.at(place + (1 + num_slots + i)).load() for i in (0, 1))

                def multiply(at: Value, num_rows: int) -> None:
                    rows = [a.inputs.at(_row(a, num_slots, at + row) * in_features) for row in range(num_rows)]
                    columns = BLOCK // num_rows
                    for column in range(0, BLOCK, columns):
                        found = products(b, rows, weight.at(column * in_features), in_features, columns)
                        for row in range(num_rows):
                            low = a.low.at((at + row) * a.stride + first + column)
                            low.store(part_of(b, found, row, columns))

                by_rows(b, start, stop, multiply)

    arguments = {"routes": _INTS, "table": _INTS, "inputs": element, "low": ElementType.FLOAT32, "stride": None}
    return KernelSource("lora_down", arguments, body)


@kernel_factory
def lora_up_kernel(element: ElementType, sizes: tuple[int, ...], num_slots: int) -> KernelSource:
    """out [rows, outputs] += B low; `sizes` are the outputs of the layer's parts. A task is `width_of(sizes)` outputs.

    low as `lora_down_kernel` leaves it, a part's ranks side by side; B [rank, outputs].
    """
    width, out_features = width_of(sizes), sum(sizes)
    ends = list(accumulate(sizes))

    def body(b: Builder, task: Value, a: Any) -> None:
        output = task * width
        part: Any = len(sizes) - 1
        for number in range(len(sizes) - 2, -1, -1):
            part = b.select(output < ends[number], number, part)
        with b.loop(0, a.routes.load()) as place:
            row_of_table = a.table.at(a.routes.at(place + 1).load() * TABLE_WIDTH)
            rank = row_of_table.at(_RANK).load()
            weight = b.pointer(row_of_table.at(_B).load(), element).at(output)
            start, stop = (a.routes.at(place + (1 + num_slots + i)).load() for i in (0, 1))

            def multiply(at: Value, num_rows: int, weight: Pointer = weight, rank: Value = rank) -> None:
                outs = [a.out.at(_row(a, num_slots, at + row) * out_features + output) for row in range(num_rows)]
                lows = [a.low.at((at + row) * a.stride + rank * part) for row in range(num_rows)]
                sums = [[b.variable(out.at(lane).load(BLOCK)) for lane in range(0, width, BLOCK)] for out in outs]
                with b.loop(0, rank) as k:
                    weights = [weight.at(k * out_features + lane).load(BLOCK) for lane in range(0, width, BLOCK)]
                    for low, totals in zip(lows, sums, strict=True):
                        factor = b.number(low.at(k).load(), BLOCK)
                        for total, numbers in zip(totals, weights, strict=True):
                            total.set(b.fma(factor, numbers, total.get()))
                for out, totals in zip(outs, sums, strict=True):
                    for lane, total in zip(range(0, width, BLOCK), totals, strict=True):
                        out.at(lane).store(total.get())

            with b.when(b.number(0) < row_of_table.at(_RANKS).load()):
                by_rows(b, start, stop, multiply)

    arguments = {"routes": _INTS, "table": _INTS, "low": ElementType.FLOAT32, "out": element, "stride": None}
    return KernelSource("lora_up", arguments, body)


def _row(a: Any, num_slots: int, at: Value) -> Value:
    """The number of a row in the batch."""
    row: Value = a.routes.at(at + (2 + 2 * num_slots)).load()
    return row

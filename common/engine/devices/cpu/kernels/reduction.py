"""Collectives of processes of one host over memory that they share: each writes to a slot of its own, meets the others,
and reads what they have written.

The memory begins with a line for each rank: how often it has come to a meeting, and how many sleep until it does. Two
slots for each rank follow, which take turns: a rank that comes to a meeting has read what was written before the last
one, so that a slot may be written to without another meeting. What only this rank sees is its state.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from common.engine.devices.cpu.kernels.compiled import KernelSource, kernel_factory
from common.engine.devices.cpu.kernels.language import MAX_LANES, Builder, ElementType, Pointer, Value
from common.engine.devices.cpu.kernels.threads import futex_number

NUMBERS_PER_TASK = 1 << 14
SLOT_BYTES = 1 << 19
LINE = 64  # bytes of a rank at the beginning, of which two numbers are used
GONE = 1 << 62  # added to how often a rank has come when it leaves

# Places in the state, of INT64 numbers.
TURN = 0  # of the slots
MEETING = 1  # of the last one
LOST = 2  # 1 + the rank that has not come, 0: none
SPINS = 3  # before this rank sleeps: fewer after it had to
TIMEOUT_MS = 4
SYSCALL = 5  # addresses of functions
CLOCK = 6
NAP = 7  # seconds and nanoseconds of a sleep, after which the clock is read
STATE_SIZE = 9

MAX_SPINS = 2000
_SPINS_AFTER_SLEEP = 100
_WAIT, _WAKE, _ALL = 0, 1, 1 << 30  # of futexes between processes
_MONOTONIC = 1  # clock
_INTS = ElementType.INT64


@kernel_factory
def put_kernel(element: ElementType, rank: int, size: int) -> KernelSource:
    """Writes `inputs` [total] to this rank's next slot. A task is NUMBERS_PER_TASK of them."""

    def body(b: Builder, task: Value, a: Any) -> None:
        slot = _slot(a, element, rank, size, a.state.load() + 1)
        for place, lanes in _places(b, task, a.total):
            slot.at(place).store(a.inputs.at(place).load(lanes))

    return KernelSource("put", {"memory": _INTS, "state": _INTS, "inputs": element, "total": None}, body)


@kernel_factory
def meet_kernel(rank: int, size: int) -> KernelSource:
    """Returns when all have come, or notes in the state that one has not. One task. `turns`: slots were written."""

    def body(b: Builder, task: Value, a: Any) -> None:
        state, own = a.state, a.memory.at(rank * LINE // 8)
        meeting = state.at(MEETING).load() + 1
        state.at(MEETING).store(meeting)
        state.at(TURN).store(state.at(TURN).load() + a.turns)
        own.share(meeting)
        with b.when(own.at(1).shared() >= 1):
            _futex(b, state, own, _WAKE, _ALL, b.number(0))
        for other in range(rank + 1, rank + size):
            _await(b, state, a.memory.at(other % size * LINE // 8), other % size, meeting)

    return KernelSource("meet", {"memory": _INTS, "state": _INTS, "turns": None}, body)


@kernel_factory
def add_kernel(element: ElementType, rank: int, size: int, *, in_place: bool = False) -> KernelSource:
    """Adds up the slots of all ranks, in their order, in float32: those from `start` to `stop`, to `out` or `in_place`
    of this rank's slot. A task is NUMBERS_PER_TASK of them."""

    def body(b: Builder, task: Value, a: Any) -> None:
        turn = a.state.load()
        slots = [_slot(a, element, each, size, turn).at(a.start) for each in range(size)]
        out = slots[rank] if in_place else a.out.at(a.start)
        for place, lanes in _places(b, task, a.stop - a.start):
            total = slots[0].at(place).load(lanes)
            for slot in slots[1:]:
                total = total + slot.at(place).load(lanes)
            out.at(place).store(total)

    arguments = {"memory": _INTS, "state": _INTS, "out": element, "start": None, "stop": None}
    return KernelSource("add", arguments, body)


@kernel_factory
def collect_kernel(element: ElementType, rank: int, size: int) -> KernelSource:
    """Joins the slots. A task is a row and a rank, counted through, of `count` numbers: in the slot of that rank they
    are at row * source_row + rank * source_rank, in `out` at row * row + rank * step, and not beyond `total` of a row
    there."""

    def body(b: Builder, task: Value, a: Any) -> None:
        row, of = task // size, task % size
        own = a.memory.of(ElementType.INT8).at(_slot_place(size, of, a.state.load())).of(element)
        source = own.at(row * a.source_row + of * a.source_rank)
        out = a.out.at(row * a.row + of * a.step)
        left = a.total - of * a.step
        count = b.select(left < a.count, left, a.count)
        for place, lanes in _run(b, b.number(0), count):
            out.at(place).store(source.at(place).load(lanes))

    names = ("count", "source_row", "source_rank", "row", "step", "total")
    return KernelSource("collect", {"memory": _INTS, "state": _INTS, "out": element, **dict.fromkeys(names)}, body)


def memory_bytes(size: int) -> int:
    """Returns the size of the memory that so many ranks share."""
    return _header_bytes(size) + 2 * size * SLOT_BYTES


def _header_bytes(size: int) -> int:
    return -(-size * LINE // 4096) * 4096


def _slot_place(size: int, rank: Value | int, turn: Value) -> Value:
    """Bytes from the beginning of the memory."""
    return (turn % 2 + rank * 2) * SLOT_BYTES + _header_bytes(size)


def _slot(a: Any, element: ElementType, rank: int, size: int, turn: Value) -> Pointer:
    pointer: Pointer = a.memory.of(ElementType.INT8).at(_slot_place(size, rank, turn)).of(element)
    return pointer


def _places(b: Builder, task: Value, total: Value) -> Any:
    """Loops over the numbers of a task."""
    start = task * NUMBERS_PER_TASK
    end = start + NUMBERS_PER_TASK
    yield from _run(b, start, b.select(end < total, end, total))


def _run(b: Builder, start: Value, end: Value) -> Any:
    whole = start + (end - start) // MAX_LANES * MAX_LANES
    with b.loop(start, whole, MAX_LANES) as place:
        yield place, MAX_LANES
    with b.loop(whole, end) as place:
        yield place, 0


def _await(b: Builder, state: Pointer, other: Pointer, number: int, meeting: Value) -> None:
    """Waits until the other rank has come as often as this one. It spins for some microseconds, then it sleeps: the
    other one may need this core."""

    def is_late(count: Value) -> Value:
        return count < meeting

    spins, limit = b.variable(0), state.at(SPINS).load()
    with b.repeat(lambda: is_late(other.shared()) & (spins.get() < limit)):
        spins.set(spins.get() + 1)
        b.pause()
    state.at(SPINS).store(b.select(spins.get() < limit, MAX_SPINS, _SPINS_AFTER_SLEEP))
    with b.when(is_late(other.shared())):
        began = _now_ms(b, state)
        with b.repeat(lambda: is_late(other.shared()) & (state.at(LOST).load() < 1)):
            seen = other.shared()
            other.at(1).add_shared(1)
            with b.when(is_late(seen)):
                _futex(b, state, other, _WAIT, seen, state.at(NAP).number)
            other.at(1).add_shared(-1)
            with b.when(_now_ms(b, state) - began >= state.at(TIMEOUT_MS).load()):
                state.at(LOST).store(b.number(1 + number))
    count = other.shared()
    with b.when((count >= GONE) & is_late(count % GONE)):
        state.at(LOST).store(b.number(1 + number))


def _futex(b: Builder, state: Pointer, word: Pointer, operation: int, value: Value | int, nap: Value) -> None:
    b.call(state.at(SYSCALL).load(), futex_number(), word.number, operation, value, nap, 0, 0)


def _now_ms(b: Builder, state: Pointer) -> Value:
    time = Pointer(b, b.slot(ir.ArrayType(ir.IntType(64), 2)), _INTS)
    b.call(state.at(CLOCK).load(), _MONOTONIC, time.number)
    return time.load() * 1000 + time.at(1).load() // 1_000_000

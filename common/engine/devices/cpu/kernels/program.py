"""Kernel calls as one: recorded once, then run one after the other without Python in between."""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from common.engine.devices.cpu.kernels import compiled
from common.engine.devices.cpu.kernels.compiled import NEXT_TASK, CannotRecordError, Recording
from common.engine.devices.cpu.kernels.language import Builder, ElementType, Operand, Pointer, Value, Variable

_NUM_THREADS = 0  # places of a program: addresses of functions,
_SYSCALL = 1
_NUM_CALLS = 2
_ARRIVED = 8  # what threads change, each in a cache line of its own,
_ROUND = 16
_SLEEPERS = 24
_FIRST_CALL = 32  # and the calls
_CALL_SIZE = 2  # a kernel and its arguments, as addresses

# Threads wait for each other at each call, mostly for a few microseconds. If one is long in coming, something else may
# be running on its core: the others sleep, and spin for a shorter time at the next call.
_SPINS = 2000
_SPINS_AFTER_SLEEP = 300
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())  # Linux's number of the system call
_WAIT, _WAKE = 128, 129  # operations of it, within a process
_ALL = 1 << 30


class Program:
    """Recorded calls. All that they read and write stays where it is; called on one thread."""

    def __init__(self, recording: Recording) -> None:
        """Raises CannotRecordError on processors whose system calls are not known here."""
        if FUTEX is None:
            raise CannotRecordError(f"programs do not run on {platform.machine()}")
        calls = recording.calls
        self._kept = recording
        self._program = (ctypes.c_int64 * (_FIRST_CALL + _CALL_SIZE * len(calls)))()
        self._program[_NUM_THREADS] = compiled.address_of_num_threads()
        self._program[_SYSCALL] = ctypes.cast(ctypes.CDLL(None).syscall, ctypes.c_void_p).value or 0
        self._program[_NUM_CALLS] = len(calls)
        for place, call in enumerate(calls):
            first = _FIRST_CALL + _CALL_SIZE * place
            self._program[first : first + _CALL_SIZE] = [call.kernel.address, ctypes.addressof(call.block)]
        self._num_threads = max((call.num_threads for call in calls), default=1)
        self._address = ctypes.addressof(self._program)

    def run(self) -> None:
        """Does what was recorded again. Raises what its checks raise."""
        compiled.run_on_threads(_runner().address, self._address, self._num_threads)
        for check in self._kept.checks:
            check()


class Workspace:
    """Memory for the results of recorded calls: two places in turn, as each is read by the next call only. Programs
    that do not run at once may share it."""

    def __init__(self, max_rows: int) -> None:
        """`max_rows`: the most that a result has."""
        self._max_rows = max_rows
        self._places = [torch.empty(0, dtype=torch.uint8)] * 2
        self._turn = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that is valid until the second take from here."""
        self._turn = 1 - self._turn
        rows, row_bytes = shape[0], torch.Size(shape[1:]).numel() * dtype.itemsize
        if len(self._places[self._turn]) < self._max_rows * row_bytes:  # programs keep the place that they use
            self._places[self._turn] = torch.empty(self._max_rows * row_bytes, dtype=torch.uint8)
        return self._places[self._turn][: rows * row_bytes].view(dtype).view(shape)


@contextmanager
def recording(workspace: Workspace) -> Iterator[Recording]:
    """Calls of this thread are recorded instead of being run. Work that cannot be raises CannotRecordError."""
    recorded = Recording(workspace.take)
    with compiled.recorded_by(recorded):
        yield recorded


@cache
def _runner() -> compiled.Function:
    """Runs the calls of a program, on each of the threads that do its tasks."""

    def body(b: Builder, program: Pointer) -> None:
        num_threads = b.call(program.at(_NUM_THREADS).load())
        max_spins = b.variable(_SPINS)
        with b.loop(0, program.at(_NUM_CALLS).load()) as number:
            call = program.at(number * _CALL_SIZE + _FIRST_CALL)
            block = call.at(1).load()
            b.call(call.load(), block)
            _wait_for_all(b, program, num_threads, max_spins)
            # No thread takes tasks of this call before the next run.
            b.pointer(block, ElementType.INT64).at(NEXT_TASK).store(b.number(0))

    return compiled.Function("program", body)


def _wait_for_all(b: Builder, program: Pointer, num_threads: Value, max_spins: Variable) -> None:
    """Returns when all threads have come here; changes for how long the next wait spins."""
    arrived, round_, sleepers = (program.at(place) for place in (_ARRIVED, _ROUND, _SLEEPERS))
    now = round_.shared()
    is_last = arrived.add_shared(1) + 1 >= num_threads

    def futex(operation: int, value: Operand) -> None:
        assert FUTEX is not None
        b.call(program.at(_SYSCALL).load(), FUTEX, round_.number, operation, value, 0, 0, 0)

    with b.when(is_last):
        arrived.share(0)
        round_.share(now + 1)
        with b.when(sleepers.shared() >= 1):
            futex(_WAKE, _ALL)
    with b.otherwise(is_last):
        spins, limit = b.variable(0), max_spins.get()
        with b.repeat(lambda: (round_.shared() < now + 1) & (spins.get() < limit)):
            spins.set(spins.get() + 1)
            b.pause()
        max_spins.set(b.select(spins.get() < limit, _SPINS, _SPINS_AFTER_SLEEP))
        with b.repeat(lambda: round_.shared() < now + 1):
            sleepers.add_shared(1)
            futex(_WAIT, now)
            sleepers.add_shared(-1)

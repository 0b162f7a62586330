"""Kernel calls as one: recorded once, then run one after the other without Python in between."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from common.engine.cpu_kernels import compiled
from common.engine.cpu_kernels.compiled import NEXT_TASK, Recording
from common.engine.cpu_kernels.language import Builder, ElementType, Pointer

_BARRIER = 0  # places of a program
_NUM_CALLS = 1
_FIRST_CALL = 2
_CALL_SIZE = 2  # a kernel and its arguments, as addresses


class Program:
    """Recorded calls. All that they read and write stays where it is; called on one thread."""

    def __init__(self, recording: Recording) -> None:
        calls = recording.calls
        self._kept = recording
        self._program = (ctypes.c_int64 * (_FIRST_CALL + _CALL_SIZE * len(calls)))()
        self._program[_BARRIER] = compiled.openmp_barrier()
        self._program[_NUM_CALLS] = len(calls)
        for place, call in enumerate(calls):
            first = _FIRST_CALL + _CALL_SIZE * place
            self._program[first : first + _CALL_SIZE] = [call.kernel.address, ctypes.addressof(call.block)]
        self._num_threads = max((call.num_threads for call in calls), default=1)
        self._address = ctypes.addressof(self._program)

    def run(self) -> None:
        """Does what was recorded again."""
        compiled.run_on_threads(_runner().address, self._address, self._num_threads)


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
    """Calls of this thread are recorded instead of being run. Raises RuntimeError where something cannot be."""
    recorded = Recording(workspace.take)
    with compiled.recorded_by(recorded):
        yield recorded


@cache
def _runner() -> compiled.Function:
    """Runs the calls of a program, on each of the threads that do its tasks."""

    def body(b: Builder, address: Pointer) -> None:
        barrier = address.at(_BARRIER).load()
        with b.loop(0, address.at(_NUM_CALLS).load()) as number:
            call = address.at(number * _CALL_SIZE + _FIRST_CALL)
            block = call.at(1).load()
            b.call(call.load(), block)
            b.call(barrier)
            # Nobody takes tasks of this call any more, and nobody will before the next run.
            b.pointer(block, ElementType.INT64).at(NEXT_TASK).store(b.number(0))

    return compiled.Function("program", body)

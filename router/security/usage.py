"""Where it is counted what tenants use of their quotas: in this process, or in memory that several workers share.

Shared, each name has a row, which the first worker that needs it appends:

    name       64 bytes, padded with zeros
    buckets    of requests and of tokens, see TokenBucket
    running    generations of each worker; those of a worker that died are set to 0 by the parent

A row is locked while it is read and changed, for microseconds. The lock is the kernel's, so it ends with a process that
dies. Workers read the same clock: CLOCK_MONOTONIC is the machine's.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import MutableSequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Protocol, cast

from common.errors import ConfigError
from router.security.buckets import NUM_CELLS

_NAME_BYTES = 64
_CELL_BYTES = 8
_NUM_FIXED_CELLS = 2 * NUM_CELLS
_MAX_ROWS = 65_536  # memory is taken only by rows that are in use

_UNLOCKED = nullcontext()


class UsageRow:
    """What one tenant uses. Only to be touched within `locked`."""

    def __init__(
        self, cells: MutableSequence[float], own: int, locked: AbstractContextManager[None] = _UNLOCKED
    ) -> None:
        """`cells` is memory of which slices are parts, not copies; `own`: the worker's number."""
        self.locked = locked  # no other process changes it within
        self.requests = cells[:NUM_CELLS]
        self.tokens = cells[NUM_CELLS:_NUM_FIXED_CELLS]
        self._running = cells[_NUM_FIXED_CELLS:]
        self._own = own

    @property
    def num_running(self) -> int:
        """Generations of all workers."""
        return int(sum(self._running))

    def add_running(self, num_generations: int) -> None:
        """Counts generations of this process; a negative number: they have ended."""
        self._running[self._own] += num_generations


class Usage(Protocol):
    """Gives each tenant a place to be counted. Called on the event loop, when keys are read."""

    def row(self, name: str) -> UsageRow:
        """The tenant's. Raises ConfigError if there is no place."""


class LocalUsage:
    """Of a router that is alone in counting."""

    def row(self, name: str) -> UsageRow:
        """A fresh one."""
        return UsageRow(_floats(memoryview(bytearray(_CELL_BYTES * (_NUM_FIXED_CELLS + 1)))), own=0)


class SharedUsage:
    """One worker's view of the memory that all share."""

    def __init__(self, descriptor: int, num_workers: int, own: int) -> None:
        """`descriptor`: of the file that `create` made, which this takes over."""
        self._descriptor = descriptor
        self._own = own
        self._row_bytes = _NAME_BYTES + _CELL_BYTES * (_NUM_FIXED_CELLS + num_workers)
        self._memory = mmap.mmap(descriptor, _MAX_ROWS * self._row_bytes)
        self._rows: dict[str, int] = {}  # those that this process has read

    @staticmethod
    def create(num_workers: int) -> int:
        """A descriptor of fresh memory, for each of these workers to inherit."""
        descriptor = os.memfd_create("baton-quotas")
        os.ftruncate(descriptor, _MAX_ROWS * (_NAME_BYTES + _CELL_BYTES * (_NUM_FIXED_CELLS + num_workers)))
        return descriptor

    def row(self, name: str) -> UsageRow:
        """See Usage."""
        with self._lock(0):  # under which rows are appended
            number = self._find(name)
        return UsageRow(self._cells(number), self._own, self._lock(number))

    def forget_worker(self, number: int) -> None:
        """Nothing runs any more of a worker that has ended."""
        with self._lock(0):
            self._find(None)
        for row in self._rows.values():
            with self._lock(row):
                self._cells(row)[_NUM_FIXED_CELLS + number] = 0.0

    def _lock(self, row: int) -> _RangeLock:
        return _RangeLock(self._descriptor, row * self._row_bytes, self._row_bytes)

    def _find(self, name: str | None) -> int:
        """Reads the rows that others have appended. Appends one for a `name` that has none. Returns its number."""
        number = len(self._rows)
        while number < _MAX_ROWS and (found := self._name(number)):
            self._rows[found] = number
            number += 1
        if name is None or name in self._rows:
            return self._rows.get(name or "", -1)
        if number == _MAX_ROWS:
            raise ConfigError(
                f"--api-keys-file: {_MAX_ROWS} names of keys have been in use; restart the router",
                param="api_keys_file",
            )
        start = number * self._row_bytes
        self._memory[start : start + _NAME_BYTES] = name.encode().ljust(_NAME_BYTES, b"\0")
        self._rows[name] = number
        return number

    def _name(self, row: int) -> str:
        start = row * self._row_bytes
        return self._memory[start : start + _NAME_BYTES].rstrip(b"\0").decode()

    def _cells(self, row: int) -> MutableSequence[float]:
        start = row * self._row_bytes
        return _floats(memoryview(self._memory)[start + _NAME_BYTES : start + self._row_bytes])


def _floats(memory: memoryview) -> MutableSequence[float]:
    return cast("MutableSequence[float]", memory.cast("d"))  # which it is, though typeshed does not say so


class _RangeLock:
    """Locks a part of a file for this process. Not reentrant, and no lock between threads of one process."""

    def __init__(self, descriptor: int, start: int, num_bytes: int) -> None:
        self._descriptor = descriptor
        self._start = start
        self._num_bytes = num_bytes

    def __enter__(self) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_EX, self._num_bytes, self._start)

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, self._num_bytes, self._start)

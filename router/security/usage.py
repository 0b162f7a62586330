"""Counts tenants' use of their quotas: in this process, or in memory that several workers share.

Shared, each worker has a region that it alone writes and all read, so nothing is locked: a worker that is stopped or
killed at any moment holds up no other. A region is the number of its rows and a row for each name that the worker has
needed, in the order in which they came:

    name       64 bytes, padded with zeros
    running    generations; set to 0 by the parent once the worker has ended
    requests   see TokenBucket
    tokens     see TokenBucket

A worker that is started again goes on with the region of its predecessor. Cells are written and read whole, being of 8
bytes and aligned. Workers read the same clock: CLOCK_MONOTONIC is the machine's.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, cast

from common.errors import ConfigError
from router.security.buckets import NUM_CELLS, BucketCells, Cells

_NAME_BYTES = 64
_CELL_BYTES = 8
_SHARE_BYTES = _CELL_BYTES * (1 + 2 * NUM_CELLS)
_ROW_BYTES = _NAME_BYTES + _SHARE_BYTES
_MAX_ROWS = 65_536  # memory is taken only by rows that are in use
_REGION_BYTES = _CELL_BYTES + _MAX_ROWS * _ROW_BYTES


class Share(NamedTuple):
    """One worker's count of a tenant's use."""

    running: Cells  # a single cell
    requests: Cells
    tokens: Cells

    @classmethod
    def of(cls, memory: memoryview) -> Share:
        """The one that is kept in this memory."""
        cells = _cells(memory)
        return cls(cells[:1], cells[1 : 1 + NUM_CELLS], cells[1 + NUM_CELLS :])  # parts, not copies


class UsageRow:
    """One tenant's use."""

    def __init__(self, own: Share, read_all: Callable[[], Sequence[Share]]) -> None:
        """`own` is this worker's; `read_all` gives those of all workers."""
        self.requests = BucketCells(own.requests, lambda: [share.requests for share in read_all()])
        self.tokens = BucketCells(own.tokens, lambda: [share.tokens for share in read_all()])
        self._running = own.running
        self._read_all = read_all

    @property
    def num_running(self) -> int:
        """Generations of all workers."""
        return int(sum(share.running[0] for share in self._read_all()))

    def add_running(self, num_generations: int) -> None:
        """Counts generations of this process; a negative number: they have ended."""
        self._running[0] += num_generations


class Usage(Protocol):
    """Gives each tenant a place to be counted. Called on the event loop, when keys are read."""

    def row(self, name: str) -> UsageRow:
        """The tenant's. Raises ConfigError if there is no place."""


class LocalUsage:
    """The usage of a router that is alone in counting."""

    def row(self, name: str) -> UsageRow:
        """A fresh one."""
        share = Share.of(memoryview(bytearray(_SHARE_BYTES)))
        return UsageRow(share, lambda: (share,))


class SharedUsage:
    """One worker's view of the memory that all share."""

    def __init__(self, descriptor: int, num_workers: int, own: int) -> None:
        """`descriptor`: what `create` gave; it may be closed afterwards."""
        memory = memoryview(mmap.mmap(descriptor, num_workers * _REGION_BYTES))
        starts = range(0, len(memory), _REGION_BYTES)
        self._regions = [_Region(memory[start : start + _REGION_BYTES]) for start in starts]
        self._own = self._regions[own]

    @staticmethod
    def create(num_workers: int) -> int:
        """A descriptor of fresh memory, for each of these workers to inherit."""
        descriptor = os.memfd_create("baton-quotas")
        os.ftruncate(descriptor, num_workers * _REGION_BYTES)
        return descriptor

    def row(self, name: str) -> UsageRow:
        """See Usage."""
        own = self._own.find(name) or self._own.append(name)
        return UsageRow(own, lambda: [share for region in self._regions if (share := region.find(name)) is not None])

    def forget_worker(self, number: int) -> None:
        """Nothing runs any more of a worker that has ended."""
        self._regions[number].stop_running()


class _Region:
    """The counts of one worker."""

    def __init__(self, memory: memoryview) -> None:
        self._memory = memory
        self._num_rows = _cells(memory[:_CELL_BYTES])
        self._num_read = 0
        self._shares: dict[str, Share] = {}  # of the rows that this process has read

    def find(self, name: str) -> Share | None:
        """None: the worker has not needed it yet."""
        self._read()
        return self._shares.get(name)

    def append(self, name: str) -> Share:
        """Makes a row. Only for the worker whose region it is."""
        if self._num_read == _MAX_ROWS:
            raise ConfigError(
                f"--api-keys-file: {_MAX_ROWS} names of keys have been in use; restart the router",
                param="api_keys_file",
            )
        self._row(self._num_read)[:_NAME_BYTES] = name.encode().ljust(_NAME_BYTES, b"\0")
        self._num_rows[0] += 1  # after the name: others read it from now on
        self._read()
        return self._shares[name]

    def stop_running(self) -> None:
        """Counts no generations. Only once the worker has ended."""
        self._read()
        for share in self._shares.values():
            share.running[0] = 0.0

    def _read(self) -> None:
        while self._num_read < self._num_rows[0]:
            row = self._row(self._num_read)
            self._shares[bytes(row[:_NAME_BYTES]).rstrip(b"\0").decode()] = Share.of(row[_NAME_BYTES:])
            self._num_read += 1

    def _row(self, number: int) -> memoryview:
        start = _CELL_BYTES + number * _ROW_BYTES
        return self._memory[start : start + _ROW_BYTES]


def _cells(memory: memoryview) -> Cells:
    return cast("Cells", memory.cast("d"))  # which it is, though typeshed does not say so

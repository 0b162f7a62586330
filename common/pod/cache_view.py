"""The blocks in the pod's prefix cache, and what each watcher has received of them.

A slow watcher costs no more than a fast one: only the net change since its last report is kept, which is never more
than twice what the cache holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from common.engine.kv_cache import CacheChanges
from common.pb import pods_pb2
from common.types import HASH_BYTES, BlockHash, split_hashes

HASHES_PER_EVENT = 4096  # 64 KiB: gRPC allows 4 MiB, but one message should not block a router for long


class CacheView:
    """Follows the engine's outputs and serves watchers. For the event loop's thread."""

    def __init__(self) -> None:
        self._held: dict[BlockHash, None] = {}  # oldest first, so that the head of a prompt is before its end
        self._watches: set[CacheWatch] = set()

    def __len__(self) -> int:
        return len(self._held)

    def apply(self, stored: bytes, removed: bytes) -> None:
        """Applies the changes of a step. Raises KeyError for a removed block that was not held."""
        for block_hash in split_hashes(removed):
            del self._held[block_hash]
            for watch in self._watches:
                watch.changes.remove(block_hash)
        for block_hash in split_hashes(stored):
            self._held[block_hash] = None
            for watch in self._watches:
                watch.changes.store(block_hash)

    def snapshot(self) -> bytes:
        """Returns the hashes of all blocks that it holds."""
        return b"".join(self._held)

    @contextmanager
    def watch(self) -> Iterator[CacheWatch]:
        """Creates a watcher, which has received nothing yet."""
        watch = CacheWatch(self)
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)


class CacheWatch:
    """The changes that one watcher has not received yet."""

    def __init__(self, view: CacheView) -> None:
        self._view = view
        self.changes = CacheChanges()  # since the last `take`; written by the view
        self._told_all = False  # it has received its snapshot
        self._sequence = itertools.count(1)

    def take(self) -> list[pods_pb2.KVEvents]:
        """Returns what to send now, in order: first a snapshot, later the changes; empty if there are none."""
        stored, removed = self.changes.take()
        if self._told_all:
            return [
                *(self._event(removed=part) for part in _cut(removed)),
                *(self._event(stored=part) for part in _cut(stored)),
            ]
        self._told_all = True
        first, *rest = _cut(self._view.snapshot()) or [b""]  # an empty cache is reported, too
        return [self._event(stored=first, is_snapshot=True), *(self._event(stored=part) for part in rest)]

    def _event(self, *, stored: bytes = b"", removed: bytes = b"", is_snapshot: bool = False) -> pods_pb2.KVEvents:
        return pods_pb2.KVEvents(sequence=next(self._sequence), is_snapshot=is_snapshot, stored=stored, removed=removed)


def _cut(hashes: bytes) -> list[bytes]:
    """Splits hashes into parts of at most `HASHES_PER_EVENT`."""
    size = HASHES_PER_EVENT * HASH_BYTES
    return [hashes[start : start + size] for start in range(0, len(hashes), size)]

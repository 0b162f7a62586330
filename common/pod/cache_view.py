"""Which blocks the pod's prefix cache holds, and what of it each watcher has been told.

A watcher that is slow costs no more than one that is quick: only the net change since its last report is kept, which
is never more than twice what the cache holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager

from common.engine.kv_cache import CacheChanges
from common.pb import pods_pb2
from common.types import HASH_BYTES, BlockHash, split_hashes

HASHES_PER_EVENT = 4096  # 64 KiB: gRPC takes 4 MiB, but a router should not be held up for long by one message


class CacheView:
    """Follows the engine's outputs, and has watchers of its own. For the event loop's thread."""

    def __init__(self) -> None:
        self._held: dict[BlockHash, None] = {}  # oldest first, so that the head of a prompt is before its end
        self._watches: set[CacheWatch] = set()

    def __len__(self) -> int:
        return len(self._held)

    def apply(self, stored: bytes, removed: bytes) -> None:
        """Take over what a step changed. Raises KeyError for a removed block that was not held."""
        for block_hash in split_hashes(removed):
            del self._held[block_hash]
            for watch in self._watches:
                watch.changes.remove(block_hash)
        for block_hash in split_hashes(stored):
            self._held[block_hash] = None
            for watch in self._watches:
                watch.changes.store(block_hash)

    def snapshot(self) -> bytes:
        """Hashes of all blocks that it holds."""
        return b"".join(self._held)

    @contextmanager
    def watch(self) -> Iterator[CacheWatch]:
        """A watcher that knows nothing yet."""
        watch = CacheWatch(self)
        self._watches.add(watch)
        try:
            yield watch
        finally:
            self._watches.discard(watch)


class CacheWatch:
    """What one watcher has not been told yet."""

    def __init__(self, view: CacheView) -> None:
        self._view = view
        self.changes = CacheChanges()  # since the last `take`; written by the view
        self._told_all = False  # it has had its snapshot
        self._sequence = itertools.count(1)

    def take(self) -> list[pods_pb2.KVEvents]:
        """What to tell it now, in order: first a snapshot, after that what changed; empty if nothing did."""
        stored, removed = self.changes.take()
        if self._told_all:
            return [
                *(self._event(removed=part) for part in _cut(removed)),
                *(self._event(stored=part) for part in _cut(stored)),
            ]
        self._told_all = True
        first, *rest = _cut(self._view.snapshot()) or [b""]  # an empty cache is worth saying
        return [self._event(stored=first, is_snapshot=True), *(self._event(stored=part) for part in rest)]

    def _event(self, *, stored: bytes = b"", removed: bytes = b"", is_snapshot: bool = False) -> pods_pb2.KVEvents:
        return pods_pb2.KVEvents(sequence=next(self._sequence), is_snapshot=is_snapshot, stored=stored, removed=removed)


def _cut(hashes: bytes) -> list[bytes]:
    """Parts of at most `HASHES_PER_EVENT` hashes."""
    size = HASHES_PER_EVENT * HASH_BYTES
    return [hashes[start : start + size] for start in range(0, len(hashes), size)]

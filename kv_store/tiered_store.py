"""Two tiers as one BlockStore: memory of this host above a store that other pods share.

Looking and loading ask above first, and below, in one batch, only for what is not above; what came from below is then
above as well. A tier's save goes to both. While the lower tier fails, the upper one goes on alone: what is only below
counts as missing, which costs a recompute, and what is saved stays on this host.

A save for the sake of a handoff is another matter, because another pod relies on it: see `TieredStore.shared`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from common.errors import StoreError
from common.types import BlockHash
from kv_store.base import BlockSink, BlockStore, Buffer
from kv_store.host_pool import HostPool

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

_RETRY_S = 1.0  # between two attempts while the lower tier fails


class TieredStore:
    """A BlockStore of which the upper tier may answer alone."""

    def __init__(self, upper: HostPool, lower: BlockStore, *, retry_s: float = _RETRY_S) -> None:
        self._upper = upper
        self._lower = lower
        # Apart, because a full store can still be read.
        self._reading = _Outage("read", retry_s)
        self._writing = _Outage("written", retry_s)
        self._frame_bytes = 0

    @property
    def shared(self) -> BlockSink:
        """Where a save goes that another pod relies on: it has reached the lower tier, or it fails."""
        return _Shared(self._upper, self._lower)

    def open(self, namespace: str, frame_bytes: int) -> None:
        """See BlockStore."""
        self._frame_bytes = frame_bytes
        self._lower.open(namespace, frame_bytes)
        self._upper.open(namespace, frame_bytes)

    def touch(self, keys: Sequence[BlockHash]) -> list[bool]:
        """See BlockStore. Never raises StoreError."""
        present = self._upper.touch(keys)
        asked = [index for index, is_there in enumerate(present) if not is_there]
        if asked:
            below = self._reading.attempt(lambda: self._lower.touch([keys[index] for index in asked]))
            for index, is_there in zip(asked, below or [], strict=False):
                present[index] = is_there
        return present

    def write(self, keys: Sequence[BlockHash], frames: Sequence[Buffer]) -> None:
        """See BlockStore. Never raises StoreError."""
        self._upper.write(keys, frames)
        self._writing.attempt(lambda: self._lower.write(keys, frames))

    def read_into(self, keys: Sequence[BlockHash], buffers: Sequence[Buffer]) -> list[int | None]:
        """See BlockStore. Never raises StoreError."""
        sizes = self._upper.read_into(keys, buffers)
        asked = [index for index, size in enumerate(sizes) if size is None]
        if asked:
            asked_keys, asked_buffers = [keys[index] for index in asked], [buffers[index] for index in asked]
            below = self._reading.attempt(lambda: self._lower.read_into(asked_keys, asked_buffers))
            for index, size in zip(asked, below or [], strict=False):
                sizes[index] = size
            self._promote([index for index in asked if sizes[index] == self._frame_bytes], keys, buffers)
        return sizes

    def discard(self, key: BlockHash) -> None:
        """See BlockStore. From both, since nobody knows which of them had the corrupt one first. While the lower one
        cannot be read, what is there stays, and is found corrupt again."""
        self._upper.discard(key)
        if not self._reading.is_on:
            self._lower.discard(key)

    def close(self) -> None:
        """See BlockStore."""
        self._upper.close()
        self._lower.close()

    def _promote(self, indices: Sequence[int], keys: Sequence[BlockHash], buffers: Sequence[Buffer]) -> None:
        """Keep above what came from below: unverified, as all that a store has. Its reader discards what is wrong."""
        frames = [buffers[index][: self._frame_bytes] for index in indices if len(buffers[index]) >= self._frame_bytes]
        if len(frames) == len(indices):
            self._upper.write([keys[index] for index in indices], frames)


class _Shared:
    """A BlockSink for what has to be in the lower tier."""

    def __init__(self, upper: HostPool, lower: BlockStore) -> None:
        self._upper = upper
        self._lower = lower

    def touch(self, keys: Sequence[BlockHash]) -> list[bool]:
        """See BlockSink. What is above alone does not count."""
        return self._lower.touch(keys)

    def write(self, keys: Sequence[BlockHash], frames: Sequence[Buffer]) -> None:
        """See BlockSink. Above as well, even if the lower tier then fails."""
        self._upper.write(keys, frames)
        self._lower.write(keys, frames)


class _Outage:
    """Keeps those who can do without a failing tier from waiting for it: while it fails, one of them at a time tries
    again, `retry_s` after the last failure. Says once that it fails, and once that it no longer does."""

    def __init__(self, verb: str, retry_s: float) -> None:
        self._verb = verb
        self._retry_s = retry_s
        self._lock = threading.Lock()  # guards all below
        self._is_on = False
        self._is_tried = False
        self._retry_at = 0.0  # monotonic seconds

    @property
    def is_on(self) -> bool:
        """The last attempt failed."""
        with self._lock:
            return self._is_on

    def attempt(self, ask: Callable[[], _T]) -> _T | None:
        """What `ask` returns; None if it fails or is not to be called now."""
        if not self._may_try():
            return None
        problem: Exception | None = None
        try:
            return ask()
        except StoreError as error:
            problem = error
            return None
        except Exception as error:
            problem = error
            raise
        finally:
            self._note(problem)

    def _may_try(self) -> bool:
        with self._lock:
            if not self._is_on:
                return True
            if self._is_tried or time.monotonic() < self._retry_at:
                return False
            self._is_tried = True
            return True

    def _note(self, problem: Exception | None) -> None:
        with self._lock:
            was_on, self._is_on = self._is_on, problem is not None
            self._is_tried = False
            self._retry_at = time.monotonic() + self._retry_s
        if problem is not None and not was_on:
            logger.warning("the tier below the host's memory cannot be %s and is done without: %s", self._verb, problem)
        elif problem is None and was_on:
            logger.warning("the tier below the host's memory can be %s again", self._verb)

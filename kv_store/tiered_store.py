"""Two tiers as one BlockStore: memory of this host above a store that other pods share.

Lookups and loads ask the upper tier first, then the lower one, in one batch, for the blocks that the upper one lacks;
blocks found below are copied to the upper tier. A tier's save goes to both. While the lower tier fails, the upper one
goes on alone: blocks that are only below count as missing, which costs a recompute, and saved blocks stay on this host.
A lower store that keeps failing rejects operations at once, see `kv_store.guard`.

A save for a handoff must reach the lower tier, because another pod relies on it: see `TieredStore.shared`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from common.errors import StoreError, StoreUnavailableError
from common.types import BlockHash
from kv_store.base import BlockSink, BlockStore, Buffer
from kv_store.host_pool import HostPool

logger = logging.getLogger(__name__)


class TieredStore:
    """A BlockStore whose upper tier may answer alone."""

    def __init__(self, upper: HostPool, lower: BlockStore) -> None:
        self._upper = upper
        self._lower = lower
        self._frame_bytes = 0

    @property
    def shared(self) -> BlockSink:
        """The sink for saves on which another pod relies: they reach the lower tier, or fail."""
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
            with _done_without():
                below = self._lower.touch([keys[index] for index in asked])
                for index, is_there in zip(asked, below, strict=True):
                    present[index] = is_there
        return present

    def write(self, keys: Sequence[BlockHash], frames: Sequence[Buffer]) -> None:
        """See BlockStore. Never raises StoreError."""
        self._upper.write(keys, frames)
        with _done_without():
            self._lower.write(keys, frames)

    def read_into(self, keys: Sequence[BlockHash], buffers: Sequence[Buffer]) -> list[int | None]:
        """See BlockStore. Never raises StoreError."""
        sizes = self._upper.read_into(keys, buffers)
        asked = [index for index, size in enumerate(sizes) if size is None]
        if asked:
            asked_keys, asked_buffers = [keys[index] for index in asked], [buffers[index] for index in asked]
            with _done_without():
                below = self._lower.read_into(asked_keys, asked_buffers)
                for index, size in zip(asked, below, strict=True):
                    sizes[index] = size
            self._promote(asked, sizes, keys, buffers)
        return sizes

    def discard(self, key: BlockHash) -> None:
        """See BlockStore. From both, since either may have had the corrupt one first."""
        self._upper.discard(key)
        self._lower.discard(key)

    def close(self) -> None:
        """See BlockStore."""
        self._upper.close()
        self._lower.close()

    def _promote(
        self,
        indices: Sequence[int],
        sizes: Sequence[int | None],
        keys: Sequence[BlockHash],
        buffers: Sequence[Buffer],
    ) -> None:
        """Copies frames from below to the upper tier, unverified: their readers verify them and discard corrupt ones.
        Those of pods with another head, or without one, have other sizes."""
        for index in indices:
            size = sizes[index]
            if size is not None and len(buffers[index]) >= (kept := min(size, self._frame_bytes)):
                self._upper.keep([keys[index]], [buffers[index][:kept]], [size])


class _Shared:
    """A BlockSink for blocks that must be in the lower tier."""

    def __init__(self, upper: HostPool, lower: BlockStore) -> None:
        self._upper = upper
        self._lower = lower

    def touch(self, keys: Sequence[BlockHash]) -> list[bool]:
        """See BlockSink. Blocks that only the upper tier has do not count."""
        return self._lower.touch(keys)

    def write(self, keys: Sequence[BlockHash], frames: Sequence[Buffer]) -> None:
        """See BlockSink. Writes to the upper tier as well, even if the lower one then fails."""
        self._upper.write(keys, frames)
        self._lower.write(keys, frames)


@contextmanager
def _done_without() -> Iterator[None]:
    """Logs and ignores failures of the lower tier."""
    try:
        yield
    except StoreUnavailableError:
        pass  # logged when its breaker opened
    except StoreError as error:
        logger.warning("the store below host memory failed: %s", error)

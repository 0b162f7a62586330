"""The host tier: a BlockStore in memory of this process alone, for blocks that do not fit the device.

All memory is one arena, divided into frames when the pool is opened. A frame is free, being filled, or found under its
key; the least recently used of the last kind is evicted when none is free. The lock is held to find frames, never while
bytes are copied: a thread that copies out of a frame counts as its reader meanwhile, and a frame with readers is
neither refilled nor freed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from common.errors import ConfigError
from common.types import BlockHash
from kv_store.base import Buffer


class HostPool:
    """A BlockStore of `host_bytes` bytes. Pages are allocated when they are first used."""

    def __init__(self, host_bytes: int) -> None:
        self._host_bytes = host_bytes
        self._arena: npt.NDArray[np.uint8] = np.empty((0, 0), dtype=np.uint8)  # [frames, frame_bytes]
        self._sizes: list[int] = []  # bytes in each frame; more than a frame holds if the block did not fit
        self._lock = threading.Lock()  # guards all below
        self._free: list[int] = []
        self._found: OrderedDict[BlockHash, int] = OrderedDict()  # least recently used first
        self._readers: dict[int, int] = {}  # frame -> readers, for frames that are being read
        self._condemned: set[int] = set()  # discarded while being read; the last reader frees them

    def open(self, namespace: str, frame_bytes: int) -> None:
        """See BlockStore. The namespace does not matter: one pool serves one model."""
        num_frames = self._host_bytes // frame_bytes
        if not num_frames:
            message = f"host_bytes: {self._host_bytes} bytes cannot hold a block of {frame_bytes}"
            raise ConfigError(message, param="host_bytes")
        try:
            self._arena = np.empty((num_frames, frame_bytes), dtype=np.uint8)
        except MemoryError as error:
            message = f"host_bytes: cannot allocate {self._host_bytes} bytes"
            raise ConfigError(message, param="host_bytes") from error
        self._free = list(range(num_frames - 1, -1, -1))
        self._sizes = [frame_bytes] * num_frames

    def touch(self, keys: Sequence[BlockHash]) -> list[bool]:
        """See BlockStore."""
        with self._lock:
            return [self._find(key) is not None for key in keys]

    def write(self, keys: Sequence[BlockHash], frames: Sequence[Buffer]) -> None:
        """See BlockStore. Does not rewrite blocks that are there. Never raises StoreError; if all frames are being read
        or filled, a block is dropped, as if it had been evicted."""
        self.keep(keys, frames, list(map(len, frames)))

    def keep(self, keys: Sequence[BlockHash], frames: Sequence[Buffer], sizes: Sequence[int]) -> None:
        """The same as `write`, for frames as `read_into` answers with them: of these sizes, cut off where they did not
        fit."""
        for key, frame, size in zip(keys, frames, sizes, strict=True):
            self._write_one(key, frame, size)

    def read_into(self, keys: Sequence[BlockHash], buffers: Sequence[Buffer]) -> list[int | None]:
        """See BlockStore. Never raises StoreError."""
        return [self._read_one(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def discard(self, key: BlockHash) -> None:
        """See BlockStore."""
        with self._lock:
            index = self._found.pop(key, None)
            if index is None:
                return
            if index in self._readers:
                self._condemned.add(index)
            else:
                self._free.append(index)

    def close(self) -> None:
        """See BlockStore, but stored blocks are gone. Running calls may still end, and find nothing from now on."""
        with self._lock:
            self._found.clear()
            self._free.clear()
            self._condemned.clear()
            self._host_bytes = 0
            self._arena = self._arena[:0]

    def check_integrity(self) -> list[str]:
        """Returns broken invariants, one line each. Only valid while no thread reads or writes."""
        with self._lock:
            frames = [*self._free, *self._found.values()]
            wrong = [] if sorted(frames) == list(range(len(self._arena))) else ["frames are lost or have two owners"]
            if self._readers or self._condemned:
                wrong.append("frames have readers that are gone")
        return wrong

    def _write_one(self, key: BlockHash, frame: Buffer, size: int) -> None:
        with self._lock:
            index = self._take_frame_for(key)
            arena = self._arena
        if index is None:
            return
        is_filled = False
        try:
            np.copyto(arena[index][: len(frame)], np.frombuffer(frame, dtype=np.uint8))
            self._sizes[index] = size
            is_filled = True
        finally:
            with self._lock:
                if not len(self._arena):
                    pass  # the pool was closed meanwhile
                elif is_filled and key not in self._found:  # otherwise another writer was faster
                    self._found[key] = index
                else:
                    self._free.append(index)

    def _read_one(self, key: BlockHash, buffer: Buffer) -> int | None:
        with self._lock:
            index = self._find(key)
            if index is None:
                return None
            self._readers[index] = self._readers.get(index, 0) + 1
            frame, size = self._arena[index], self._sizes[index]
        try:
            num_bytes = min(size, len(frame), len(buffer))
            np.copyto(np.frombuffer(buffer, dtype=np.uint8)[:num_bytes], frame[:num_bytes])
            return size
        finally:
            with self._lock:
                self._release(index)

    def _find(self, key: BlockHash) -> int | None:
        """Returns its frame and makes it the most recently used one."""
        index = self._found.get(key)
        if index is not None:
            self._found.move_to_end(key)
        return index

    def _take_frame_for(self, key: BlockHash) -> int | None:
        """Returns a frame to fill. None if the block is there already, or if all frames are in use."""
        if self._find(key) is not None:
            return None
        if self._free:
            return self._free.pop()
        oldest = next((old for old, index in self._found.items() if index not in self._readers), None)
        return None if oldest is None else self._found.pop(oldest)

    def _release(self, index: int) -> None:
        """Counts one reader less."""
        self._readers[index] -= 1
        if not self._readers[index]:
            del self._readers[index]
            if index in self._condemned:
                self._condemned.remove(index)
                self._free.append(index)

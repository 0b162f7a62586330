"""A store in this process's memory: for tests, and for several engines in one process."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from typing import Annotated, ClassVar

from msgspec import Meta

from common.errors import ConfigError
from common.types import BlockHash
from kv_store.base import Buffer, StoreConnectorOptions


class MemoryStoreOptions(StoreConnectorOptions, frozen=True, kw_only=True):
    """Options of the memory connector."""

    store: Annotated[str, Meta(description="Name; the stores of one name in one process share blocks.")] = "default"
    max_bytes: Annotated[
        int, Meta(ge=1, description="Most bytes kept; the least recently used blocks are evicted first.")
    ] = 1 << 28


class MemoryMedium:
    """The medium that the stores of one name share. It lives as long as one of them, or a test, refers to it."""

    _by_name: ClassVar[weakref.WeakValueDictionary[str, MemoryMedium]] = weakref.WeakValueDictionary()
    _by_name_lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.frames: OrderedDict[tuple[str, BlockHash], bytes] = OrderedDict()  # least recently used first
        self.num_bytes = 0

    @classmethod
    def named(cls, name: str) -> MemoryMedium:
        """Returns the medium of that name, a new one if there is none."""
        with cls._by_name_lock:
            medium = cls._by_name.get(name)
            if medium is None:
                medium = cls._by_name[name] = cls()
            return medium

    def get(self, key: tuple[str, BlockHash]) -> bytes | None:
        """Returns the frame of that key and makes it the most recently used one."""
        with self.lock:
            frame = self.frames.get(key)
            if frame is not None:
                self.frames.move_to_end(key)
            return frame

    def put(self, key: tuple[str, BlockHash], frame: bytes, max_bytes: int) -> None:
        """Stores a frame, replacing any other of that key and evicting the least recently used ones."""
        with self.lock:
            self.num_bytes += len(frame) - len(self.frames.pop(key, b""))
            self.frames[key] = frame
            while self.num_bytes > max_bytes:
                _, oldest = self.frames.popitem(last=False)
                self.num_bytes -= len(oldest)

    def remove(self, key: tuple[str, BlockHash]) -> None:
        """Deletes a frame, if it is there."""
        with self.lock:
            self.num_bytes -= len(self.frames.pop(key, b""))


class InMemoryStore:
    """A BlockStore in a MemoryMedium."""

    def __init__(self, options: MemoryStoreOptions) -> None:
        self._options = options
        self._medium = MemoryMedium.named(options.store)
        self._namespace = ""

    def open(self, namespace: str, frame_bytes: int) -> None:
        """See BlockStore."""
        if frame_bytes > self._options.max_bytes:
            message = f"max_bytes: {self._options.max_bytes} bytes cannot hold a block of {frame_bytes}"
            raise ConfigError(message, param="max_bytes")
        self._namespace = namespace

    def touch(self, keys: Sequence[BlockHash]) -> list[bool]:
        """See BlockStore."""
        return [self._medium.get((self._namespace, key)) is not None for key in keys]

    def write(self, keys: Sequence[BlockHash], frames: Sequence[Buffer]) -> None:
        """See BlockStore."""
        for key, frame in zip(keys, frames, strict=True):
            self._medium.put((self._namespace, key), bytes(frame), self._options.max_bytes)

    def read_into(self, keys: Sequence[BlockHash], buffers: Sequence[Buffer]) -> list[int | None]:
        """See BlockStore."""
        return [self._read_one(key, buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def discard(self, key: BlockHash) -> None:
        """See BlockStore."""
        self._medium.remove((self._namespace, key))

    def close(self) -> None:
        """See BlockStore."""

    def _read_one(self, key: BlockHash, buffer: Buffer) -> int | None:
        frame = self._medium.get((self._namespace, key))
        if frame is None:
            return None
        size = min(len(frame), len(buffer))
        buffer[:size] = memoryview(frame)[:size]
        return len(frame)

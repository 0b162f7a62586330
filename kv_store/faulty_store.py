"""A store that wraps another one and fails or stalls on demand, for tests."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from common.types import BlockHash
from kv_store.base import BlockStore, Buffer

Operation = Literal["touch", "write", "read_into"]

_GATE_TIMEOUT_S = 60.0  # so that a test that forgets to open a gate fails instead of hanging


class ThreadGate:
    """Holds the threads that call one operation."""

    def __init__(self) -> None:
        self._arrived = threading.Semaphore(0)
        self._changed = threading.Condition()
        self._num_permits = 0.0

    def wait_for_arrival(self) -> None:
        """Returns once one more thread has arrived at the gate."""
        if not self._arrived.acquire(timeout=_GATE_TIMEOUT_S):
            raise TimeoutError("no thread came to the gate")

    def let_one_through(self) -> None:
        """Lets one thread through, now or when it arrives."""
        self._permit(1)

    def open(self) -> None:
        """Lets all threads through, now and later."""
        self._permit(math.inf)

    def pass_through(self) -> None:
        """Called by the store: wait for permission."""
        self._arrived.release()
        with self._changed:
            if not self._changed.wait_for(lambda: self._num_permits > 0, _GATE_TIMEOUT_S):
                raise TimeoutError("the gate was not opened")
            self._num_permits -= 1

    def _permit(self, num_threads: float) -> None:
        with self._changed:
            self._num_permits += num_threads
            self._changed.notify_all()


class FaultyStore:
    """A BlockStore that forwards every call to `inner` unless a failure or a gate was set."""

    def __init__(self, inner: BlockStore) -> None:
        self._inner = inner
        self._gates: dict[Operation, ThreadGate] = {}
        self._errors: dict[Operation, Exception] = {}

    def fail(self, operation: Operation, error: Exception | None) -> None:
        """Makes the operation raise `error` from now on; None: no longer."""
        if error is None:
            self._errors.pop(operation, None)
        else:
            self._errors[operation] = error

    @contextmanager
    def gate(self, operation: Operation) -> Iterator[ThreadGate]:
        """Inside, calls of the operation wait at the gate; it opens at the end."""
        gate = self._gates[operation] = ThreadGate()
        try:
            yield gate
        finally:
            del self._gates[operation]
            gate.open()

    def open(self, namespace: str, frame_bytes: int) -> None:
        """See BlockStore."""
        self._inner.open(namespace, frame_bytes)

    def touch(self, keys: Sequence[BlockHash]) -> list[bool]:
        """See BlockStore."""
        self._meddle("touch")
        return self._inner.touch(keys)

    def write(self, keys: Sequence[BlockHash], frames: Sequence[Buffer]) -> None:
        """See BlockStore."""
        self._meddle("write")
        self._inner.write(keys, frames)

    def read_into(self, keys: Sequence[BlockHash], buffers: Sequence[Buffer]) -> list[int | None]:
        """See BlockStore."""
        self._meddle("read_into")
        return self._inner.read_into(keys, buffers)

    def discard(self, key: BlockHash) -> None:
        """See BlockStore."""
        self._inner.discard(key)

    def close(self) -> None:
        """See BlockStore."""
        self._inner.close()

    def _meddle(self, operation: Operation) -> None:
        if (gate := self._gates.get(operation)) is not None:
            gate.pass_through()
        if (error := self._errors.get(operation)) is not None:
            raise error

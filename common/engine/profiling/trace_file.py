"""Writes the windows of a profile to one file in Chrome's trace format, on a thread of its own."""

from __future__ import annotations

import gzip
import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol, cast

import msgspec

from common.engine.profiling import TRACE_FILE

logger = logging.getLogger(__name__)

_WINDOW_FILE = "window.json"
_MAX_QUEUED = 2  # windows; the step loop waits then
_FIRST_EVENTS_PER_STEP = 2000.0  # until the first window is written
_QUEUE_TIMEOUT_S = 30.0
_COMPRESSION = 1  # the thread may share the cores with steps, and this takes nine tenths off already


class Recorded(Protocol):
    """A stopped profiler of torch, with what it has recorded."""

    def export_chrome_trace(self, path: str) -> None:
        """Writes it in Chrome's trace format."""


class _Window(msgspec.Struct):
    """The part of one window's trace that is kept: not the name of the host."""

    events: list[msgspec.Raw] = msgspec.field(name="traceEvents")
    base_time_ns: int = msgspec.field(name="baseTimeNanoseconds", default=0)
    devices: msgspec.Raw = msgspec.field(name="deviceProperties", default=msgspec.Raw(b"[]"))


class TraceFile:
    """Takes the windows of one profile. `add` and `finish` are called on the step loop's thread."""

    def __init__(self, directory: Path, on_end: Callable[[str], None]) -> None:
        """`on_end` is called on the thread once it writes no more: with an error, or with nothing."""
        self.num_events = 0  # written so far
        self.events_per_step = _FIRST_EVENTS_PER_STEP
        self._num_steps = 0
        self._directory = directory
        self._on_end = on_end
        self._windows: queue.Queue[tuple[Recorded, int] | None] = queue.Queue(_MAX_QUEUED)
        self._error = ""
        threading.Thread(target=self._run, name="engine-profile", daemon=True).start()

    def add(self, recorded: Recorded, num_steps: int) -> None:
        """Appends a window of so many steps. Raises queue.Full if nothing was written for too long."""
        self._windows.put((recorded, num_steps), timeout=_QUEUE_TIMEOUT_S)

    def finish(self, error: str = "") -> None:
        """Completes the file, or reports the error instead. Raises as `add` does."""
        self._error = error
        self._windows.put(None, timeout=_QUEUE_TIMEOUT_S)

    def _run(self) -> None:
        error = ""
        try:
            with gzip.open(self._directory / TRACE_FILE, "wb", _COMPRESSION) as file:
                self._write(cast("BinaryIO", file))
        except Exception as failure:  # noqa: BLE001  whatever it is, the client must hear of it, and the engine go on
            error = f"the trace cannot be written: {failure}"
            logger.warning("%s", error)
            while self._windows.get() is not None:
                pass
        self._on_end(self._error or error)

    def _write(self, file: BinaryIO) -> None:
        while (added := self._windows.get()) is not None:
            recorded, num_steps = added
            recorded.export_chrome_trace(str(self._directory / _WINDOW_FILE))
            del recorded, added  # which take more memory than all below
            window = self._read()
            if self.num_events == 0:
                head = {"baseTimeNanoseconds": window.base_time_ns, "deviceProperties": window.devices}
                file.write(msgspec.json.encode(head)[:-1] + b',"traceEvents":[')
            else:
                file.write(b",")
            file.write(b",".join(window.events))
            self.num_events += len(window.events)
            self._num_steps += num_steps
            if self._num_steps:
                self.events_per_step = self.num_events / self._num_steps
        if self.num_events:
            file.write(b"]}")

    def _read(self) -> _Window:
        path = self._directory / _WINDOW_FILE
        window = msgspec.json.decode(path.read_bytes(), type=_Window)
        path.unlink()
        return window

"""The log of a cluster in the background: one file of all its processes, bounded by keeping only the part before it.

Lines start with the name of their process in brackets; those of the launcher itself with [launcher].
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

LAUNCHER = "launcher"
MAX_LOG_BYTES = 32 * 1024 * 1024
_POLL_S = 0.2
_CHUNK_BYTES = 64 * 1024


class ClusterLog:
    """Writes the log. A disk that is full loses lines, not the cluster."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_LOG_BYTES) -> None:
        """Raises OSError."""
        self._path = path
        self._max_bytes = max_bytes
        self._takes_stderr = False
        self._descriptor = _open(path)
        self._size = os.fstat(self._descriptor).st_size

    def write(self, line: str) -> None:
        """Appends a line."""
        raw = line.encode("utf-8", "replace") + b"\n"
        if self._size and self._size + len(raw) > self._max_bytes:
            self._rotate()
        with contextlib.suppress(OSError):
            self._size += os.write(self._descriptor, raw)

    def write_own(self, text: str) -> None:
        """Appends lines of the launcher."""
        now = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        for line in filter(str.strip, text.splitlines()):
            self.write(f"[{LAUNCHER}] {now} {line}")

    def take_stderr(self) -> None:
        """From now on file descriptor 2 is the log."""
        self._takes_stderr = True
        os.dup2(self._descriptor, 2)

    def _rotate(self) -> None:
        """Goes on with the old file if there cannot be a new one."""
        with contextlib.suppress(OSError):
            self._path.replace(previous(self._path))
        with contextlib.suppress(OSError):
            old, self._descriptor = self._descriptor, _open(self._path)
            os.close(old)
            if self._takes_stderr:
                self.take_stderr()
        self._size = os.fstat(self._descriptor).st_size


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)


def previous(path: Path) -> Path:
    """Returns the path of the log before `path`."""
    return path.with_name(f"{path.name}.1")


def read_log(
    path: Path, count: int, pod: str | None = None, is_over: Callable[[], bool] | None = None
) -> Iterator[str]:
    """The last `count` lines, of `pod` only if one is given; with `is_over`, also those written from now on, across
    rotations, until it says so and all are read. Raises FileNotFoundError."""
    with contextlib.ExitStack() as files:
        reader = _LineReader(files.enter_context(path.open("rb")))
        lines: deque[str] = deque(maxlen=count)
        with contextlib.suppress(OSError), previous(path).open("rb") as before:
            lines.extend(line for line in _LineReader(before).lines() if _is_of(line, pod))
        lines.extend(line for line in reader.lines() if _is_of(line, pod))
        yield from lines
        while is_over is not None:
            ends = is_over()  # asked before the last read: what was written until then is in it
            rotated = _is_another(path, reader.descriptor)
            yield from (line for line in reader.lines() if _is_of(line, pod))
            if rotated:
                reader = _LineReader(files.enter_context(path.open("rb")))
            elif ends:
                return
            else:
                time.sleep(_POLL_S)


class _LineReader:
    """Complete lines of a file that grows."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._pending = b""
        self.descriptor = file.fileno()

    def lines(self) -> Iterator[str]:
        """Yields the lines since the last call."""
        while chunk := self._file.read(_CHUNK_BYTES):
            *lines, self._pending = (self._pending + chunk).split(b"\n")
            yield from (line.decode("utf-8", "replace") for line in lines)


def _is_another(path: Path, descriptor: int) -> bool:
    try:
        return path.stat().st_ino != os.fstat(descriptor).st_ino
    except FileNotFoundError:  # between the two steps of a rotation
        return False


def _is_of(line: str, pod: str | None) -> bool:
    return pod is None or line.startswith(f"[{pod}]")

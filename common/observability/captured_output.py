"""Puts the text that libraries write to standard output and standard error into the log, as lines.

Libraries in C++ and Rust write there past Python's logging: raw, as often as they like, and with text of clients in it.

1. `captured_output` puts a pipe in place of descriptors 1 and 2 of the process, and so of the processes that it starts.
   The log and Python's `sys.stdout` keep those from before; processes that it starts get the log's descriptor.
2. A thread reads the pipe. Each line becomes a warning: cut, and escaped as all of the log is. Beyond `MAX_LINES` in a
   minute, lines are counted only.
3. At the end the descriptors are what they were, and what is left in the pipe is logged.

So the last words of a process that crashes are logged by its parent. Of a crash of this process, faulthandler writes
to the log past the pipe.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import logging
import os
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

logger = logging.getLogger(__name__)

MAX_LINES = 100
INTERVAL_S = 60.0
MAX_LINE_BYTES = 1000
_CHUNK = 65536
_PIPE_BYTES = 2**20  # a library that holds the GIL and writes more than the pipe takes would wait for ever
_END_TIMEOUT_S = 5.0


class LineLog:
    """Logs the lines of a stream of bytes, at most `MAX_LINES` in `INTERVAL_S`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._unfinished = b""  # line, of which more is not kept than is logged
        self._since = clock()  # start of the interval
        self._num_lines = 0  # since then

    def feed(self, chunk: bytes) -> None:
        """Takes what has been written."""
        *lines, unfinished = (self._unfinished + chunk).split(b"\n")
        for line in lines:
            self._log(line)
        self._unfinished = unfinished[: MAX_LINE_BYTES + 1]

    @property
    def due_in_s(self) -> float | None:
        """Seconds until dropped lines are to be counted by `settle`; None: there are none."""
        return max(0.0, self._since + INTERVAL_S - self._clock()) if self._num_lines > MAX_LINES else None

    def settle(self) -> None:
        """Says how many lines were dropped, and begins another interval."""
        if self._num_lines > MAX_LINES:
            logger.warning("%d more lines in %.0f s", self._num_lines - MAX_LINES, self._clock() - self._since)
        self._since, self._num_lines = self._clock(), 0

    def end(self) -> None:
        """Logs what has no line end, and how many lines were dropped."""
        self._log(self._unfinished)
        self._unfinished = b""
        self.settle()

    def _log(self, raw: bytes) -> None:
        if not raw.strip():
            return
        if self._clock() >= self._since + INTERVAL_S:
            self.settle()
        self._num_lines += 1
        if self._num_lines <= MAX_LINES:
            text = raw[:MAX_LINE_BYTES].decode("utf-8", "backslashreplace").rstrip()
            logger.warning("%s", text if len(raw) <= MAX_LINE_BYTES else f"{text}...")


class _PipeReader:
    """Owns a pipe, and the thread that logs what comes out of it."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        with contextlib.suppress(AttributeError, OSError):  # not Linux, or the user has too many pipes
            fcntl.fcntl(self.write_end, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        self._is_ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="captured-output", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Returns when what has been written is logged. The process must have no other descriptor of the pipe."""
        self._is_ending.set()
        os.write(self.write_end, b"\n")  # wakes the thread: other processes may keep the pipe open
        self._thread.join(_END_TIMEOUT_S)
        os.close(self.write_end)

    def _run(self) -> None:
        lines = LineLog()
        poll = select.poll()
        poll.register(self._read_end, select.POLLIN)
        is_ending, chunk = False, b""
        while not is_ending or len(chunk) == _CHUNK:
            due_in_s = lines.due_in_s
            if poll.poll(None if due_in_s is None else 1000 * due_in_s):
                is_ending = self._is_ending.is_set()
                chunk = os.read(self._read_end, _CHUNK)
                lines.feed(chunk)
            else:
                lines.settle()
        lines.end()
        os.close(self._read_end)


@contextlib.contextmanager
def captured_output() -> Iterator[TextIO]:
    """Captures what is written to descriptors 1 and 2. Yields the log's stream, which stays open."""
    log = log_stream(os.dup(2))
    reader = _PipeReader()
    with open(os.dup(1), "w", encoding="utf-8", errors="backslashreplace") as own_stdout:
        sys.stdout.flush()
        for descriptor in (1, 2):
            os.dup2(reader.write_end, descriptor)
        try:
            with contextlib.redirect_stdout(own_stdout):
                yield log
        finally:
            sys.stderr.flush()
            os.dup2(own_stdout.fileno(), 1)
            os.dup2(log.fileno(), 2)
            reader.end()


def log_stream(descriptor: int) -> TextIO:
    """A stream for the log on `descriptor`, where stack traces of a crash go, too."""
    stream = open(descriptor, "w", encoding="utf-8", errors="backslashreplace", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(stream)
    return stream

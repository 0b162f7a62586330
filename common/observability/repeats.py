"""Rate limits for log lines that peers can trigger: the first is written at once, then at most one per interval, with
the last message and the number of lines that it stands for.

    HTTP: malformed request from 10.0.0.7: Invalid method encountered (the last of 1,532 in 60 s)

`RepeatedLine` is for our own lines, one object for each kind. `RepeatFilter` is for those of a library's logger.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable

INTERVAL_S = 60.0

Later = Callable[[float, Callable[[], None]], object]
"""Calls a function after a delay in seconds, or never."""


def call_later(delay_s: float, call: Callable[[], None]) -> None:
    """Schedules the call on this thread's event loop; without one, it is never called."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return
    loop.call_later(delay_s, call)


class RepeatedLine:
    """One kind of line. May be used from any thread.

    Lines within an interval are summed up when it ends or, if no event loop runs, with the next line.
    """

    def __init__(
        self,
        logger: logging.Logger,
        level: int,
        *,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
        later: Later = call_later,
    ) -> None:
        self._logger = logger
        self._level = level
        self._interval_s = interval_s
        self._clock = clock
        self._later = later
        self._lock = threading.Lock()
        self._since: float | None = None  # start of the interval; None: there is none
        self._num_held = 0  # suppressed lines since then
        self._last: tuple[str, tuple[object, ...]] = ("", ())

    def log(self, message: str, *args: object) -> None:
        """Writes a line, or counts it."""
        with self._lock:
            now = self._clock()
            if self._since is None:
                self._begin(now)
                self._logger.log(self._level, message, *args)
                return
            self._num_held += 1
            self._last = message, args
            if now >= self._since + self._interval_s:
                self._end(self._since)

    def _begin(self, now: float) -> None:
        self._since = now
        self._later(self._interval_s, lambda: self._on_due(now))

    def _on_due(self, since: float) -> None:
        with self._lock:
            if self._since == since:  # else it has ended already
                self._end(since)

    def _end(self, since: float) -> None:
        now = self._clock()
        message, args = self._last
        num_held, seconds = self._num_held, now - since
        self._since, self._num_held, self._last = None, 0, ("", ())
        if num_held == 0:
            return
        if num_held > 1:
            message, args = f"{message} (the last of %s in %.0f s)", (*args, f"{num_held:,}", seconds)
        self._logger.log(self._level, message, *args)
        self._begin(now)


class RepeatFilter(logging.Filter):
    """Limits the rate of a logger's lines that begin with `start`; keeps their exceptions but not the tracebacks."""

    def __init__(
        self,
        logger: logging.Logger,
        start: str,
        *,
        level: int = logging.ERROR,
        clock: Callable[[], float] = time.monotonic,
        later: Later = call_later,
    ) -> None:
        super().__init__()
        self._start = start
        # Through a child logger, whose lines this filter does not see.
        self._line = RepeatedLine(logger.getChild("repeated"), level, clock=clock, later=later)

    def filter(self, record: logging.LogRecord) -> bool:
        """False for a line that is summed up."""
        if not record.getMessage().startswith(self._start):
            return True
        error = record.exc_info[1] if record.exc_info else None
        if error is None:
            self._line.log("%s", self._start)
        else:
            self._line.log("%s: %s", self._start, error)
        return False

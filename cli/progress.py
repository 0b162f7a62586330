"""A progress bar on stderr, at a terminal only."""

from __future__ import annotations

import sys
import time
from types import TracebackType

_WIDTH = 30
_INTERVAL_S = 0.1  # between drawings


class ProgressBar:
    """A line that is drawn again as work is done."""

    def __init__(self, total: int, *, done: int = 0, title: str = "") -> None:
        self._total = total
        self._done = done
        self._before = done  # what an earlier run has done
        self._failed = 0
        self._title = f"{title} " if title else ""
        self._is_shown = sys.stderr.isatty()
        self._started_s = time.monotonic()
        self._drawn_s = 0.0

    def __enter__(self) -> ProgressBar:
        self._draw()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_shown:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()

    def advance(self, *, has_failed: bool = False) -> None:
        """Counts one more."""
        self._done += 1
        self._failed += has_failed
        if time.monotonic() - self._drawn_s >= _INTERVAL_S:
            self._draw()

    def _draw(self) -> None:
        if not self._is_shown:
            return
        self._drawn_s = time.monotonic()
        sys.stderr.write(f"\r\033[K{self.line(self._drawn_s - self._started_s)}")
        sys.stderr.flush()

    def line(self, elapsed_s: float) -> str:
        """Returns what is drawn so many seconds after the beginning."""
        full = _WIDTH * self._done // max(self._total, 1)
        made = self._done - self._before
        left = f", {(self._total - self._done) * elapsed_s / made:,.0f} s left" if made else ""
        failed = f", {self._failed} failed" if self._failed else ""
        bar = "#" * full + "-" * (_WIDTH - full)
        return f"{self._title}[{bar}] {self._done}/{self._total}, {elapsed_s:,.0f} s{left}{failed}"

"""Rejects operations on a medium that fails: a circuit breaker (`common.breaker`) with log lines and its own probes.

1. Closed: operations pass `check`. When one fails because the medium does, the store calls `open`, which logs it.
2. Open: `check` raises at once, with the reason. A thread waits until a probe is due.
3. Half open: the thread probes the medium; `check` still raises. A failed probe doubles the wait, up to `max_s`. After
   one that succeeds the guard is closed, which is logged, and the thread ends.

A store whose medium can reject writes and still be read has two guards.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from common.breaker import Breaker
from common.errors import StoreError, StoreUnavailableError

logger = logging.getLogger(__name__)


class Backoff(NamedTuple):
    """Seconds until the first probe, and at most between two."""

    base_s: float = 1.0
    max_s: float = 30.0


DEFAULT_BACKOFF = Backoff()


class Wording(NamedTuple):
    """The terms of a guard's log lines about its medium."""

    opened: str
    consequence: str
    closed: str


UNAVAILABLE = Wording("is unavailable", "requests proceed without it", "is available again")
READ_ONLY = Wording("rejects writes", "its blocks can still be read", "accepts writes again")


class Guard:
    """The breaker of one medium, or of writing to it. Thread-safe."""

    def __init__(self, medium: str, wording: Wording, probe: Callable[[], None], backoff: Backoff) -> None:
        """`probe` is called on a thread of the guard's and raises StoreError while the medium fails."""
        self._medium = medium
        self._wording = wording
        self._probe = probe
        self._stopping = threading.Event()
        self._lock = threading.Lock()  # guards changes of all below
        self._breaker = Breaker(time.monotonic, base_s=backoff.base_s, max_s=backoff.max_s)
        self._reason = ""

    @property
    def is_closed(self) -> bool:
        """Whether operations may be tried."""
        return self._breaker.is_closed

    def check(self) -> None:
        """Raises StoreUnavailableError while the guard is open."""
        if not self.is_closed:
            raise StoreUnavailableError(f"{self._medium} {self._wording.opened}: {self._reason}")

    def open(self, reason: str) -> None:
        """Rejects operations until a probe succeeds. Does nothing if the guard is open already, or stopped."""
        with self._lock:
            if self._stopping.is_set() or not self._breaker.failed():
                return
            self._reason = reason
            self._breaker.trip()
            # A daemon, because the probe of a dead network mount may never return.
            threading.Thread(target=self._probe_until_closed, name="kv-store-probe", daemon=True).start()
        logger.warning("%s %s, %s: %s", self._medium, self._wording.opened, self._wording.consequence, reason)

    def stop(self) -> None:
        """Ends the probes, as the medium is being closed. Does not wait for one that is running. Idempotent."""
        self._stopping.set()

    def _probe_until_closed(self) -> None:
        while not self._stopping.wait(self._breaker.remaining_s):
            try:
                self._probe()
            except StoreError as error:
                problem = error.message
            except Exception:  # a bug must not leave the medium unused for ever
                if not self._stopping.is_set():
                    logger.exception("internal error in the probe of %s", self._medium)
                problem = "internal error in the probe"
            else:
                self._close()
                return
            self._stay_open(problem)

    def _stay_open(self, reason: str) -> None:
        with self._lock:
            self._breaker.trip()
            is_new, self._reason = reason != self._reason, reason
        if is_new and not self._stopping.is_set():
            logger.warning("%s %s, now for another reason: %s", self._medium, self._wording.opened, reason)

    def _close(self) -> None:
        with self._lock:
            self._breaker.close()
        logger.warning("%s %s", self._medium, self._wording.closed)

"""Asks again and again, and less often while nothing answers."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable

from common.errors import BatonError, PermissionDeniedError, UnauthenticatedError

MAX_PAUSE_S = 30.0
_FIRST_PAUSE_S = 1.0  # after the first failure
_NEEDS_ANOTHER_KEY = (UnauthenticatedError, PermissionDeniedError)


class Poller:
    """Calls `refresh` one at a time, with a pause before each call.

    1. While calls succeed, the pause is `interval_s`.
    2. A BatonError is a failure: `problem` says what it is, and each failure in a row doubles the pause.
    3. If the router refuses the API key, `run` ends, as a repetition would not help.
    """

    def __init__(
        self,
        refresh: Callable[[], Awaitable[None]],
        interval_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.problem = ""  # of the last call; empty: it has succeeded
        self._refresh = refresh
        self._interval_s = interval_s
        self._clock = clock
        self._wake = asyncio.Event()
        self._num_failures = 0
        self._failing_since = 0.0
        self._next_at = 0.0
        self._asked_at: float | None = None  # None: no call is under way

    @property
    def failing_s(self) -> float:
        """Seconds since calls began to fail."""
        return self._clock() - self._failing_since if self.problem else 0.0

    @property
    def waiting_s(self) -> float:
        """Seconds since the call under way began; 0: there is none."""
        return self._clock() - self._asked_at if self._asked_at is not None else 0.0

    @property
    def next_in_s(self) -> float:
        """Seconds until the next call."""
        return max(0.0, self._next_at - self._clock())

    @property
    def pause_s(self) -> float:
        """Seconds before the next call."""
        if not self._num_failures:
            return self._interval_s
        first_s = max(_FIRST_PAUSE_S, self._interval_s)
        return max(self._interval_s, min(MAX_PAUSE_S, first_s * 2.0 ** min(self._num_failures - 1, 16)))

    def now(self) -> None:
        """Ends the present pause, or leaves out the next one if there is none."""
        self._wake.set()

    async def run(self) -> None:
        """Polls until it is cancelled. Raises UnauthenticatedError or PermissionDeniedError."""
        while True:
            await self._pause()
            await self._call()

    async def _pause(self) -> None:
        self._next_at = self._clock() + self.pause_s
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.pause_s):
                await self._wake.wait()
        self._wake.clear()

    async def _call(self) -> None:
        self._asked_at = self._clock()
        try:
            await self._refresh()
        except _NEEDS_ANOTHER_KEY:
            raise
        except BatonError as error:
            if not self._num_failures:
                self._failing_since = self._clock()
            self._num_failures += 1
            self.problem = error.message
        else:
            self._num_failures, self.problem = 0, ""
        finally:
            self._asked_at = None

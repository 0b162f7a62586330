"""Notices that the engine of a busy pod has stopped, long before a canary or a deadline would.

While an engine has requests in its batch, it makes step after step and reports each. If the next report is overdue by
several of the longest steps that the pod's load explains, the pod is ejected and its connection closed, so that its
streams go on elsewhere. A slow pod reports late too, but its steps are known to be long. An engine without a batch may
wait for anything: what it comes to is seen by canaries.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import NoReturn, Protocol

from common.errors import UnavailableError
from router.pods.health import PodHealth

_NUM_STEPS = 5.0  # longest steps without a report
_RECHECK_S = 1.0  # seconds until a stalled pod that must not be ejected is judged again


class Engine(Protocol):
    """The pod's engine, as far as it is known."""

    @property
    def is_stepping(self) -> bool:
        """By its last report it has requests in its batch."""

    @property
    def longest_step_s(self) -> float | None:
        """Seconds of the longest of the steps that its load explains; None: not enough steps were seen to tell."""


class StallWatch:
    """Watches the steps of one pod over one connection."""

    def __init__(self, engine: Engine, health: PodHealth) -> None:
        self._engine = engine
        self._health = health
        self._has_reported = asyncio.Event()
        self._connected_at = health.now()

    def reported(self) -> None:
        """The pod has reported figures."""
        self._has_reported.set()

    async def run(self) -> NoReturn:
        """Raises UnavailableError when the pod has stalled and was ejected."""
        self._connected_at = self._health.now()
        while True:
            self._has_reported.clear()
            overdue_in_s = self._overdue_in_s
            if overdue_in_s is None:
                await self._has_reported.wait()
            elif overdue_in_s > 0:
                await asyncio.sleep(overdue_in_s)  # reports meanwhile put it off; nothing need wake up for each of them
            else:
                if self._health.note_stall(f"its engine has requests and made no step for {self._silent_s:.1f} s"):
                    raise UnavailableError(f"it is ejected: {self._health.detail}")
                with suppress(TimeoutError):
                    async with asyncio.timeout(_RECHECK_S):
                        await self._has_reported.wait()

    @property
    def _overdue_in_s(self) -> float | None:
        """Seconds; None: no report is due."""
        timeout_s = self._health.config.stall_timeout_s
        longest_step_s = self._engine.longest_step_s
        if not timeout_s or longest_step_s is None or self._health.is_ejected or not self._engine.is_stepping:
            return None
        return max(timeout_s, _NUM_STEPS * longest_step_s) - self._silent_s

    @property
    def _silent_s(self) -> float:
        """Seconds without a report over this connection."""
        return min(self._health.silent_s, self._health.now() - self._connected_at)

"""The engine's latest statistics, and a way to wait for newer ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from common.engine.messages import EngineStats, PhaseSeconds


class StatsBoard:
    """Written by one task after each step, read by any number of watchers. A slow watcher skips some."""

    def __init__(self, initial: EngineStats) -> None:
        self.latest = initial  # replaced by steps only: that it changes shows that the engine makes some
        self.phases = PhaseSeconds()  # told by an idle engine as well
        self._watchers: set[asyncio.Event] = set()

    def publish(self, stats: EngineStats) -> None:
        """Replaces the statistics."""
        self.latest = stats
        self.touch()

    def publish_phases(self, phases: PhaseSeconds) -> None:
        """Replaces the seconds of the step loop's phases."""
        self.phases = phases
        self.touch()

    def touch(self) -> None:
        """Wakes watchers although the statistics have not changed."""
        for news in self._watchers:
            news.set()

    async def watch(self, min_interval_s: float) -> AsyncGenerator[EngineStats, None]:
        """Yields the current statistics, then each change, at most once per interval. Endless."""
        news = asyncio.Event()
        self._watchers.add(news)
        try:
            while True:
                news.clear()
                yield self.latest
                await asyncio.sleep(min_interval_s)
                await news.wait()
        finally:
            self._watchers.discard(news)

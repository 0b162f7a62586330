"""The engine's latest statistics, and a way to wait for newer ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from common.engine.messages import EngineStats, PhaseSeconds, join_stats


class StatsBoard:
    """Written by one task after each step, read by any number of watchers. A slow watcher skips some."""

    def __init__(self, *initial: EngineStats) -> None:
        """`initial`: of each engine."""
        # Replaced by steps only: that one changes shows that its engine makes some.
        self.by_engine = list(initial)
        self.phases = [PhaseSeconds()] * len(initial)  # of each engine; told by an idle one as well
        self._watchers: set[asyncio.Event] = set()

    @property
    def latest(self) -> EngineStats:
        """Those of all engines together."""
        return join_stats(self.by_engine)

    def publish(self, stats: EngineStats, data_parallel_rank: int = 0) -> None:
        """Replaces the statistics of an engine."""
        self.by_engine[data_parallel_rank] = stats
        self.touch()

    def publish_phases(self, phases: PhaseSeconds, data_parallel_rank: int = 0) -> None:
        """Replaces the seconds of an engine's step loop, by phase."""
        self.phases[data_parallel_rank] = phases
        self.touch()

    def touch(self) -> None:
        """Wakes watchers although the statistics have not changed."""
        for news in self._watchers:
            news.set()

    async def watch(self, min_interval_s: float) -> AsyncGenerator[list[EngineStats], None]:
        """Yields the current statistics of each engine, then at each change, at most once per interval. Endless."""
        news = asyncio.Event()
        self._watchers.add(news)
        try:
            while True:
                news.clear()
                yield self.by_engine
                await asyncio.sleep(min_interval_s)
                await news.wait()
        finally:
            self._watchers.discard(news)

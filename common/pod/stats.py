"""The engine's latest statistics, and a way to wait for newer ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

from common.engine.messages import EngineStats, PhaseSeconds, join_stats
from common.pod.draft_drift import Change, DraftDrift

logger = logging.getLogger(__name__)


class StatsBoard:
    """Written by one task after each step, read by any number of watchers. A slow watcher skips some."""

    def __init__(self, *initial: EngineStats) -> None:
        """`initial`: of each engine."""
        # Replaced by steps only: that one changes shows that its engine makes some.
        self.by_engine = list(initial)
        self.phases = [PhaseSeconds()] * len(initial)  # of each engine; told by an idle one as well
        self.drifts = [DraftDrift() for _ in initial]  # of each engine's drafts
        self._watchers: set[asyncio.Event] = set()

    @property
    def latest(self) -> EngineStats:
        """The stats of all engines together."""
        return join_stats(self.by_engine)

    def publish(self, stats: EngineStats, data_parallel_rank: int = 0) -> None:
        """Replaces the statistics of an engine."""
        self.by_engine[data_parallel_rank] = stats
        if stats.drafts.num_verified and (change := self.drifts[data_parallel_rank].observe(stats.drafts)):
            self._log(change, data_parallel_rank)
        self.touch()

    def _log(self, change: Change, data_parallel_rank: int) -> None:
        logger.log(
            logging.WARNING if change.is_fall else logging.INFO,
            "speculative: %s: %.0f%% of the last %d drafts were right, %.0f%% in the hour before%s",
            "fewer drafts are right" if change.is_fall else "as many drafts are right again",
            100 * change.recent.share,
            change.recent.num_verified,
            100 * change.before.share,
            f" (engine {data_parallel_rank})" if len(self.by_engine) > 1 else "",
        )

    def publish_phases(self, phases: PhaseSeconds, data_parallel_rank: int = 0) -> None:
        """Replaces the seconds of an engine's step loop, by phase."""
        self.phases[data_parallel_rank] = phases
        self.touch()

    def touch(self) -> None:
        """Wakes watchers although the statistics have not changed."""
        for changed in self._watchers:
            changed.set()

    async def watch(self, min_interval_s: float) -> AsyncGenerator[list[EngineStats], None]:
        """Yields the current statistics of each engine, then at each change, at most once per interval. Endless."""
        changed = asyncio.Event()
        self._watchers.add(changed)
        try:
            while True:
                changed.clear()
                yield self.by_engine
                await asyncio.sleep(min_interval_s)
                await changed.wait()
        finally:
            self._watchers.discard(changed)

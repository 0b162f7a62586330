"""The line of those who lost their decode pod: when one with 500 streams dies, the others must not be flooded."""

from __future__ import annotations

import asyncio

from router.metrics import SurvivalMetrics

# Requests that are being computed again at once after losing their decode pod. Enough to fill a pod's steps with their
# prompts, few enough that the running streams of the pods that take them over hardly notice.
MAX_CONCURRENT_MIGRATIONS = 32


class MigrationLine:
    """First come, first served. A place in it costs nothing but the request itself, of which there are `max_inflight`
    at most; one that waits may be cancelled."""

    def __init__(self, metrics: SurvivalMetrics, *, limit: int = MAX_CONCURRENT_MIGRATIONS) -> None:
        """`limit`: most under way at once."""
        self._free = asyncio.Semaphore(limit)  # serves in order
        self._metrics = metrics

    async def enter(self) -> MigrationSlot:
        """Wait for a turn. The slot is to be released when the request goes on, or has ended."""
        self._metrics.migrations_waiting.inc()
        try:
            await self._free.acquire()
        finally:
            self._metrics.migrations_waiting.dec()
        self._metrics.migrations_running.inc()
        return MigrationSlot(self)

    def leave(self) -> None:
        """Called by the slot."""
        self._metrics.migrations_running.dec()
        self._free.release()


class MigrationSlot:
    """The right to be computed again now."""

    def __init__(self, line: MigrationLine) -> None:
        self._line: MigrationLine | None = line

    def release(self) -> None:
        """Let the next one in. Idempotent."""
        line, self._line = self._line, None
        if line is not None:
            line.leave()

"""Blocks to which a lost prefill pod may still write.

A direct connector's producer writes into blocks of this pod's KV cache. If the stream to it
breaks, it cannot confirm that it has stopped, so that only time can: a pod that is alive notices the broken stream and
ends its writes within its connector's transfer timeout. Until then the engine keeps the blocks, even those of a request
that has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Quarantine:
    """Owns the timers. Blocks cannot be freed early, so the bound can only keep out new ones: see `is_full`."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._timers: set[asyncio.TimerHandle] = set()
        self._is_closed = False
        self.num_blocks = 0

    @property
    def is_full(self) -> bool:
        """True: prefill pods should get no more blocks for now."""
        return self.num_blocks >= self._max_blocks

    def hold(self, request_id: str, num_blocks: int, duration_s: float, on_end: Callable[[], None]) -> None:
        """Calls `on_end` after so many seconds, when these blocks can no longer be written to."""
        if self._is_closed:
            return

        def end() -> None:
            self._timers.discard(timer)
            self.num_blocks -= num_blocks
            on_end()

        logger.warning(
            "request %s: %d KV blocks are in quarantine for %g s: a lost prefill pod may still write to them",
            request_id,
            num_blocks,
            duration_s,
        )
        self.num_blocks += num_blocks
        timer = asyncio.get_running_loop().call_later(duration_s, end)
        self._timers.add(timer)

    def close(self) -> None:
        """Cancels all timers: the KV cache ends with the pod. Idempotent."""
        self._is_closed = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self.num_blocks = 0

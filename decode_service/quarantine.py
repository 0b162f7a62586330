"""Blocks that a lost prefill pod may still write to.

A direct connector's producer writes into blocks of this pod's KV cache. If it cannot be asked any more whether it has
stopped, time has to tell: a living one ends its writes within its connector's transfer timeout, once it has seen the
break of the handoff stream. Until then the engine keeps the blocks, also those of a request that has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class Quarantine:
    """Owns the timers. Blocks cannot be freed early, so a bound can only keep new ones from coming: see `is_full`."""

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._timers: set[asyncio.TimerHandle] = set()
        self._is_closed = False
        self.num_blocks = 0

    @property
    def is_full(self) -> bool:
        """True: no more blocks should be lent to prefill pods for now."""
        return self.num_blocks >= self._max_blocks

    def hold(self, num_blocks: int, duration_s: float, on_end: Callable[[], None]) -> None:
        """Call `on_end` after so many seconds, when these blocks can no longer be written to."""
        if self._is_closed:
            return

        def end() -> None:
            self._timers.discard(timer)
            self.num_blocks -= num_blocks
            on_end()

        logger.warning("%d KV blocks are in quarantine for %g s", num_blocks, duration_s)
        self.num_blocks += num_blocks
        timer = asyncio.get_running_loop().call_later(duration_s, end)
        self._timers.add(timer)

    def close(self) -> None:
        """The KV cache goes away with the pod: nothing is held any more. Idempotent."""
        self._is_closed = True
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()
        self.num_blocks = 0

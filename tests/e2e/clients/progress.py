"""How far a run has come, counted in what its clients have received: a slow machine sees the same run as a fast one."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Coroutine
from typing import Any


class Progress:
    """Counts the events of all answers of a run."""

    def __init__(self) -> None:
        self._num_events = 0
        self._waiters: list[tuple[int, int, asyncio.Future[None]]] = []  # a heap
        self._numbers = itertools.count()

    def advance(self) -> None:
        """One more has come."""
        self._num_events += 1
        while self._waiters and self._waiters[0][0] <= self._num_events:
            _, _, waiter = heapq.heappop(self._waiters)
            if not waiter.done():
                waiter.set_result(None)

    async def until(self, num_events: int) -> None:
        """Returns when so many have come."""
        if self._num_events < num_events:
            await self._waiter(num_events)

    def _waiter(self, num_events: int) -> asyncio.Future[None]:
        waiter = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiters, (num_events, next(self._numbers), waiter))
        return waiter

    async def run_for(self, work: Coroutine[Any, Any, None], num_events: int | None) -> bool:
        """Runs `work` until so many more events have come, then cancels it; None: to its end. True if it ended."""
        if num_events is None:
            await work
            return True
        task = asyncio.create_task(work)
        waiter = self._waiter(self._num_events + num_events)
        try:
            await asyncio.wait([task, waiter], return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                await task
                return True
            return False
        finally:
            waiter.cancel()
            task.cancel()
            await asyncio.wait([task])

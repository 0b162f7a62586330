"""Threads for work that would hold up the event loop, which requests share fairly.

Work that waits for a thread is done in the order in which admission serves requests, so one tenant's long prompts do
not hold up another's. That of a request whose client has left is dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from router.fairness.queue import FairQueue, Ticket

_Result = TypeVar("_Result")


class FairThreads:
    """Runs work on a few threads. Used on one event loop; close it."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._num_free = num_threads
        self._queue = FairQueue()
        self._turns: dict[Ticket, asyncio.Future[None]] = {}  # of those in the queue

    def close(self) -> None:
        """Ends the threads. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, ticket: Ticket, work: Callable[[], _Result]) -> _Result:
        """Returns what `work` returns, or raises what it raises. `ticket` says whose it is and what it costs, in any
        unit that is the same for all."""
        await self._wait_for_turn(ticket)
        loop = asyncio.get_running_loop()

        def release(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._release)

        try:
            future = self._threads.submit(work)
        except RuntimeError:  # the executor was closed
            self._release()
            raise
        future.add_done_callback(release)  # of the thread, which goes on if the caller is cancelled
        return await asyncio.wrap_future(future)

    async def _wait_for_turn(self, ticket: Ticket) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
        self._queue.push(ticket)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # its turn had come
                self._release()
            elif self._turns.pop(ticket, None) is not None:
                self._queue.remove(ticket)
            raise

    def _release(self) -> None:
        """A thread is free."""
        while self._queue.head() is not None:
            turn = self._turns.pop(self._queue.serve_head())
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1

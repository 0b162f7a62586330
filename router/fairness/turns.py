"""Turns of what computes for long on the event loop.

`asyncio.sleep(0)` alone lets others go on, but all tasks that were waiting go on together: eight bodies of 8 MB would
hold up every stream for eight times as long as one. Here one goes on in each round of the loop, and tenants have fair
shares of the rounds, so one tenant's large bodies do not hold up another's requests. What is small takes no turn.
"""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from router.fairness.queue import FairQueue, Ticket
from router.fairness.tenant import Tenant

_SMALL_BYTES = 2**16  # of a message; to read it several times takes less than half a millisecond


async def others_turn(tenant: Tenant) -> None:
    """Returns in a later round of the running loop, in which no other caller of this goes on; in fair shares of
    tenants, and of one tenant first come, first served."""
    loop = asyncio.get_running_loop()
    turns = _by_loop.get(loop)
    if turns is None:
        turns = _by_loop[loop] = _Turns(loop)
    await turns.wait(tenant)


async def others_turn_if_large(tenant: Tenant, num_bytes: int) -> None:
    """Gives others their turn before a message of so many bytes is read as a whole, unless it is small."""
    if num_bytes > _SMALL_BYTES:
        await others_turn(tenant)


class _Turns:
    """The turns on one loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._queue = FairQueue()
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}  # those in the queue
        self._is_due = False  # `_go_on` will be called

    def wait(self, tenant: Tenant) -> asyncio.Future[None]:
        """Done at the caller's turn."""
        ticket = Ticket(tenant, priority=0, cost=1.0)
        future = self._waiting[ticket] = self._loop.create_future()
        self._queue.push(ticket)
        if not self._is_due:
            self._call_soon()
        return future

    def _call_soon(self) -> None:
        self._is_due = True
        self._loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        """Lets the first go on, in the next round, and after it the others."""
        self._is_due = False
        while self._waiting:
            future = self._waiting.pop(self._queue.serve_head())
            if not future.done():  # else its task was cancelled
                future.set_result(None)
                self._call_soon()
                return


_by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, _Turns] = WeakKeyDictionary()

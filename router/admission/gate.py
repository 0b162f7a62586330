"""The queue at work: requests wait here until there is room for them.

All state changes on the event loop. What may have made room calls `wake`. Tickets are then dispatched, a few at a
time; each decision sees the claims of the one before.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import NamedTuple, Protocol

from common.errors import BatonError, DeadlineExceededError, UnavailableError
from router.admission.admission import Admission, Outlook
from router.admission.room import Room
from router.fairness.queue import Ticket
from router.metrics import QueueMetrics

logger = logging.getLogger(__name__)

_AT_ONCE = 8  # tickets dispatched without letting others have the event loop


class Pods(Protocol):
    """The gate's view of the pods. Called on the event loop, once per dispatch; must not block."""

    def room(self) -> Room:
        """Returns the room that they have now."""

    @property
    def unavailable_reason(self) -> str:
        """Why no request can be dispatched now; empty: one can."""


class _Waiter(NamedTuple):
    dispatch: Callable[[], None]
    dispatched: asyncio.Future[None]


class Gate:
    """Lets requests through in the order of its Admission."""

    def __init__(self, admission: Admission, pods: Pods, metrics: QueueMetrics, *, pod_wait_s: float) -> None:
        """`pod_wait_s`: seconds that requests wait for a pod when none is left."""
        self._admission = admission
        self._pods = pods
        self._metrics = metrics
        self._pod_wait_s = pod_wait_s
        self._waiters: dict[Ticket, _Waiter] = {}
        self._active: set[Ticket] = set()  # tickets that were dispatched
        self._awake = False
        self._stranded: asyncio.TimerHandle | None = None  # runs while requests wait and no pod is ready

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their turn."""
        return sum(ticket.num_requests for ticket in self._waiters)

    @property
    def backlog_s(self) -> float:
        """Returns the seconds until all that waits is dispatched; 0 as long as that is not known."""
        return self._admission.backlog_s(time.monotonic()) if self._waiters else 0.0

    def passes(self, ticket: Ticket) -> bool:
        """Whether it need not wait if it comes now."""
        return self._admission.passes(ticket, self._pods.room())

    @asynccontextmanager
    async def admitted(
        self, ticket: Ticket, outlook: Outlook | None, dispatch: Callable[[], None]
    ) -> AsyncIterator[float]:
        """Have `dispatch` called when it is the ticket's turn, now or later; gives the seconds that it waited.

        `outlook`: None if the request names no limits, and has just been found to pass. Raises OverloadedError or
        UnattainableError at once, DeadlineExceededError when the deadline passes in the queue, UnavailableError if no
        pod is left, and what `dispatch` raises.
        """
        came = time.monotonic()
        passes = outlook is None
        if outlook is not None:
            room = self._pods.room()
            self._refuse_or_not(ticket, outlook, room, came)
            passes = self._admission.passes(ticket, room)
        waited_s = 0.0
        try:
            if passes:
                self._admission.start(ticket)
                self._active.add(ticket)
                dispatch()
            else:
                await self._wait(ticket, dispatch, came)
                waited_s = time.monotonic() - came
            self._metrics.queue_wait.labels(_priority_label(ticket.priority)).observe(waited_s)
            yield waited_s
        finally:
            self._leave(ticket)

    def wake(self) -> None:
        """There may be room now. Cheap, and may be called at any time on the event loop."""
        if self._waiters and not self._awake:
            self._awake = True
            asyncio.get_running_loop().call_soon(self._pump)

    def withdraw(self, ticket: Ticket) -> None:
        """The ticket's requests have all ended: it goes through at once, with nothing to dispatch."""
        if (waiter := self._take_out(ticket)) is not None and not waiter.dispatched.done():
            waiter.dispatched.set_result(None)

    def fail_all(self, error: BatonError) -> None:
        """End all that waits: the router stops, or no pod is left."""
        for ticket in list(self._waiters):
            waiter = self._take_out(ticket)
            if waiter is not None and not waiter.dispatched.done():
                waiter.dispatched.set_exception(error)
        self._watch_for_pods()

    def _refuse_or_not(self, ticket: Ticket, outlook: Outlook, room: Room, now: float) -> None:
        refusal = self._admission.refusal(ticket, outlook, room, now)
        if refusal is not None:
            self._metrics.refused.labels(refusal.reason).inc()
            raise refusal.error

    async def _wait(self, ticket: Ticket, dispatch: Callable[[], None], now: float) -> None:
        self._admission.wait(ticket, now)
        waiter = self._waiters[ticket] = _Waiter(dispatch, asyncio.get_running_loop().create_future())
        self._count(ticket, ticket.num_requests)
        self.wake()
        try:
            async with asyncio.timeout(ticket.deadline - now):
                await waiter.dispatched
        except TimeoutError as error:
            timeout_s = ticket.deadline - ticket.arrived_at
            raise DeadlineExceededError(f"the request was not finished within {timeout_s:g} s") from error

    def _pump(self) -> None:
        self._awake = False
        for _ in range(_AT_ONCE):
            ticket = self._admission.next(self._pods.room(), time.monotonic())
            if ticket is None:
                break
            waiter = self._waiters.pop(ticket)
            self._active.add(ticket)
            self._count(ticket, -ticket.num_requests)
            if not waiter.dispatched.done():  # else its client has just gone
                self._dispatch(waiter)
        else:
            self.wake()
        self._watch_for_pods()

    def _dispatch(self, waiter: _Waiter) -> None:
        try:
            waiter.dispatch()
        except BatonError as error:
            waiter.dispatched.set_exception(error)
        except Exception as error:
            logger.exception("a request could not be dispatched: internal error")
            waiter.dispatched.set_exception(error)
        else:
            waiter.dispatched.set_result(None)

    def _leave(self, ticket: Ticket) -> None:
        if ticket in self._active:
            self._active.remove(ticket)
            self._admission.ended(ticket.num_requests)
            self.wake()
        else:
            self._take_out(ticket)

    def _take_out(self, ticket: Ticket) -> _Waiter | None:
        """None: it does not wait."""
        waiter = self._waiters.pop(ticket, None)
        if waiter is not None:
            self._admission.leave(ticket, time.monotonic())
            self._count(ticket, -ticket.num_requests)
            self.wake()  # a smaller request behind it may fit
        return waiter

    def _count(self, ticket: Ticket, difference: int) -> None:
        self._metrics.queued.labels(_priority_label(ticket.priority)).inc(difference)

    def _watch_for_pods(self) -> None:
        stranded = bool(self._waiters) and bool(self._pods.unavailable_reason)
        if stranded and self._stranded is None:
            self._stranded = asyncio.get_running_loop().call_later(self._pod_wait_s, self._on_no_pods)
        elif not stranded and self._stranded is not None:
            self._stranded.cancel()
            self._stranded = None

    def _on_no_pods(self) -> None:
        self._stranded = None
        reason = self._pods.unavailable_reason
        if reason:
            self.fail_all(UnavailableError(reason))


def _priority_label(priority: int) -> str:
    """Clients choose any of 2**32."""
    if priority == 0:
        return "normal"
    return "high" if priority < 0 else "low"

"""Who is dispatched, who waits and who is refused. Pure: the caller tells the time and what room there is."""

from __future__ import annotations

from typing import NamedTuple

from common.errors import OverloadedError
from router.admission.config import AdmissionConfig
from router.admission.departures import DepartureRate
from router.admission.forecast import Forecast
from router.admission.limits import PREDICTION_MARGIN, Expected, Limits, Refusal, broken_limit, joined
from router.admission.room import Room
from router.fairness.queue import FairQueue, Ticket
from router.fairness.tenant import Tenant

_LEAST_RETRY_S = 1.0  # Retry-After while no departure has been seen


class Outlook(NamedTuple):
    """The figures that decide whether a request can be served in time."""

    limits: Limits
    forecast: Forecast
    expected_output_tokens: float


class Admission:
    """One router's queue and what it has under way. `now`: time.monotonic(), or simulated."""

    def __init__(self, config: AdmissionConfig, *, prediction_margin: float = PREDICTION_MARGIN) -> None:
        self.config = config
        self._prediction_margin = prediction_margin
        self.queue = FairQueue()
        self.num_active = 0  # generations that were dispatched and have not ended
        self._departures = DepartureRate()
        self._by_tenant: dict[str, _Waiting] = {}  # those with a request that waits

    def can_start(self, num_requests: int, room: Room) -> bool:
        """Whether so many generations could be dispatched at once, if none waited."""
        return self.num_active + num_requests <= self.config.max_inflight and room.fits(num_requests)

    def passes(self, ticket: Ticket, room: Room) -> bool:
        """Whether a request that comes now need not wait. One whose prompt a decode pod computes passes those who wait
        for prefill pods, and only for them."""
        head = self.queue.head()
        if not ticket.is_local:
            return head is None and self.can_start(ticket.num_requests, room)
        room = room._replace(takes_prompts=True)
        return (head is None or self.can_start(head.num_requests, room)) and self.can_start(ticket.num_requests, room)

    def backlog_s(self, now: float) -> float:
        """Returns the seconds until all that waits is dispatched; 0 as long as that is not known."""
        self._watch(now)
        return self._departures.seconds_for(self.queue.cost) or 0.0

    def refusal(self, ticket: Ticket, outlook: Outlook, room: Room, now: float) -> Refusal | None:
        """Why the request cannot be taken; None: it can. A ticket that is let in by this is never dropped."""
        full: Refusal | None = None
        queue_s = 0.0
        if not self.passes(ticket, room):
            full = self._full(ticket)
            queue_s = self.wait_s(ticket, now) or 0.0
        expected = Expected(
            max(0.0, now - ticket.arrived_at),
            queue_s,
            self.backlog_s(now),
            outlook.forecast,
            outlook.expected_output_tokens,
        )
        return joined(full, broken_limit(outlook.limits, expected, self._prediction_margin))

    def wait_s(self, ticket: Ticket, now: float) -> float | None:
        """How long such a ticket would wait; None: it is not known yet how fast the queue empties."""
        self._watch(now)
        before = self.queue.cost_before(ticket.tenant, ticket.priority, ticket.cost)
        return self._departures.seconds_for(before + ticket.cost)

    def start(self, ticket: Ticket) -> None:
        """It is dispatched without having waited."""
        self.num_active += ticket.num_requests

    def wait(self, ticket: Ticket, now: float) -> None:
        """Queue it. `refusal` has said nothing against it."""
        self._watch(now)
        self.queue.push(ticket)
        tenant = self._waiting_of(ticket.tenant)
        self._by_tenant[ticket.tenant.name] = _Waiting(tenant.num_requests + ticket.num_requests, ticket.tenant.weight)
        self._watch(now)

    def next(self, room: Room, now: float) -> Ticket | None:
        """The ticket to dispatch now; None: none waits, or there is no room for the first."""
        ticket = self.queue.head()
        if ticket is None or not self.can_start(ticket.num_requests, room):
            return None
        self._watch(now)
        self._forget(self.queue.serve_head(), now)
        self._departures.departed(ticket.cost)
        self.num_active += ticket.num_requests
        return ticket

    def leave(self, ticket: Ticket, now: float) -> None:
        """One that waits has ended: by its client, its deadline, or since no pod is left."""
        self._watch(now)
        self.queue.remove(ticket)
        self._forget(ticket, now)

    def ended(self, num_requests: int) -> None:
        """So many generations that were dispatched have ended."""
        self.num_active -= num_requests

    def _full(self, ticket: Ticket) -> Refusal | None:
        """Keeps places for others: of higher priority, and of tenants that have less in the queue."""
        num_waiting = self.queue.num_requests
        places = places_of(ticket.priority, self.config.max_queued)
        excess = num_waiting + ticket.num_requests - places
        above_share = self._departures_to_share(ticket, places - num_waiting)
        if excess > 0:
            problem = f"{num_waiting} generations wait already, of at most {places} of such a priority"
            return self._no_place("queue_full", problem, ticket, max(excess, above_share))
        if above_share > 0:
            num_own = self._waiting_of(ticket.tenant).num_requests
            problem = f"{num_own} generations of this tenant wait already; the rest of the queue is for others"
            return self._no_place("tenant_share", problem, ticket, above_share)
        return None

    def _departures_to_share(self, ticket: Ticket, places_left: int) -> float:
        """How many must leave the queue until the ticket's tenant may have it there; 0: it may.

        Of those that leave, as many are the tenant's as its weight says, and of the places that they leave it may have
        its share. One it may have in any case.
        """
        tenant = ticket.tenant
        if not tenant.name:  # one tenant for all: there is no other to keep a place for
            return 0.0
        others = [each.weight for name, each in self._by_tenant.items() if name != tenant.name]
        served = tenant.weight / sum((*others, tenant.weight))
        share = tenant.weight / max((*others, tenant.weight))
        wanted = self._waiting_of(tenant).num_requests + ticket.num_requests
        if wanted <= max(1.0, places_left * share):
            return 0.0
        return min((wanted - places_left * share) / (served + share), (wanted - 1) / served)

    def _no_place(self, reason: str, problem: str, ticket: Ticket, num_departures: float) -> Refusal:
        num_waiting = self.queue.num_requests
        mean_cost = self.queue.cost / num_waiting if num_waiting else ticket.cost / ticket.num_requests
        retry_after_s = self._departures.seconds_for(mean_cost * num_departures)
        retry_after_s = _LEAST_RETRY_S if retry_after_s is None else retry_after_s
        return Refusal(reason, OverloadedError(f"{problem}; try again later", retry_after_s=retry_after_s))

    def _waiting_of(self, tenant: Tenant) -> _Waiting:
        return self._by_tenant.get(tenant.name, _Waiting(0, tenant.weight))

    def _forget(self, ticket: Ticket, now: float) -> None:
        tenant = self._by_tenant[ticket.tenant.name]
        left = tenant.num_requests - ticket.num_requests
        if left:
            self._by_tenant[ticket.tenant.name] = tenant._replace(num_requests=left)
        else:
            del self._by_tenant[ticket.tenant.name]
        self._watch(now)

    def _watch(self, now: float) -> None:
        self._departures.watch(now, backlogged=self.queue.num_requests > 0)


class _Waiting(NamedTuple):
    num_requests: int
    weight: float


def places_of(priority: int, max_queued: int) -> int:
    """How long the queue may be for a request of that priority to be let in: low ones leave room for others."""
    if priority < 0:
        return max_queued
    return max_queued - max_queued // 8 if priority == 0 else max_queued - max_queued // 2

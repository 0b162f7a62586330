"""The order in which requests are served: strict priorities, weighted fair shares of tenants, first in first out.

Within one priority this is start-time fair queueing (Goyal, Vin, Cheng: SIGCOMM 1996). Each tenant's next ticket has a
start tag: the virtual time, or the tenant's last finish tag if that is later. The least start tag is served and
becomes the virtual time; the finish tag is the start tag plus cost / weight. Whatever the costs, two tenants that both
wait all the time differ in what they got, by weight, by at most one ticket's cost of each.

A priority in which none waits is forgotten, with all tags: what waited before owes nothing. All operations but
`cost_before` are O(log n).
"""

from __future__ import annotations

import heapq
import itertools
from dataclasses import dataclass

from router.fairness.tenant import Tenant


@dataclass(eq=False, slots=True)
class Ticket:
    """An entry of the queue: the generations of one request, which are dispatched together."""

    tenant: Tenant
    priority: int  # lower ones are served first
    cost: float  # tokens to compute and to produce, at least 1
    num_requests: int = 1
    is_local: bool = False  # it needs no prefill pod, though there are some
    arrived_at: float = 0.0  # time.monotonic(), as is the next
    deadline: float = float("inf")


class _Flow:
    """One tenant's tickets of one priority."""

    __slots__ = ("cost", "finish", "is_listed", "start", "tickets", "weight")

    def __init__(self) -> None:
        self.tickets: dict[Ticket, None] = {}  # in order
        self.cost = 0.0
        self.weight = 1.0
        self.start = 0.0  # tag of the first ticket
        self.finish = 0.0  # tag of the last one served
        self.is_listed = False  # whether the heap of its class contains it


class _PriorityClass:
    """All tickets of one priority."""

    def __init__(self) -> None:
        self.size = 0
        self.cost = 0.0
        self._virtual_time = 0.0
        self._flows: dict[str, _Flow] = {}  # tenants come from the configuration, so there are not many
        self._heap: list[tuple[float, int, _Flow]] = []  # flows by start tag; empty ones are dropped when they show
        self._numbers = itertools.count()

    def push(self, ticket: Ticket) -> None:
        flow = self._flows.setdefault(ticket.tenant.name, _Flow())
        flow.weight = ticket.tenant.weight
        flow.tickets[ticket] = None
        flow.cost += ticket.cost
        self.size += 1
        self.cost += ticket.cost
        if not flow.is_listed:
            self._list(flow, max(self._virtual_time, flow.finish))

    def head(self) -> Ticket:
        while not self._heap[0][2].tickets:
            heapq.heappop(self._heap)[2].is_listed = False
        return next(iter(self._heap[0][2].tickets))

    def serve_head(self) -> None:
        ticket = self.head()
        _, _, flow = heapq.heappop(self._heap)
        self._virtual_time = flow.start
        flow.finish = flow.start + ticket.cost / flow.weight
        flow.is_listed = False
        self.remove(ticket)
        if flow.tickets:
            self._list(flow, flow.finish)

    def remove(self, ticket: Ticket) -> None:
        flow = self._flows[ticket.tenant.name]
        del flow.tickets[ticket]
        flow.cost = flow.cost - ticket.cost if flow.tickets else 0.0  # no rounding errors pile up
        self.size -= 1
        self.cost -= ticket.cost

    def cost_before(self, tenant: Tenant, cost: float) -> float:
        """Each other tenant is served meanwhile as much as its weight says, or all that it has."""
        own = self._flows.get(tenant.name)
        served = cost if own is None else cost + own.cost
        total = served - cost
        for flow in self._flows.values():
            if flow is not own:
                total += min(flow.cost, served * flow.weight / tenant.weight)
        return total

    def _list(self, flow: _Flow, start: float) -> None:
        flow.start = start
        flow.is_listed = True
        heapq.heappush(self._heap, (start, next(self._numbers), flow))


class FairQueue:
    """Tickets that wait. The caller bounds their number."""

    def __init__(self) -> None:
        self.num_requests = 0
        self._classes: dict[int, _PriorityClass] = {}
        self._priorities: list[int] = []  # a heap; those without a class are dropped when they show

    def __len__(self) -> int:
        """Tickets, as opposed to requests."""
        return sum(each.size for each in self._classes.values())

    @property
    def cost(self) -> float:
        """The cost of all that wait."""
        return sum(each.cost for each in self._classes.values())

    def push(self, ticket: Ticket) -> None:
        """Queue it behind those of its priority and tenant."""
        found = self._classes.get(ticket.priority)
        if found is None:
            found = self._classes[ticket.priority] = _PriorityClass()
            heapq.heappush(self._priorities, ticket.priority)
        found.push(ticket)
        self.num_requests += ticket.num_requests

    def head(self) -> Ticket | None:
        """The one whose turn it is; None: none waits."""
        while self._priorities and self._priorities[0] not in self._classes:
            heapq.heappop(self._priorities)
        return self._classes[self._priorities[0]].head() if self._priorities else None

    def serve_head(self) -> Ticket:
        """Take out the one whose turn it is. There must be one."""
        ticket = self.head()
        assert ticket is not None
        self._classes[ticket.priority].serve_head()
        self._forget(ticket)
        return ticket

    def remove(self, ticket: Ticket) -> None:
        """Take out one that waits, wherever it is."""
        self._classes[ticket.priority].remove(ticket)
        self._forget(ticket)

    def cost_before(self, tenant: Tenant, priority: int, cost: float) -> float:
        """Cost of what would be served before such a ticket if it came now and none after it.

        O(tenants + priorities) of those that wait.
        """
        before = sum(each.cost for number, each in self._classes.items() if number < priority)
        own = self._classes.get(priority)
        return before if own is None else before + own.cost_before(tenant, cost)

    def _forget(self, ticket: Ticket) -> None:
        self.num_requests -= ticket.num_requests
        if not self._classes[ticket.priority].size:
            del self._classes[ticket.priority]

"""The order of the queue, by its invariants."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from router.fairness.queue import FairQueue, Ticket
from router.fairness.tenant import Tenant

TENANTS = [Tenant("heavy", weight=3.0), Tenant("light", weight=1.0), Tenant("half", weight=0.5)]


def ticket(tenant="a", cost=10.0, *, priority=0, weight=1.0, num_requests=1):
    return Ticket(Tenant(tenant, weight=weight), priority, cost, num_requests)


def drained(queue):
    return [queue.serve_head() for _ in range(len(queue))]


def test_lower_priorities_first_and_in_order_within_a_tenant():
    queue = FairQueue()
    first, second, urgent = ticket(), ticket(cost=1), ticket(priority=-5, cost=1000)
    for each in (first, second, urgent):
        queue.push(each)
    assert queue.head() is urgent
    assert drained(queue) == [urgent, first, second]
    assert queue.head() is None


def test_a_tenant_with_one_request_does_not_wait_for_another_ones_hundred():
    queue = FairQueue()
    flood = [ticket("flood") for _ in range(100)]
    for each in flood:
        queue.push(each)
    for _ in range(10):
        queue.serve_head()
    late = ticket("late")
    queue.push(late)
    assert late in [queue.serve_head() for _ in range(2)]


def test_three_times_the_weight_is_three_times_the_share():
    queue = FairQueue()
    for _ in range(40):
        queue.push(ticket("heavy", weight=3.0))
        queue.push(ticket("light"))
    names = [queue.serve_head().tenant.name for _ in range(40)]
    assert abs(names.count("heavy") - 30) <= 1


def test_who_was_idle_saves_up_nothing():
    queue = FairQueue()
    for _ in range(50):
        queue.push(ticket("busy"))
    for _ in range(20):
        queue.serve_head()
    for _ in range(20):
        queue.push(ticket("late"))
    names = [queue.serve_head().tenant.name for _ in range(20)]
    assert abs(names.count("busy") - names.count("late")) <= 1


def test_leaving_and_coming_back_is_no_way_to_the_front():
    queue = FairQueue()
    other = [ticket("other") for _ in range(9)]
    for each in other:
        queue.push(each)
    for _ in range(3):
        queue.push(ticket("cheat"))
    for _ in range(4):
        queue.serve_head()
    names = []
    while queue.head() is not None:
        again = ticket("cheat")
        queue.push(again)
        queue.remove(again)
        names.append(queue.serve_head().tenant.name)
    assert names[:2] in (["cheat", "other"], ["other", "cheat"])


@given(
    st.lists(st.tuples(st.sampled_from(TENANTS), st.floats(1, 100)), min_size=30, max_size=150),
    st.integers(1, 60),
)
def test_tenants_that_wait_all_the_time_share_by_weight_within_one_ticket_each(jobs, num_served):
    queue = FairQueue()
    left = dict.fromkeys(TENANTS, 0.0)
    for tenant, cost in jobs:
        queue.push(Ticket(tenant, 0, cost))
        left[tenant] += cost
    got = dict.fromkeys(TENANTS, 0.0)
    for _ in range(min(num_served, len(jobs))):
        served = queue.serve_head()
        got[served.tenant] += served.cost
        left[served.tenant] -= served.cost
        waiting = [tenant for tenant in TENANTS if left[tenant] > 1e-6]
        for one in waiting:
            for other in waiting:
                allowed = 100 / one.weight + 100 / other.weight
                assert abs(got[one] / one.weight - got[other] / other.weight) <= allowed + 1e-6


@pytest.mark.parametrize(
    ("tenant", "priority", "cost", "expected"),
    [
        ("a", 0, 10, 30 + 40),  # its own three, and as much of the others'
        ("b", 0, 10, 40 + 30),
        ("new", 0, 10, 10 + 10),
        ("new", 1, 10, 30 + 40),
        ("new", -1, 10, 0),
    ],
)
def test_what_would_be_served_before(tenant, priority, cost, expected):
    queue = FairQueue()
    for _ in range(3):
        queue.push(ticket("a"))
    for _ in range(4):
        queue.push(ticket("b"))
    assert queue.cost_before(Tenant(tenant), priority, cost) == expected


class Machine(RuleBasedStateMachine):
    """Against a plain list of what waits."""

    tickets = Bundle("tickets")

    def __init__(self):
        super().__init__()
        self.queue = FairQueue()
        self.model: list[Ticket] = []

    @rule(
        target=tickets,
        tenant=st.sampled_from(TENANTS),
        priority=st.integers(-1, 1),
        cost=st.integers(1, 50),
        num_requests=st.integers(1, 4),
    )
    def push(self, tenant, priority, cost, num_requests):
        pushed = Ticket(tenant, priority, float(cost), num_requests)
        self.queue.push(pushed)
        self.model.append(pushed)
        return pushed

    @rule(gone=consumes(tickets))
    def remove(self, gone):
        if gone in self.model:
            self.queue.remove(gone)
            self.model.remove(gone)

    @rule()
    def serve(self):
        if self.model:
            served = self.queue.serve_head()
            assert served.priority == min(each.priority for each in self.model)
            peers = [each for each in self.model if each.priority == served.priority and each.tenant == served.tenant]
            assert served is peers[0], "in order within a tenant"
            self.model.remove(served)

    @invariant()
    def nothing_is_lost(self):
        assert len(self.queue) == len(self.model)
        assert self.queue.num_requests == sum(each.num_requests for each in self.model)
        assert (self.queue.head() is None) == (not self.model)
        for priority in (-1, 0, 1):
            total = sum(each.cost for each in self.model if each.priority <= priority)
            assert self.queue.cost_before(TENANTS[0], priority, 1.0) <= total + 1e-6


TestMachine = Machine.TestCase

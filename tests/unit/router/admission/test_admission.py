"""Who is dispatched, who waits, who is refused: no clock, no pods."""

from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from common.errors import OverloadedError, UnattainableError
from router.admission.admission import Admission, Outlook
from router.admission.config import AdmissionConfig
from router.admission.forecast import UNKNOWN, Forecast
from router.admission.limits import Limits
from router.admission.room import NO_ROOM, Room
from router.fairness.queue import Ticket
from router.fairness.tenant import Tenant

ROOM = Room(1000.0, 1000.0, takes_prompts=True)
FULL = Room(1000.0, 0.0, takes_prompts=True)
FORECAST = Forecast(ttft_s=0.2, itl_s=0.02, completion_s=2.0, idle_ttft_s=0.1, is_idle=False)
IN_TIME = Outlook(Limits(60.0), FORECAST, 100.0)


def ticket(tenant="", priority=0, num_requests=1, cost=100.0, weight=1.0):
    return Ticket(Tenant(tenant, weight=weight), priority, cost, num_requests)


def create(*, prediction_margin=1.0, **settings):
    return Admission(AdmissionConfig(**settings), prediction_margin=prediction_margin)


def backlogged(num_waiting=10, *, per_second=10, **settings):
    """It is second 10, and so many leave per second, as measured."""
    admission = create(**settings)
    for number in range(per_second * 10 + num_waiting):
        admission.wait(ticket(), 0.0)
        if number < per_second * 10:
            continue
    for number in range(per_second * 10):
        assert admission.next(ROOM, (number + 1) / per_second) is not None
    assert admission.queue.num_requests == num_waiting
    return admission


def refusal(admission, ticket_, outlook=IN_TIME, room=FULL, now=10.0):
    ticket_.arrived_at = now
    return admission.refusal(ticket_, outlook, room, now)


def test_while_there_is_room_nobody_waits():
    admission = create(max_inflight=2)
    assert admission.passes(ticket(num_requests=2), ROOM)
    assert not admission.passes(ticket(num_requests=3), ROOM), "more than may be under way"
    assert not admission.passes(ticket(), FULL), "the pods have enough"
    assert not admission.passes(ticket(), ROOM._replace(takes_prompts=False))
    assert not admission.passes(ticket(), NO_ROOM)


def test_nobody_passes_those_who_wait():
    admission = create()
    first = ticket()
    admission.wait(first, 0.0)
    assert not admission.passes(ticket(), ROOM)
    assert admission.next(FULL, 1.0) is None
    assert admission.next(ROOM, 1.0) is first
    assert admission.passes(ticket(), ROOM)


def test_who_needs_no_prefill_pod_passes_those_who_wait_for_one():
    admission = create(max_inflight=8)
    local = ticket()
    local.is_local = True
    no_prompts = ROOM._replace(takes_prompts=False)
    assert admission.passes(local, no_prompts)
    admission.wait(ticket(), 0.0)
    assert admission.passes(local, no_prompts)
    assert not admission.passes(local, FULL)
    admission.wait(ticket(priority=-1, num_requests=9), 0.0)
    assert not admission.passes(local, no_prompts), "who is first waits for places that it would take"


def test_a_request_of_many_choices_goes_as_a_whole():
    admission = create()
    many = ticket(num_requests=8)
    admission.wait(many, 0.0)
    assert admission.next(Room(100.0, 7.0, takes_prompts=True), 1.0) is None
    assert admission.next(Room(4.0, 3.0, takes_prompts=True), 1.0) is None
    assert admission.next(Room(4.0, 4.0, takes_prompts=True), 1.0) is many, "it is more than all pods take"
    assert admission.num_active == 8


def test_a_full_queue_refuses_and_says_when_to_come_back():
    admission = backlogged(16, max_queued=16)
    refused = refusal(admission, ticket(priority=-1, num_requests=20, cost=2000.0))
    assert refused is not None
    assert refused.reason == "queue_full"
    assert isinstance(refused.error, OverloadedError)
    assert refused.error.retry_after_s == pytest.approx(2.0, rel=0.01)


@pytest.mark.parametrize(("priority", "places"), [(-1, 16), (0, 14), (1, 8)])
def test_low_priorities_leave_places_for_higher_ones(priority, places):
    admission = create(max_queued=16)
    for _ in range(places - 1):
        admission.wait(ticket(), 0.0)
    assert refusal(admission, ticket(priority=priority)) is None
    admission.wait(ticket(priority=priority), 0.0)
    refused = refusal(admission, ticket(priority=priority))
    assert refused is not None
    assert refused.reason == "queue_full"


def test_no_tenant_fills_the_queue_alone():
    admission = create(max_queued=80)
    flood = 0
    while (refused := refusal(admission, ticket("flood"))) is None:
        admission.wait(ticket("flood"), 0.0)
        flood += 1
    assert (refused.reason, flood) == ("tenant_share", 35)
    for _ in range(10):
        assert refusal(admission, ticket("late")) is None
        admission.wait(ticket("late"), 0.0)


def test_a_light_tenant_gets_fewer_places():
    admission = create(max_queued=80)
    admission.wait(ticket("heavy", weight=4.0), 0.0)
    light = 0
    while refusal(admission, ticket("light", weight=1.0)) is None:
        admission.wait(ticket("light", weight=1.0), 0.0)
        light += 1
    assert light == 14  # a quarter of the 56 places that are left then


@pytest.mark.parametrize(
    ("limits", "reason", "retry_after_s"),
    [
        (Limits(60.0, ttft_s=1.3), "", 0),  # 1.1 s in the queue and 0.2 s on the pods
        (Limits(60.0, ttft_s=1.0), "ttft", 0.3),
        (Limits(60.0, itl_s=0.02), "", 0),
        (Limits(60.0, itl_s=0.01), "itl", 2.0),  # nobody must wait, then half of the answers have to end
        (Limits(3.2), "", 0),
        (Limits(2.6), "deadline", 0.5),
    ],
)
def test_who_cannot_be_served_in_time_is_refused_at_once(limits, reason, retry_after_s):
    refused = refusal(backlogged(10), ticket(), Outlook(limits, FORECAST, 100.0))
    if not reason:
        assert refused is None
        return
    assert refused is not None
    assert refused.reason == reason
    assert isinstance(refused.error, OverloadedError)
    assert refused.error.retry_after_s == pytest.approx(retry_after_s, rel=0.05)


@pytest.mark.parametrize(
    ("limits", "retry_after_s"),
    [(Limits(60.0), 0.1), (Limits(60.0, ttft_s=1.0), 0.9), (Limits(60.0, itl_s=0.01), 2.6)],
)
def test_who_finds_no_place_is_told_when_its_limits_could_be_kept_too(limits, retry_after_s):
    admission = backlogged(16, max_queued=18)  # 15 places for it, and they empty by ten per second
    refused = refusal(admission, ticket(), Outlook(limits, FORECAST, 100.0))
    assert refused is not None
    assert refused.reason == "queue_full"
    assert isinstance(refused.error, OverloadedError)
    assert refused.error.retry_after_s == pytest.approx(retry_after_s, rel=0.05)


def test_who_finds_no_place_is_told_if_waiting_is_of_no_use():
    refused = refusal(backlogged(16, max_queued=16), ticket(), Outlook(Limits(60.0, ttft_s=0.05), FORECAST, 100.0))
    assert refused is not None
    assert refused.reason == "ttft"
    assert isinstance(refused.error, UnattainableError)


@pytest.mark.parametrize("priority", [-1, 0, 1])
@pytest.mark.parametrize(("weight", "other_weight"), [(1.0, 1.0), (1.0, 4.0), (4.0, 1.0)])
@pytest.mark.parametrize(("num_own", "num_others"), [(20, 0), (13, 13), (20, 5), (3, 23)])
def test_whoever_comes_back_when_told_finds_a_place(priority, weight, other_weight, num_own, num_others):
    admission = backlogged(0, max_queued=20)
    now = 10.0
    for number in range(max(num_own, num_others)):
        if number < num_own:
            admission.wait(ticket("own", priority, weight=weight), now)
        if number < num_others:
            admission.wait(ticket("other", priority, weight=other_weight), now)
    refused = refusal(admission, ticket("own", priority, weight=weight), now=now)
    assert refused is not None
    assert isinstance(refused.error, OverloadedError)
    for _ in range(math.ceil(refused.error.retry_after_s * 10) + 2):  # two tickets is how unfair a fair queue may be
        now += 0.1
        if admission.queue.num_requests:
            assert admission.next(ROOM, now) is not None
    assert refusal(admission, ticket("own", priority, weight=weight), now=now) is None


def test_the_error_names_the_header_and_both_figures():
    refused = refusal(backlogged(10), ticket(), Outlook(Limits(60.0, ttft_s=1.0), FORECAST, 100.0))
    assert refused is not None
    assert refused.error.param == "x-slo-ttft-ms"
    assert refused.error.message.startswith(
        "x-slo-ttft-ms asks for a first token within 1000 ms, 1300 ms are predicted"
    )


def test_what_no_pod_can_keep_is_no_matter_of_waiting():
    for limits, forecast in (
        (Limits(60.0, ttft_s=0.05), FORECAST),
        (Limits(60.0, itl_s=0.01), FORECAST._replace(is_idle=True)),
        (Limits(1.0), FORECAST._replace(is_idle=True)),
    ):
        refused = refusal(create(), ticket(), Outlook(limits, forecast, 100.0), ROOM)
        assert refused is not None
        assert isinstance(refused.error, UnattainableError)


def test_nobody_is_refused_on_a_guess():
    admission = create()
    for _ in range(100):
        admission.wait(ticket(), 0.0)
    assert refusal(admission, ticket(), Outlook(Limits(0.5, 0.01, 0.001), UNKNOWN, 100.0)) is None


def test_time_that_has_passed_before_counts():
    late = ticket()
    outlook = Outlook(Limits(60.0, ttft_s=0.3), FORECAST, 100.0)
    late.arrived_at = 9.95
    assert create().refusal(late, outlook, ROOM, 10.0) is None
    late.arrived_at = 9.8
    assert create().refusal(late, outlook, ROOM, 10.0) is not None


def test_a_margin_makes_predictions_longer():
    outlook = Outlook(Limits(60.0, ttft_s=0.3), FORECAST, 100.0)
    assert refusal(create(prediction_margin=1.4), ticket(), outlook, ROOM) is None
    assert refusal(create(prediction_margin=1.6), ticket(), outlook, ROOM) is not None


class Machine(RuleBasedStateMachine):
    """Whatever comes, goes and ends: nothing that was let in is lost, no bound is passed, no room is left unused."""

    def __init__(self):
        super().__init__()
        self.admission = create(max_inflight=6, max_queued=16)
        self.now = 0.0
        self.room = Room(8.0, 8.0, takes_prompts=True)
        self.waiting: list[Ticket] = []
        self.running: list[Ticket] = []

    @rule(
        tenant=st.sampled_from(["", "a", "b"]),
        priority=st.integers(-1, 1),
        num_requests=st.integers(1, 4),
        cost=st.integers(1, 500),
    )
    def arrive(self, tenant, priority, num_requests, cost):
        new = Ticket(Tenant(tenant), priority, float(cost), num_requests, self.now)
        if self.admission.refusal(new, IN_TIME, self.room, self.now) is not None:
            return
        if self.admission.passes(new, self.room):
            self.admission.start(new)
            self.running.append(new)
        else:
            self.admission.wait(new, self.now)
            self.waiting.append(new)
            self.pump()  # it may be first, and need less room than who was

    @rule(free=st.integers(0, 8), takes_prompts=st.booleans())
    def report(self, free, takes_prompts):
        self.room = Room(8.0, float(free), takes_prompts)
        self.pump()

    @rule(seconds=st.floats(0, 5))
    def pass_time(self, seconds):
        self.now += seconds

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data):
        ended = data.draw(st.sampled_from(self.running))
        self.running.remove(ended)
        self.admission.ended(ended.num_requests)
        self.pump()

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def leave(self, data):
        gone = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(gone)
        self.admission.leave(gone, self.now)
        self.pump()

    def pump(self):
        while (served := self.admission.next(self.room, self.now)) is not None:
            self.waiting.remove(served)
            self.running.append(served)

    @invariant()
    def bounds_hold(self):
        assert self.admission.num_active == sum(each.num_requests for each in self.running) <= 6
        assert self.admission.queue.num_requests == sum(each.num_requests for each in self.waiting) <= 16

    @invariant()
    def room_is_used(self):
        head = self.admission.queue.head()
        assert (head is None) == (not self.waiting)
        if head is not None:
            assert not self.admission.can_start(head.num_requests, self.room)


TestMachine = Machine.TestCase

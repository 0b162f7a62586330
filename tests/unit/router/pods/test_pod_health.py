"""When a pod is ejected and for how long, by a clock of its own."""

from __future__ import annotations

import pytest

from common.errors import (
    BatonError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
    UnavailableError,
)
from router.pods.config import HealthConfig
from router.pods.health import PodHealth

CONFIG = HealthConfig(eject_after_failures=5, eject_base_s=10)


class Clock:
    now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


class Request:
    """A Cause."""

    def __init__(self, body, tenant_name=""):
        self.tenant_name = tenant_name
        self._body = body

    def identity(self):
        return str(self._body).encode()


class Owner:
    allows = True

    def __init__(self):
        self.said = []

    def may_eject(self, *, is_certain):
        return self.allows

    def ejected(self, reason):
        self.said.append(reason)

    def recovered(self):
        self.said.append("recovered")


@pytest.fixture
def owner():
    return Owner()


@pytest.fixture
def health(owner, clock):
    return PodHealth(CONFIG, owner, clock)


@pytest.mark.parametrize("error", [UnavailableError("gone"), BatonError("bug"), DeadlineExceededError("late")])
def test_faults_of_the_pod_eject_it_and_a_canary_brings_it_back(health, owner, clock, error):
    for number in range(5):
        health.note_outcome(error, "prefill", Request(number), since=clock.now)
    assert owner.said == ["prefill"]
    assert health.is_ejected
    assert error.message in health.detail
    assert "tried again in 10 s" in health.detail
    health.note_outcome(None, "prefill", Request("late"))
    assert health.is_ejected, "what comes late says nothing"
    clock.now += 10
    assert health.canary_due_in_s == 0
    assert health.note_canary(UnavailableError("still"), clock.now) == "failed"
    assert health.canary_due_in_s == 20
    clock.now += 20
    assert health.note_canary(None, clock.now) == "ok"
    assert owner.said == ["prefill", "canary", "recovered"]
    assert health.detail == ""


@pytest.mark.parametrize(
    "error",
    [
        OverloadedError("full"),
        InvalidRequestError("bad"),
        RequestCancelledError("client"),
        DeadlineExceededError("late"),
    ],
)
def test_overload_clients_and_short_deadlines_are_no_failures(health, owner, clock, error):
    since = clock.now
    clock.now += 1
    health.worked()  # after the request was sent
    for number in range(20):
        health.note_outcome(error, "decode", Request(number), since=since)
    assert owner.said == []


def test_two_canaries_eject_and_those_of_a_pod_that_works_do_not(health, owner, clock):
    sent = clock.now
    clock.now += 10
    late = DeadlineExceededError("no answer")
    health.worked()
    assert [health.note_canary(late, sent) for _ in range(9)] == ["busy"] * 9
    assert health.note_canary(OverloadedError("full"), clock.now) == "busy"
    assert health.note_canary(late, clock.now) == "failed"
    assert owner.said == []
    assert health.note_canary(late, clock.now) == "failed"
    assert owner.said == ["canary"]


FAULT = UnavailableError("gone")


def fail(health, requests):
    for request in requests:
        health.note_outcome(FAULT, "decode", request)
    return health.is_ejected


def test_only_failures_in_a_row_count(health):
    for _ in range(3):
        assert not fail(health, map(Request, range(4)))
        health.note_outcome(None, "decode", Request("well"))
    assert fail(health, map(Request, range(5)))


def test_a_repeated_request_counts_once(health):
    assert not fail(health, [Request("same")] * 100)
    assert not fail(health, map(Request, range(3)))
    assert fail(health, [Request(3)])


def test_one_tenant_of_several_is_no_proof(health, clock):
    health.note_outcome(None, "decode", Request("b's", "b"))
    assert not fail(health, [Request(number, "a") for number in range(100)])
    assert fail(health, [Request("b's", "b")])


def test_one_tenant_is_proof_where_there_is_no_other(health, clock):
    health.note_outcome(None, "decode", Request("b's", "b"))
    clock.now += 3600
    assert not fail(health, [Request(number, "a") for number in range(4)])
    assert fail(health, [Request(4, "a")])


def test_invalid_answers_to_two_requests_eject(health, owner):
    for _ in range(9):
        health.note_invalid("it skipped", Request("same"))
    assert owner.said == []
    health.note_invalid("it skipped", Request("another"))
    assert owner.said == ["invalid"]
    assert "it skipped" in health.detail


def test_a_canary_needs_no_second_witness(health, owner, clock):
    health.note_outcome(None, "decode", Request("b's", "b"))
    health.note_invalid("it skipped", Request("a's", "a"))
    health.note_canary(FAULT, clock.now)
    assert owner.said == ["canary"]


def test_a_pod_that_is_needed_stays(health, owner, clock):
    owner.allows = False
    assert not fail(health, map(Request, range(20)))
    owner.allows = True
    assert fail(health, [Request(20)])


def test_an_ejection_takes_at_most_60_times_the_first(health, owner, clock):
    assert fail(health, map(Request, range(5)))
    for _ in range(10):
        clock.now += health.canary_due_in_s
        health.note_canary(FAULT, clock.now)
    assert health.canary_due_in_s == 600


def test_failures_eject_no_pod_if_that_is_off(owner, clock):
    health = PodHealth(HealthConfig(eject_after_failures=0), owner, clock)
    health.note_canary(FAULT, clock.now)  # before any request has made the pod's tenants known
    assert not fail(health, map(Request, range(20)))
    health.note_invalid("it skipped", Request("a"))
    assert owner.said == []
    assert health.note_stall("no step for 2 s"), "which has a setting of its own"


@pytest.mark.parametrize(("interval_s", "timeout_s"), [(0.5, 0.5), (60, 10), (0, 10)])
def test_a_canary_may_take_as_long_as_the_interval_but_at_most_10_s(owner, clock, interval_s, timeout_s):
    assert PodHealth(HealthConfig(canary_interval_s=interval_s), owner, clock).canary_timeout_s == timeout_s


def test_canaries_are_due_after_silence_only(owner, clock):
    health = PodHealth(HealthConfig(canary_interval_s=10), owner, clock)
    clock.now += 7
    assert health.canary_due_in_s == 3
    health.worked()
    assert health.canary_due_in_s == 10
    clock.now += 60
    assert health.canary_due_in_s == 0
    assert PodHealth(HealthConfig(canary_interval_s=0), owner, clock).canary_due_in_s == float("inf")

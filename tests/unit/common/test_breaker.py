from __future__ import annotations

import pytest

from common.breaker import Breaker


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock) -> Breaker:
    return Breaker(clock, base_s=10, max_s=100, max_failures=5)


def test_only_failures_in_a_row_count(breaker):
    for _ in range(3):
        assert not any(breaker.failed() for _ in range(4))
        breaker.succeeded()
    assert [breaker.failed() for _ in range(5)] == [False] * 4 + [True]
    assert breaker.failed(), "asked again as long as its owner does not trip it"
    assert breaker.is_closed


def test_a_single_failure_is_enough_by_default(clock):
    assert Breaker(clock, base_s=1, max_s=2).failed()


def test_each_time_open_is_twice_as_long_up_to_the_most(breaker, clock):
    spans = []
    for _ in range(6):
        breaker.trip()
        spans.append(breaker.remaining_s)
        assert not breaker.is_closed
        assert not breaker.failed(100)
        clock.now += spans[-1]
        assert breaker.remaining_s == 0
    assert spans == [10, 20, 40, 80, 100, 100]


def test_a_late_success_does_not_close_it_and_a_probe_does(breaker, clock):
    breaker.trip()
    breaker.succeeded()
    clock.now += 10
    assert not breaker.is_closed, "half open: only its owner's probe counts"
    breaker.close()
    assert breaker.is_closed
    assert breaker.remaining_s == 0


def test_what_stays_closed_is_forgiven(breaker, clock):
    for _ in range(3):
        breaker.trip()
        breaker.close()
    assert breaker.is_closed
    clock.now += 100
    breaker.trip()
    assert breaker.remaining_s == 40, "one doubling less"
    breaker.close()
    clock.now += 10_000
    breaker.trip()
    assert breaker.remaining_s == 10


def test_what_never_recovers_overflows_nothing(breaker):
    for _ in range(5000):
        breaker.trip()
    assert breaker.remaining_s == 100


def test_a_probe_can_be_made_due_before_its_time(breaker):
    breaker.trip()
    breaker.probe_now()
    assert breaker.remaining_s == 0
    assert not breaker.is_closed

"""The parts of survival that need no pods: attempts, delays, the line."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from router.dispatching.attempts import Attempts, Backoff
from router.dispatching.migrations import MigrationLine
from router.metrics import SurvivalMetrics


def test_attempts_without_a_token_are_bounded():
    attempts = Attempts(2)
    assert [attempts.start(), attempts.exhausted, attempts.start(), attempts.exhausted] == [1, False, 2, True]


def test_a_token_makes_the_attempts_begin_anew():
    attempts = Attempts(2)
    for number in range(1, 10):
        assert not attempts.exhausted
        assert attempts.start() == number
        attempts.progressed()
    attempts.start()
    assert attempts.exhausted


def test_an_attempt_that_was_refused_does_not_count():
    attempts = Attempts(1)
    attempts.start()
    attempts.refused()
    assert not attempts.exhausted
    attempts.start()
    assert attempts.exhausted


def test_delays_double_to_a_bound_with_jitter():
    backoff = Backoff()
    delays = [backoff.next() for _ in range(8)]
    for delay, full in zip(delays, (0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0), strict=True):
        assert full / 2 <= delay <= full
    backoff.reset()
    assert backoff.next() <= 0.05


@pytest.fixture
def registry():
    return CollectorRegistry()


@pytest.fixture
def line(registry):
    return MigrationLine(SurvivalMetrics(registry), limit=1)


async def test_the_line_is_served_in_order_and_survives_those_who_leave_it(line, registry):
    slot = await line.enter()
    served: list[int] = []

    async def come(number):
        (await line.enter()).release()
        served.append(number)

    waiting = [asyncio.create_task(come(number)) for number in range(4)]
    await asyncio.sleep(0)
    waiting[1].cancel()
    slot.release()
    slot.release()  # once more changes nothing
    await asyncio.gather(*waiting, return_exceptions=True)
    assert served == [0, 2, 3]
    assert registry.get_sample_value("baton_router_num_migrations_waiting") == 0
    assert registry.get_sample_value("baton_router_num_migrations_running") == 0

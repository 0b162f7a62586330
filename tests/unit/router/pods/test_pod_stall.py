"""Which silence of a busy pod is a stall, by a clock of its own; then with real time."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import UnavailableError
from router.pods.config import HealthConfig
from router.pods.health import PodHealth
from router.pods.stall import StallWatch
from tests.unit.router.pods.test_pod_health import Clock, Owner


class Engine:
    is_stepping = True
    longest_step_s: float | None = 0.02


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def engine():
    return Engine()


@pytest.fixture
def health(clock):
    return PodHealth(HealthConfig(stall_timeout_s=2.0), Owner(), clock)


@pytest.fixture
def watch(engine, health):
    return StallWatch(engine, health)


def test_a_busy_pod_is_overdue_after_the_timeout(watch, health, clock):
    assert watch._overdue_in_s == 2.0
    clock.now += 1.5
    assert watch._overdue_in_s == 0.5
    health.worked()
    assert watch._overdue_in_s == 2.0


def test_a_slow_pod_has_the_time_that_its_steps_take(watch, engine, clock):
    engine.longest_step_s = 3.0
    clock.now += 10
    assert watch._overdue_in_s == 5.0


def test_no_report_is_due_of_a_pod_without_running_requests_or_known_steps(watch, engine, clock):
    clock.now += 100
    engine.is_stepping = False
    assert watch._overdue_in_s is None
    engine.is_stepping, engine.longest_step_s = True, None
    assert watch._overdue_in_s is None


def test_a_connection_that_is_new_has_a_new_span(health, engine, clock):
    clock.now += 100
    assert StallWatch(engine, health)._overdue_in_s == 2.0


def test_it_can_be_turned_off(engine, clock):
    health = PodHealth(HealthConfig(stall_timeout_s=0), Owner(), clock)
    assert StallWatch(engine, health)._overdue_in_s is None


async def test_a_stalled_pod_is_ejected_once_it_may_be(engine):
    owner = Owner()
    owner.allows = False
    health = PodHealth(HealthConfig(stall_timeout_s=0.01), owner)
    watch = StallWatch(engine, health)
    running = asyncio.create_task(watch.run())
    while not health.silent_s > 0.05:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert owner.said == []
    owner.allows = True
    watch.reported()
    with pytest.raises(UnavailableError, match="made no step for"):
        await asyncio.wait_for(running, 30)
    assert owner.said == ["stall"]
    assert health.is_ejected

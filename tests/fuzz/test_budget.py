"""The budget of a request goes red for each thing that it bounds, and only then."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager

import pytest

from tests.fuzz import budget
from tests.fuzz.budget import Budget
from tests.fuzz.host import hosted


@asynccontextmanager
async def nothing():
    yield None


async def answered():
    await asyncio.sleep(0)


async def serve(sleep_s=0.0, num_bytes=0):
    for _ in range(3):
        await asyncio.sleep(0.001)
    time.sleep(sleep_s)  # noqa: ASYNC251
    return len(b"x" * num_bytes)  # resident for a moment


@pytest.fixture
def host():
    with hosted(nothing) as host:
        yield host


def test_a_small_request_is_within_it(host):
    with Budget(host, answered):
        host.run(serve(num_bytes=1 << 20))


def test_memory_that_is_given_back_counts(host):
    with pytest.raises(AssertionError, match="of memory"), Budget(host, answered):
        host.run(serve(num_bytes=100 << 20))


def test_a_held_up_loop_counts(host, monkeypatch):
    monkeypatch.setattr(budget, "MAX_LAG_S", 0.1)
    with pytest.raises(AssertionError, match="event loop"), Budget(host, answered):
        host.run(serve(sleep_s=0.3))


def test_a_neighbour_that_waits_counts(host, monkeypatch):
    monkeypatch.setattr(budget, "MAX_NEIGHBOUR_S", 0.1)
    with pytest.raises(AssertionError, match="neighbour"), Budget(host, lambda: asyncio.sleep(0.3)):
        host.run(serve())


def test_a_neighbour_that_is_refused_counts(host):
    async def refused():
        raise ValueError("503")

    with pytest.raises(ValueError, match="503"), Budget(host, refused):
        host.run(serve())

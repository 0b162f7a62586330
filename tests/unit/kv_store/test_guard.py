"""One outage of a medium, from the operation that fails to the probe that succeeds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

import pytest

from common.errors import StoreError, StoreUnavailableError
from kv_store.guard import UNAVAILABLE, Backoff, Guard

DEADLINE_S = 60.0
SOON = Backoff(base_s=0.001, max_s=0.001)
NEVER = Backoff(base_s=3600.0, max_s=3600.0)


class Medium:
    """Its probes wait until the test tells them how to end."""

    def __init__(self) -> None:
        self.arrived = threading.Semaphore(0)
        self.num_probes = 0
        self._answers: list[Exception | None] = []
        self._answered = threading.Semaphore(0)

    def probe(self) -> None:
        self.num_probes += 1
        self.arrived.release()
        assert self._answered.acquire(timeout=DEADLINE_S)
        if (error := self._answers.pop(0)) is not None:
            raise error

    def await_probe(self) -> None:
        assert self.arrived.acquire(timeout=DEADLINE_S)

    def answer(self, error: Exception | None) -> None:
        self._answers.append(error)
        self._answered.release()


@pytest.fixture
def medium() -> Medium:
    return Medium()


@pytest.fixture
def create_guard(medium) -> Iterator[Callable[..., Guard]]:
    guards = []

    def create(backoff: Backoff) -> Guard:
        guards.append(Guard("the medium", UNAVAILABLE, medium.probe, backoff))
        return guards[-1]

    yield create
    for guard in guards:
        guard.stop()


@pytest.fixture(autouse=True)
def messages(caplog) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO, logger="kv_store.guard")
    return lambda: [record.getMessage() for record in caplog.records]


def join_prober() -> None:
    """Return when no probe is under way or due."""
    for thread in threading.enumerate():
        if thread.name == "kv-store-probe":
            thread.join(DEADLINE_S)
            assert not thread.is_alive()


def test_open_it_refuses_with_the_reason_until_a_probe_succeeds(medium, create_guard, messages):
    guard = create_guard(SOON)
    guard.check()
    guard.open("no route")
    medium.await_probe()
    with pytest.raises(StoreUnavailableError, match="the medium is unavailable: no route"):
        guard.check()  # also while it is probed
    medium.answer(StoreError("no route"))
    medium.await_probe()
    assert not guard.is_closed
    medium.answer(None)
    join_prober()
    guard.check()
    assert messages() == [
        "the medium is unavailable, requests proceed without it: no route",
        "the medium is available again",
    ]


def test_however_many_operations_fail_there_is_one_probe_and_one_log_line(medium, create_guard, messages):
    guard = create_guard(SOON)
    for reason in ("reset", "refused", "refused"):
        guard.open(reason)
    medium.await_probe()
    guard.open("late")
    assert medium.num_probes == 1
    assert len(messages()) == 1
    medium.answer(None)
    join_prober()
    assert medium.num_probes == 1


def test_it_waits_before_the_first_probe(medium, create_guard):
    guard = create_guard(NEVER)
    guard.open("refused")
    assert not guard.is_closed
    guard.stop()
    assert medium.num_probes == 0


def test_it_opens_again_after_it_was_closed(medium, create_guard, messages):
    guard = create_guard(SOON)
    for _ in range(2):
        guard.open("refused")
        medium.answer(None)
        join_prober()
        guard.check()
    assert medium.num_probes == 2
    assert len(messages()) == 4


def test_another_reason_is_logged(medium, create_guard, messages):
    """A server that was down at the start of its clients may turn out to refuse their password."""
    guard = create_guard(SOON)
    guard.open("refused")
    for reason in ("refused", "wrong password", "wrong password"):
        medium.answer(StoreError(reason))
    for _ in range(4):
        medium.await_probe()
    with pytest.raises(StoreUnavailableError, match="wrong password"):
        guard.check()
    medium.answer(None)
    join_prober()
    assert messages()[1:-1] == ["the medium is unavailable, now for another reason: wrong password"]


def test_a_defect_in_a_probe_does_not_end_the_probes(medium, create_guard, messages):
    guard = create_guard(SOON)
    guard.open("refused")
    medium.answer(ZeroDivisionError("a defect"))
    medium.answer(None)
    join_prober()
    guard.check()
    assert "internal error in the probe of the medium" in messages()


def test_stopped_it_probes_no_more_and_does_not_open(medium, create_guard):
    guard = create_guard(SOON)
    guard.open("refused")
    medium.await_probe()
    closer = threading.Thread(target=guard.stop)
    closer.start()
    assert guard._stopping.wait(DEADLINE_S)
    medium.answer(StoreError("refused"))
    closer.join(DEADLINE_S)
    join_prober()
    assert medium.num_probes == 1
    never_open = create_guard(SOON)
    never_open.stop()
    never_open.open("late")
    assert never_open.is_closed

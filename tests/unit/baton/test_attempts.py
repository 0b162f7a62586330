"""What clients try again."""

from __future__ import annotations

import pytest

from baton.attempts import Attempts
from baton.errors import DeadlineExceededError, InvalidRequestError, OverloadedError, UnavailableError


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_the_addresses_take_turns_and_delays_grow():
    attempts = Attempts(["a:1", "b:2"], 4, 60.0)
    delays, asked = [], []
    for _ in range(3):
        asked.append(attempts.address)
        delays.append(attempts.delay_after(UnavailableError("away")))
    assert asked == ["a:1", "b:2", "a:1"]
    assert delays[0] <= 0.1 < delays[2] <= 0.4
    with pytest.raises(UnavailableError, match="away"):
        attempts.delay_after(UnavailableError("away"))


def test_progress_resets_the_count_of_failures():
    attempts = Attempts(["a:1"], 2, 60.0)
    for _ in range(5):
        attempts.delay_after(UnavailableError("away"))
        attempts.progress()


def test_what_would_fail_again_is_raised_at_once():
    with pytest.raises(InvalidRequestError):
        Attempts(["a:1"], 9, 60.0).delay_after(InvalidRequestError("no"))


def test_an_overloaded_router_says_when():
    attempts = Attempts(["a:1"], 9, 60.0)
    assert attempts.delay_after(OverloadedError("full", retry_after_s=7.0)) == 7.0
    with pytest.raises(OverloadedError):  # it would be too late then
        attempts.delay_after(OverloadedError("full", retry_after_s=61.0))


def test_the_time_bounds_all_attempts():
    clock = Clock()
    attempts = Attempts(["a:1"], 9, 10.0, clock)
    clock.now = 4.0
    assert attempts.timeout_s == 6.0
    clock.now = 10.0
    with pytest.raises(DeadlineExceededError):
        _ = attempts.timeout_s

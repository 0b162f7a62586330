"""A pod notices that its drafts have become wrong, and noise does not make it believe so."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence

import pytest

from common.engine.messages import DraftFigures, EngineStats
from common.pod import draft_drift
from common.pod.draft_drift import Change, DraftDrift
from common.pod.stats import StatsBoard


class Pod:
    """Verifies drafts, minute by minute."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.drift = DraftDrift(lambda: self.now_s)
        self.figures = DraftFigures()

    def run(self, minutes: int, num_verified: int, share: float) -> list[Change]:
        """What it notices while so many drafts of each minute are verified, of which this share is right."""
        found = []
        for _ in range(minutes):
            self.figures += DraftFigures(num_verified=num_verified, num_accepted=round(share * num_verified))
            self.now_s += 59.0
            found.append(self.drift.observe(self.figures))
            self.now_s += 1.0
            found.append(self.drift.observe(self.figures))
        return [change for change in found if change is not None]


def test_a_fall_and_its_end_are_told_once() -> None:
    pod = Pod()
    assert pod.run(60, 1000, 0.6) == []
    (fall,) = pod.run(10, 1000, 0.2)
    assert (fall.is_fall, fall.before.share) == (True, 0.6)
    assert fall.recent.share < 0.3
    assert pod.drift.has_fallen
    (end,) = pod.run(20, 1000, 0.6)
    assert not end.is_fall
    assert end.recent.share > 0.75 * end.before.share
    assert not pod.drift.has_fallen


def test_what_stays_low_is_no_fall_after_an_hour() -> None:
    pod = Pod()
    pod.run(60, 1000, 0.6)
    fall, end = pod.run(70, 1000, 0.2)
    assert (fall.is_fall, end.is_fall) == (True, False)
    assert pod.run(60, 1000, 0.2) == []


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((60, 1000, 0.6), (30, 1000, 0.35)),  # more than half
        ((60, 1000, 0.6), (2, 1000, 0.0)),  # it may be one request
        ((60, 1000, 0.6), (30, 5, 0.0)),  # too few
        ((3, 300, 0.6), (5, 1000, 0.1)),  # too few before
        ((60, 40, 0.02), (30, 40, 0.0)),  # so few are right in any case
        ((60, 1000, 0.2), (60, 1000, 0.9)),
    ],
)
def test_what_is_no_fall(before: tuple[int, int, float], after: tuple[int, int, float]) -> None:
    pod = Pod()
    assert pod.run(*before) == []
    assert pod.run(*after) == []


def test_few_drafts_a_minute_are_enough_in_time() -> None:
    """As where they do not pay, and are only tried."""
    pod = Pod()
    pod.run(60, 1000, 0.6)
    assert [change.is_fall for change in pod.run(30, 40, 0.1)] == [True]


@pytest.mark.parametrize("seed", range(5))
def test_noise_is_no_fall(seed: int) -> None:
    choices, pod = random.Random(seed), Pod()
    for _ in range(600):
        num_verified = choices.choice((0, 16, 60, 400))
        num_accepted = 8 * sum(choices.random() < 0.3 for _ in range(num_verified // 8))  # right in runs of 8
        assert pod.run(1, num_verified, num_accepted / num_verified if num_verified else 0.0) == []


def test_an_idle_hour_ends_a_fall_and_leaves_nothing() -> None:
    pod = Pod()
    pod.run(60, 1000, 0.6)
    pod.run(10, 1000, 0.1)
    assert pod.drift.has_fallen
    pod.now_s += 3600.0
    assert not pod.drift.has_fallen
    assert pod.run(30, 1000, 0.01) == []
    assert not pod.drift.has_fallen


def test_no_more_than_an_hour_is_kept() -> None:
    pod = Pod()
    pod.run(500, 10, 0.5)
    assert len(pod.drift._minutes) <= draft_drift._HOUR


def test_the_log_has_a_line_for_each_change(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    board = StatsBoard(EngineStats(), EngineStats())
    board.drifts = [DraftDrift(lambda: now_s) for _ in board.drifts]
    totals = DraftFigures()

    def run(shares: Sequence[float]) -> None:
        nonlocal now_s, totals
        for share in shares:
            totals += DraftFigures(num_verified=1000, num_accepted=round(1000 * share))
            now_s += 60.0
            board.publish(EngineStats(drafts=totals), 1)

    with caplog.at_level(logging.INFO, "common.pod.stats"):
        run([0.6] * 60 + [0.1] * 10 + [0.6] * 20)
    end = "were right, {} in the hour before (engine 1)"
    assert [(each.levelname, each.getMessage()) for each in caplog.records] == [
        ("WARNING", f"speculative: fewer drafts are right: 20% of the last 5000 drafts {end.format('60%')}"),
        ("INFO", f"speculative: as many drafts are right again: 40% of the last 5000 drafts {end.format('53%')}"),
    ]

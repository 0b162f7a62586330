"""Notices when far fewer of a pod's drafts are right than in the hour before: a proposer can go stale without an error.

Counts are kept by minute. The last minutes are compared with the rest of the hour: as many of them as noise needs to be
ruled out, and at least so many that no single request decides. A share that stays low becomes that of the hour, so that
a fall is over within an hour in any case.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from common.engine.messages import DraftFigures

_MINUTE_S = 60.0
_HOUR = 60  # minutes that are kept
_LEAST_RECENT, _MOST_RECENT = 5, 30  # minutes
_LEAST_EXPECTED = 600  # right drafts that recent minutes would have by the share of the hour; they come in runs
_LEAST_VERIFIED = 200  # drafts of recent minutes, to tell that a fall is over
_LEAST_BEFORE = 1000  # drafts that the rest of the hour must have
_FALLEN, _RECOVERED = 0.5, 0.75  # of the share of the hour


class Acceptance(NamedTuple):
    """Drafts that were verified, and those of them that were right."""

    num_verified: int = 0
    num_accepted: int = 0

    @property
    def share(self) -> float:
        """The share of those verified; 0 if there are none."""
        return self.num_accepted / self.num_verified if self.num_verified else 0.0

    def plus(self, other: Acceptance) -> Acceptance:
        """Both together."""
        return Acceptance(self.num_verified + other.num_verified, self.num_accepted + other.num_accepted)


class Change(NamedTuple):
    """A fall, or the end of one."""

    is_fall: bool
    recent: Acceptance
    before: Acceptance  # in the rest of the hour


class DraftDrift:
    """Watches the acceptance of one engine's drafts."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` gives seconds."""
        self._clock = clock
        self._minute = self._now()  # since when there are drafts that no entry has
        self._counted = Acceptance()  # by entries, of all drafts
        self._minutes: deque[tuple[int, Acceptance]] = deque()  # of the last hour, those with drafts
        self._has_fallen = False

    @property
    def has_fallen(self) -> bool:
        """Whether fewer than half as many are right as were; not of a pod that has been idle for an hour."""
        return self._has_fallen and self._now() < self._minute + _HOUR

    def observe(self, figures: DraftFigures) -> Change | None:
        """Takes the counts since the engine's start. Returns what has changed by that, at most once a minute."""
        minute = self._now()
        if minute == self._minute:
            return None
        num_verified, num_accepted = self._counted
        new = Acceptance(figures.num_verified - num_verified, figures.num_accepted - num_accepted)
        if new.num_verified:
            self._minutes.append((self._minute, new))
            self._counted = Acceptance(figures.num_verified, figures.num_accepted)
        self._minute = minute
        while self._minutes and self._minutes[0][0] < minute - _HOUR:
            self._minutes.popleft()
        return self._compare(minute)

    def _compare(self, minute: int) -> Change | None:
        recent, before = Acceptance(), Acceptance()
        for _, each in self._minutes:
            before = before.plus(each)
        if not before.num_verified:
            self._has_fallen = False
        for at, each in reversed(self._minutes):
            if at < minute - _MOST_RECENT:
                return None
            recent = recent.plus(each)
            before = Acceptance(before.num_verified - each.num_verified, before.num_accepted - each.num_accepted)
            if at > minute - _LEAST_RECENT or before.num_verified < _LEAST_BEFORE:
                continue
            expected = before.share * recent.num_verified
            if not self._has_fallen and expected >= _LEAST_EXPECTED:
                return self._turn(recent, before, has_fallen=recent.num_accepted < _FALLEN * expected)
            if self._has_fallen and recent.num_verified >= _LEAST_VERIFIED:
                return self._turn(recent, before, has_fallen=recent.num_accepted < _RECOVERED * expected)
        return None

    def _turn(self, recent: Acceptance, before: Acceptance, *, has_fallen: bool) -> Change | None:
        if has_fallen == self._has_fallen:
            return None
        self._has_fallen = has_fallen
        return Change(has_fallen, recent, before)

    def _now(self) -> int:
        return int(self._clock() // _MINUTE_S)

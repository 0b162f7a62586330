"""Phases of the step loop: the thread is in exactly one at any time, so they add up to wall time."""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from typing import Protocol

from common.engine.contract.step import SchedulerOutput
from common.engine.messages import PhaseSeconds


class Phase(enum.IntEnum):
    """A phase of the step loop, in the order of the fields of PhaseSeconds, which describe them."""

    SCHEDULE = 0
    PREPARE = 1
    FORWARD = 2
    SAMPLE = 3
    DEVICE = 4
    UPDATE = 5
    TRANSFER = 6
    WAIT = 7


class StepObserver(Protocol):
    """Hears of phases and steps while a profile is taken. Called on the step loop's thread."""

    def begin_phase(self, phase: Phase) -> None:
        """A phase begins, and the one before it ends."""

    def begin_step(self, step: SchedulerOutput) -> None:
        """The step is about to be submitted."""

    def end_step(self) -> None:
        """It was submitted."""


class PhaseClock:
    """Adds up the seconds of each phase. Used on one thread; a change of phase reads the clock once."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.observer: StepObserver | None = None
        self._clock = clock
        self._seconds = [0.0] * len(Phase)
        self._phase = Phase.WAIT
        self._since = clock()

    def enter(self, phase: Phase) -> Phase:
        """Ends the phase under way, which it returns, and begins `phase`."""
        now, ended = self._clock(), self._phase
        self._seconds[ended] += now - self._since
        self._since, self._phase = now, phase
        if self.observer is not None and phase is not ended:
            self.observer.begin_phase(phase)
        return ended

    def seconds(self) -> PhaseSeconds:
        """Returns the totals since the start, the phase under way included."""
        self.enter(self._phase)
        return PhaseSeconds(*self._seconds)

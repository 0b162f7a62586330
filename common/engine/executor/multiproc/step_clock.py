"""A rank's figures of itself: see RankFigures."""

from __future__ import annotations

import os
import time

from common.engine.messages import RankFigures

_INTERVAL_S = 1.0
_SCHEDULED = "/proc/thread-self/schedstat"  # nanoseconds on a core, and without one though ready
_MEMORY = "/proc/self/statm"  # pages; the second is resident ones


class StepClock:
    """Adds up the time of steps. Used by the thread that runs steps."""

    def __init__(self, rank: int) -> None:
        self.device = ""  # once the model is loaded
        self._rank = rank
        self._num_steps = 0
        self._step_s = 0.0
        self._computing_s, self._delayed_s = _scheduled()
        self._due = 0.0

    def step_ended(self, began: float, ended: float) -> RankFigures | None:
        """Takes note of a step, from and to these seconds of time.perf_counter. Returns figures once a second."""
        self._num_steps += 1
        self._step_s += ended - began
        if ended < self._due:
            return None
        self._due = ended + _INTERVAL_S
        computing_s, delayed_s = _scheduled()
        with open(_MEMORY, encoding="ascii") as file:
            num_pages = int(file.read().split()[1])
        return RankFigures(
            rank=self._rank,
            pid=os.getpid(),
            device=self.device,
            resident_bytes=num_pages * os.sysconf("SC_PAGE_SIZE"),
            num_steps=self._num_steps,
            step_s=self._step_s,
            computing_s=computing_s - self._computing_s,
            delayed_s=delayed_s - self._delayed_s,
        )

    def begin(self) -> None:
        """Forgets what was before: loading, and steps that were measured."""
        self._num_steps, self._step_s, self._due = 0, 0.0, 0.0
        self._computing_s, self._delayed_s = _scheduled()


def _scheduled() -> tuple[float, float]:
    """Seconds on a core, and waiting for one; zeros where the kernel does not count them."""
    try:
        with open(_SCHEDULED, encoding="ascii") as file:
            on_core, delayed, _ = file.read().split()
    except FileNotFoundError:
        return time.thread_time(), 0.0
    return int(on_core) / 1e9, int(delayed) / 1e9

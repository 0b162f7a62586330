"""Marks of steps and phases in a trace: ranges that contain the operators of the step loop's thread."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.profiler import record_function

from common.engine.contract.step import SchedulerOutput
from common.engine.phases import Phase


class StepMarks:
    """See StepObserver. Counts the steps that compute something."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.num_tokens = 0
        self._open: list[Any] = []  # ranges, the innermost last
        self._is_in_step = False

    def begin_phase(self, phase: Phase) -> None:
        """See StepObserver."""
        self._close(int(self._is_in_step))
        self._begin(phase.name.lower())

    def begin_step(self, step: SchedulerOutput) -> None:
        """See StepObserver."""
        self._close(0)
        if step.num_scheduled_tokens:
            self.num_steps += 1
            self.num_tokens += step.total_num_scheduled_tokens
            self._begin(f"step {self.num_steps}: {describe(step)}")
            self._is_in_step = True

    def end_step(self) -> None:
        """See StepObserver."""
        self.close()

    def close(self) -> None:
        """Ends what has begun."""
        self._close(0)
        self._is_in_step = False

    def _begin(self, name: str) -> None:
        opened = record_function(name)
        opened.__enter__()  # type: ignore[no-untyped-call]
        self._open.append(opened)

    def _close(self, num_left: int) -> None:
        while len(self._open) > num_left:
            self._open.pop().__exit__(None, None, None)


def describe(step: SchedulerOutput) -> str:
    """ "3 decodes, 1 prompt chunk of 256 tokens"."""
    sizes = Counter(step.num_scheduled_tokens.values())
    num_decodes = sizes.pop(1, 0)
    num_chunks = sizes.total()
    parts = [f"{num_decodes} decode{'s' * (num_decodes != 1)}"] if num_decodes else []
    if num_chunks:
        num_tokens = sum(size * count for size, count in sizes.items())
        parts.append(f"{num_chunks} prompt chunk{'s' * (num_chunks != 1)} of {num_tokens} tokens")
    return ", ".join(parts)

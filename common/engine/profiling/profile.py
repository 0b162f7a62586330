"""The step loop's side of a profile."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from torch.profiler import ProfilerActivity, profile

from common.engine.messages import CallResult, PhaseSeconds, ProfileReport, StartProfile
from common.engine.phases import PhaseClock
from common.engine.profiling.marks import StepMarks
from common.engine.profiling.trace_file import TraceFile

logger = logging.getLogger(__name__)

MAX_EVENTS = 500_000  # of a trace: about 10 MB compressed, and 130 MB in a viewer
# Of a window; an event takes 2 to 5 us to stop and 1.3 KB of memory until it is written. On a GPU starting and stopping
# takes long by itself.
_CPU_WINDOW_EVENTS = 10_000
_GPU_WINDOW_EVENTS = 100_000


class Profile:
    """One profile, until its last window is handed over to be written. Used on the step loop's thread.

    No failure of the profiler ends the engine: it is the profile's answer.
    """

    def __init__(self, command: StartProfile, phases: PhaseClock, emit: Callable[[CallResult], None]) -> None:
        """Starts it. `emit` gets the answer, on any thread."""
        self.call_id = command.call_id
        self._emit = emit
        self._max_steps = command.max_steps
        self._deadline = time.monotonic() + command.seconds
        self._file = TraceFile(Path(command.directory), self._answer)
        self._recording = _Recording(phases, self._file)
        self._ended_by: Literal["seconds", "steps", "events"] = "seconds"
        self._is_over = False
        self._attempt(self._recording.start)

    @property
    def remaining_s(self) -> float:
        """Seconds until it is over."""
        return max(0.0, self._deadline - time.monotonic())

    def check(self) -> bool:
        """Called after each step, and when the time is over. True: it has ended, and must not be used any more."""
        if self._is_over:
            return True
        if self._max_steps and self._recording.num_steps >= self._max_steps:
            self._ended_by = "steps"
        elif self._file.num_events >= MAX_EVENTS:
            self._ended_by = "events"
        elif self.remaining_s:
            if self._recording.is_window_full:
                self._attempt(self._recording.next_window)
            return self._is_over
        self._attempt(self._end)
        return True

    def cancel(self, reason: str) -> None:
        """Ends it; the answer is an error."""
        self._attempt(self._recording.discard)
        if not self._is_over:
            self._finish(f"no profile: {reason}")

    def _end(self) -> None:
        self._recording.stop()
        self._finish()

    def _attempt(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            logger.exception("a profile failed")
            self._finish(f"the profiler failed: {type(error).__name__}: {error}")

    def _finish(self, error: str = "") -> None:
        self._is_over = True
        self._recording.detach()
        try:
            self._file.finish(error)
        except queue.Full:  # its thread hangs in a write; the client has a deadline of its own
            logger.error("a profile cannot be written")

    def _answer(self, error: str) -> None:
        """Called on the thread that writes, when the recording has ended."""
        recording = self._recording
        report = ProfileReport(
            seconds=recording.seconds,
            paused_s=recording.paused_s,
            num_steps=recording.num_steps,
            num_tokens=recording.num_tokens,
            num_events=self._file.num_events,
            ended_by=self._ended_by,
            phases=PhaseSeconds(*recording.phase_seconds),
        )
        self._emit(CallResult(call_id=self.call_id, result=None if error else report, error=error))


class _Recording:
    """torch's profiler, stopped and started again at each end of a window, and the figures of what it has recorded."""

    def __init__(self, phases: PhaseClock, file: TraceFile) -> None:
        self.seconds = 0.0
        self.paused_s = 0.0
        self.phase_seconds = [0.0] * len(PhaseSeconds.__struct_fields__)
        self._phases = phases
        self._file = file
        self._marks = StepMarks()
        self._activities = [ProfilerActivity.CPU]
        self._window_events = _CPU_WINDOW_EVENTS
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._activities.append(ProfilerActivity.CUDA)
            self._window_events = _GPU_WINDOW_EVENTS
        self._profiler: profile | None = None
        self._began = 0.0
        self._phases_before = PhaseSeconds()
        self._steps_before = 0

    @property
    def num_steps(self) -> int:
        """Steps that computed something."""
        return self._marks.num_steps

    @property
    def num_tokens(self) -> int:
        """Tokens that they computed."""
        return self._marks.num_tokens

    @property
    def is_window_full(self) -> bool:
        """Whether the window has about as many events as it should, judged by those that are written already."""
        return (self.num_steps - self._steps_before) * self._file.events_per_step >= self._window_events

    def start(self) -> None:
        """Begins a window."""
        profiler = profile(activities=self._activities)
        profiler.start()
        self._profiler = profiler
        self._steps_before = self.num_steps
        self._phases_before = self._phases.seconds()
        self._began = time.monotonic()
        self._phases.observer = self._marks

    def stop(self) -> None:
        """Ends the window."""
        profiler = self._profiler
        if profiler is None:
            return
        self.seconds += time.monotonic() - self._began
        before, after = self._phases_before, self._phases.seconds()
        for index, name in enumerate(PhaseSeconds.__struct_fields__):
            self.phase_seconds[index] += getattr(after, name) - getattr(before, name)
        self.detach()
        profiler.stop()
        self._file.add(profiler, self.num_steps - self._steps_before)

    def next_window(self) -> None:
        """Ends the window, and begins the next."""
        began = time.monotonic()
        self.stop()
        self.start()
        self.paused_s += time.monotonic() - began

    def discard(self) -> None:
        """Ends the window, which is not written."""
        profiler = self._profiler
        self.detach()
        if profiler is not None:
            profiler.stop()

    def detach(self) -> None:
        """Marks no more steps. Idempotent."""
        self._phases.observer = None
        self._profiler = None
        self._marks.close()

"""The ends of a worker's steps on a device that computes while the host goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from common.engine.contract.step import Fence


class Event(Protocol):
    """A torch.cuda.Event as it is used here."""

    def record(self) -> None:
        """It comes after the work on the calling thread's current stream."""

    def query(self) -> bool:
        """Whether the device has come so far."""

    def wait(self) -> None:
        """Later work on the calling thread's current stream begins after it."""


class DeviceFences:
    """See StepFences. Keeps an event for each step that the device may not have finished."""

    def __init__(self, create_event: Callable[[], Event] = torch.cuda.Event) -> None:
        self._create_event = create_event
        self._events: dict[Fence, Event] = {}  # the oldest step first
        self._num_steps = 0

    def record(self) -> Fence:
        """See StepFences."""
        for fence, event in [*self._events.items()]:
            if not event.query():
                break
            del self._events[fence]
        self._num_steps += 1
        self._events[self._num_steps] = event = self._create_event()
        event.record()
        return self._num_steps

    def is_over(self, fence: Fence) -> bool:
        """See Fences."""
        event = self._events.get(fence)
        return event is None or event.query()

    def wait(self, fence: Fence) -> None:
        """See Fences."""
        event = self._events.get(fence)
        if event is not None:
            event.wait()

"""Kernel calls as one: recorded once, then run one after the other without Python in between."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from common.engine.devices.cpu.kernels import compiled
from common.engine.devices.cpu.kernels.compiled import Recording
from common.engine.devices.cpu.kernels.threads import Calls


class Program:
    """Recorded calls. All that they read and write stays where it is; called on one thread."""

    def __init__(self, recording: Recording) -> None:
        self._kept = recording
        self._calls = Calls([ctypes.addressof(call.block) for call in recording.calls])
        self._num_threads = max((call.num_threads for call in recording.calls), default=1)

    def run(self) -> None:
        """Does what was recorded again. Raises what its checks raise."""
        self._calls.run(self._num_threads)
        for check in self._kept.checks:
            check()


class Workspace:
    """Memory for the results of recorded calls: two places in turn, as each is read by the next call only. Programs
    that do not run at once may share it."""

    def __init__(self, max_rows: int) -> None:
        """`max_rows`: the most that a result has."""
        self._max_rows = max_rows
        self._places = [torch.empty(0, dtype=torch.uint8)] * 2
        self._turn = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that is valid until the second take from here."""
        self._turn = 1 - self._turn
        rows, row_bytes = shape[0], torch.Size(shape[1:]).numel() * dtype.itemsize
        if len(self._places[self._turn]) < self._max_rows * row_bytes:  # programs keep the place that they use
            self._places[self._turn] = torch.empty(self._max_rows * row_bytes, dtype=torch.uint8)
        return self._places[self._turn][: rows * row_bytes].view(dtype).view(shape)


@contextmanager
def recording(workspace: Workspace) -> Iterator[Recording]:
    """Calls of this thread are recorded instead of being run. Work that cannot be raises CannotRecordError."""
    recorded = Recording(workspace.take)
    with compiled.recorded_by(recorded):
        yield recorded

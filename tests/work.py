"""Work counted instead of timed: how many lines of Python run, whatever the machine does beside."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine
from types import FrameType, ModuleType
from typing import Any, Self, TypeVar

_T = TypeVar("_T")


class LineCounter:
    """Counts the lines that this thread runs in some modules. A context."""

    def __init__(self, *modules: ModuleType) -> None:
        self.num_lines = 0
        self._files = {module.__file__ for module in modules}

    def __enter__(self) -> Self:
        self._previous = sys.gettrace()
        sys.settrace(self._trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._previous)

    async def most_in_a_turn(self, work: Coroutine[Any, Any, _T]) -> tuple[int, _T]:
        """Runs `work`. Returns how many lines ran in the busiest turn of the event loop, and what `work` returned."""
        task, most, num_before = asyncio.create_task(work), 0, self.num_lines
        while not task.done():
            await asyncio.sleep(0)
            most, num_before = max(most, self.num_lines - num_before), self.num_lines
        return most, await task

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        if event == "line":
            self.num_lines += 1
        return self._trace

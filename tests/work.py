"""Work counted instead of timed: how many lines of Python run, whatever the machine does beside."""

from __future__ import annotations

import sys
from types import FrameType, ModuleType
from typing import Any, Self


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

    def _trace(self, frame: FrameType, event: str, _: object) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        if event == "line":
            self.num_lines += 1
        return self._trace

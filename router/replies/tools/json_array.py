"""Calls where a grammar forces them: the answer is `[{"name": ..., "arguments": {...}}, ...]`."""

from __future__ import annotations

from collections.abc import Generator

from router.replies.tools.base import ReadingParser


class JsonArrayParser(ReadingParser):
    """See ToolParser."""

    def _read(self) -> Generator[None, None, None]:
        self._begin()
        yield from self._skip_spaces()
        yield from self._take_array()
        yield from self._take_rest()

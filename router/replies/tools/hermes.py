"""Calls of Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

from __future__ import annotations

from collections.abc import Generator

from router.replies.tools.base import ReadingParser, ToolCall, read_call

_OPEN = "<tool_call>"
_CLOSE = "</tool_call>"


class HermesParser(ReadingParser):
    """See ToolParser."""

    markers = (_OPEN, _CLOSE)  # special tokens in some vocabularies

    def _read(self) -> Generator[None, None, None]:
        yield from self._read_calls(_OPEN, self._take_call)

    def _take_call(self) -> Generator[None, None, ToolCall | None]:
        yield from self._skip_spaces()
        text = yield from self._take_object()
        call = None if text is None else read_call(text)
        if call is None:
            return None
        yield from self._skip_spaces()
        return call if (yield from self._takes(_CLOSE)) else None

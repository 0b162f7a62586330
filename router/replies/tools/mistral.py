"""Calls of Mistral's models, in the two forms that they have had:

[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]
[TOOL_CALLS]name[CALL_ID]id[ARGS]{...}               the id, its marker and [ARGS] may be absent
"""

from __future__ import annotations

from collections.abc import Generator

from router.replies.tools.base import ReadingParser, ToolCall

_OPEN = "[TOOL_CALLS]"
_ID = "[CALL_ID]"
_ARGS = "[ARGS]"


class MistralParser(ReadingParser):
    """See ToolParser."""

    markers = (_OPEN, _ID, _ARGS)

    @classmethod
    def call_id(cls, digest: str) -> str:
        """Nine letters or digits; Mistral's templates take no other."""
        return digest[:9]

    def _read(self) -> Generator[None, None, None]:
        while (yield from self._take_text_until(_OPEN)):
            yield from self._skip_spaces()
            if (yield from self._sees("[")):
                yield from self._take_array()
                continue
            call = yield from self._take_call()
            if call is None:
                self._give_back()
            else:
                self._add(call)
                self._drop()

    def _take_call(self) -> Generator[None, None, ToolCall | None]:
        name = yield from self._take_name()
        if not name:
            return None
        for _ in (_ID, _ARGS):
            if not (yield from self._sees("[")):
                break
            self._at += 1
            if (yield from self._sees(_ARGS[1])):
                if not (yield from self._takes(_ARGS[1:])):
                    return None
                break
            if not (yield from self._takes(_ID[1:])):
                return None
            yield from self._take_name()
        yield from self._skip_spaces()
        arguments = yield from self._take_object()
        return None if arguments is None else ToolCall(name, arguments)

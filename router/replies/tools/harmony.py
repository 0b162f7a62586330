"""Calls in OpenAI's Harmony format: messages with a recipient, all that `router.replies.harmony` leaves of it:

<|channel|>commentary to=functions.name<|message|>{...}<|call|>         the last marker may be absent
"""

from __future__ import annotations

from collections.abc import Generator

from router.replies.harmony import CALL, CHANNEL, MARKERS, MESSAGE, recipient_of
from router.replies.tools.base import MAX_NAME_CHARS, ReadingParser, ToolCall

_NAMESPACE = "functions."
_MAX_HEADER = MAX_NAME_CHARS + 256


class HarmonyParser(ReadingParser):
    """See ToolParser."""

    markers = MARKERS

    def _read(self) -> Generator[None, None, None]:
        while (yield from self._take_text_until(CHANNEL)):
            call = yield from self._take_call()
            if call is None:
                self._give_back()
                continue
            self._add(call)
            yield from self._skip_spaces()
            if (yield from self._takes(CALL)):
                self._drop()
            else:
                self._give_back()

    def _take_call(self) -> Generator[None, None, ToolCall | None]:
        header = yield from self._take_up_to(MESSAGE, _MAX_HEADER)
        name = recipient_of(header or "").removeprefix(_NAMESPACE)
        if not 0 < len(name) <= MAX_NAME_CHARS:
            return None
        yield from self._skip_spaces()
        arguments = yield from self._take_object()
        return None if arguments is None else ToolCall(name, arguments)

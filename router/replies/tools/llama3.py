"""Calls of Llama 3: the answer is `{"name": ..., "parameters": {...}}`, or several with `;` between them.

As any JSON may be an answer, only an object that names one of the request's tools is a call.
"""

from __future__ import annotations

from collections.abc import Generator

from router.replies.tools.base import ReadingParser, read_call

_TAG = "<|python_tag|>"


class Llama3JsonParser(ReadingParser):
    """See ToolParser."""

    markers = (_TAG,)

    def _read(self) -> Generator[None, None, None]:
        self._begin()
        yield from self._skip_spaces()
        if (yield from self._sees("<")) and not (yield from self._takes(_TAG)):
            self._give_back()
        else:
            yield from self._take_calls()
        yield from self._take_rest()

    def _take_calls(self) -> Generator[None, None, None]:
        while True:
            yield from self._skip_spaces()
            text = yield from self._take_object()
            call = None if text is None else read_call(text)
            if call is None or call.name not in self.tools:
                return self._give_back()
            self._add(call)
            yield from self._skip_spaces()
            if (yield from self._sees(";,")):
                self._at += 1

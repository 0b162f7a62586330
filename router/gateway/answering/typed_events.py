"""Streams of typed events, in which an answer is a row of blocks, each opened, added to and closed."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from router.dispatching.text_generation import TextDelta
from router.gateway.answering.answer_format import AnswerFormat
from router.replies.reply import Call, Part
from router.wire.one_line import encode_line


class TypedEventsFormat(AnswerFormat):
    """Answers of one choice. A call is a block of its own; text and reasoning go on while nothing else comes."""

    is_always_parsed = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._open: type[Part] | None = None  # kind of the block that is being streamed

    def parts_chunk(
        self,
        index: int,
        delta: TextDelta,
        parts: Sequence[Part],
        finish_label: str | None,
        usage: dict[str, Any] | None,
    ) -> bytes:
        """See AnswerFormat."""
        events = b"".join([event for part in parts for event in self._events_of(part)])
        if finish_label is None:
            return events
        return events + self._finish(finish_label, delta.stop_reason, usage)

    def _events_of(self, part: Part) -> Iterator[bytes]:
        if self._open is not type(part) or isinstance(part, Call):
            yield from self._close()
            self._open = type(part)
            yield from self._begin(part)
        yield from self._gain(part)

    @abstractmethod
    def _finish(self, finish_label: str, stop_reason: str | int | None, usage: dict[str, Any] | None) -> bytes:
        """Events after the last part, of which more may follow in `end`. `usage`: the token counts."""

    @abstractmethod
    def _begin(self, part: Part) -> Iterator[bytes]:
        """Opens a block of this kind, which is in `_open`."""

    @abstractmethod
    def _gain(self, part: Part) -> Iterator[bytes]:
        """Adds to the open block."""

    @abstractmethod
    def _close(self) -> Iterator[bytes]:
        """Closes the open block, if there is one."""


def typed_event(kind: str, **fields: Any) -> bytes:
    """One event."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_line({"type": kind, **fields}))

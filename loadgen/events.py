"""OpenAI's streams: server-sent events whose data are chunks of an answer."""

from __future__ import annotations

from typing import Any

import msgspec

from common.errors import quoted
from loadgen.http_client import RequestFailed

_MAX_EVENT_BYTES = 16 * 2**20
_DONE = b"[DONE]"


class EventReader:
    """Cuts a body into the data of its events. Comments, names and ids of events are skipped."""

    def __init__(self) -> None:
        self._rest = b""  # of an event that is not complete

    def feed(self, data: bytes) -> list[bytes]:
        """Returns the data of the events that are complete. Raises RequestFailed if one is too long."""
        text = self._rest + data
        if b"\r" in text:
            text = text.replace(b"\r\n", b"\n")
        *events, self._rest = text.split(b"\n\n")
        if len(self._rest) > _MAX_EVENT_BYTES:
            raise RequestFailed("invalid response", f"an event has more than {_MAX_EVENT_BYTES} bytes")
        return [payload for event in events if (payload := _data_of(event))]


def _data_of(event: bytes) -> bytes:
    if event.startswith(b"data: ") and b"\n" not in event:
        return event[6:]
    lines = (line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:"))
    return b"\n".join(lines)


class _CompletionDetails(msgspec.Struct):
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class Usage(msgspec.Struct):
    """Counts of tokens, as the endpoint says them."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    completion_tokens_details: _CompletionDetails | None = None

    @property
    def num_accepted_drafts(self) -> int:
        """Tokens of the answer that were guessed before they were computed."""
        details = self.completion_tokens_details
        return 0 if details is None else details.accepted_prediction_tokens or 0

    @property
    def num_rejected_drafts(self) -> int:
        """Tokens that were guessed and are not part of the answer."""
        details = self.completion_tokens_details
        return 0 if details is None else details.rejected_prediction_tokens or 0


class _Delta(msgspec.Struct):
    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None  # of a completion
    delta: _Delta | None = None  # of a chat
    finish_reason: str | None = None

    @property
    def is_role_only(self) -> bool:
        """Whether it opens an answer and brings nothing of it."""
        delta = self.delta
        if delta is None or delta.role is None or self.finish_reason is not None:
            return False
        return not (delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class _Chunk(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: Usage | None = None
    error: Any = None


class AnswerReader:
    """Reads a streamed answer of one choice.

    A chunk counts as tokens if it has a choice, also with empty text, as that of a token without a character of its
    own. The chunk of a chat that brings nothing but the role does not.
    """

    _decoder = msgspec.json.Decoder(_Chunk)

    def __init__(self) -> None:
        self.times: list[float] = []  # of the chunks with tokens
        self.usage = Usage()
        self.is_complete = False
        self._events = EventReader()
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The answer so far, without reasoning."""
        return "".join(self._texts)

    def feed(self, data: bytes, arrived_s: float) -> None:
        """Takes a part of the body. Raises RequestFailed if it has an error, or is no stream of chunks."""
        for payload in self._events.feed(data):
            if payload == _DONE:
                self.is_complete = True
            else:
                self._take(payload, arrived_s)

    def _take(self, payload: bytes, arrived_s: float) -> None:
        try:
            chunk = self._decoder.decode(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RequestFailed("invalid response", f"a chunk of the stream is not valid: {error}") from error
        if chunk.error is not None:
            raise RequestFailed("error in stream", error_text(chunk.error))
        if chunk.usage is not None:
            self.usage = chunk.usage
        for choice in chunk.choices or ():
            self._texts.append((choice.text if choice.delta is None else choice.delta.content) or "")
            self.is_complete = self.is_complete or choice.finish_reason is not None
            if not choice.is_role_only:
                self.times.append(arrived_s)


def error_text(error: object) -> str:
    """Returns the message of an error object of OpenAI's API."""
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) and message else quoted(error)


def error_in(body: bytes) -> str:
    """Returns what the body of an answer with an error status says."""
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return quoted(body[:400].decode("utf-8", "replace")) if body else "no body"
    return error_text(document.get("error", document) if isinstance(document, dict) else document)

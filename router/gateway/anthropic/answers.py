"""Answers of POST /v1/messages, whole and as events."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
from msgspec import Raw

from common.errors import BatonError
from router.gateway.answering.answer_format import Answer
from router.gateway.answering.typed_events import TypedEventsFormat, typed_event
from router.replies.part_runs import Run, runs_of
from router.replies.reply import Call, Part, Reasoning, Text
from router.wire.answer_struct import AnswerStruct
from router.wire.errors import anthropic_error_events

_STOP_REASONS: Mapping[str | None, str | None] = {
    None: None,
    "stop": "end_turn",
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "abort": "end_turn",
}


class AnthropicUsage(AnswerStruct):
    """Token counts; tokens from the cache are not among those of the input."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(AnswerStruct):
    """Answer of POST /v1/messages, unless it is streamed. Blocks are `text`, `thinking` or `tool_use`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage


class MessagesFormat(TypedEventsFormat):
    """/v1/messages. Its answers have one choice."""

    object_name = "message"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._num_blocks = 0  # of the stream so far

    def whole(self, answers: Sequence[Answer], echoes: Sequence[str], usage: dict[str, Any]) -> list[bytes]:
        """See AnswerFormat."""
        (answer,) = answers
        content = [_block(run) for run in runs_of(answer.parts)]
        ending = _ending(answer.finish_label, answer.stop_reason)
        return [msgspec.json.encode({**self._message, "content": content, **ending, "usage": _usage(usage)})]

    def opening(
        self, index: int, usage: dict[str, Any] | None = None, prompt_token_ids: Sequence[int] | None = None
    ) -> bytes:
        """See AnswerFormat."""
        assert usage is not None
        message = {**self._message, "content": [], **_ending(None, None), "usage": _usage(usage)}
        return typed_event("message_start", message=message)

    def _finish(self, finish_label: str, stop_reason: str | int | None, usage: dict[str, Any] | None) -> bytes:
        assert usage is not None
        ending = typed_event("message_delta", delta=_ending(finish_label, stop_reason), usage=_usage(usage))
        return b"".join([*self._close(), ending])

    def end(self, usage: dict[str, Any]) -> bytes:
        """See AnswerFormat."""
        return typed_event("message_stop")

    def error_events(self, error: BatonError) -> bytes:
        """See AnswerFormat."""
        return anthropic_error_events(error)

    @property
    def _message(self) -> dict[str, Any]:
        return {
            "id": self._identity["id"], "type": "message", "role": "assistant", "model": self._identity["model"],
        }  # fmt: skip

    def _begin(self, part: Part) -> Iterator[bytes]:
        yield typed_event("content_block_start", index=self._num_blocks, content_block=_empty_block(part))

    def _gain(self, part: Part) -> Iterator[bytes]:
        match part:
            case Text():
                delta = {"type": "text_delta", "text": part.text}
            case Reasoning():
                delta = {"type": "thinking_delta", "thinking": part.text}
            case Call():
                delta = {"type": "input_json_delta", "partial_json": part.arguments}
        yield typed_event("content_block_delta", index=self._num_blocks, delta=delta)

    def _close(self) -> Iterator[bytes]:
        if self._open is not None:
            yield typed_event("content_block_stop", index=self._num_blocks)
            self._num_blocks += 1
            self._open = None


def _empty_block(part: Part) -> dict[str, Any]:
    match part:
        case Text():
            return _block(Text(""))
        case Reasoning():
            return _block(Reasoning(""))
        case Call():
            return _block(part._replace(arguments="{}"))


def _block(run: Run) -> dict[str, Any]:
    match run:
        case Text():
            return {"type": "text", "text": run.text}
        case Reasoning():
            return {"type": "thinking", "thinking": run.text, "signature": ""}
        case Call():
            return {"type": "tool_use", "id": run.call_id, "name": run.name, "input": Raw(run.arguments.encode())}


def _ending(finish_label: str | None, stop: str | int | None) -> dict[str, Any]:
    reason = _STOP_REASONS[finish_label]
    if isinstance(stop, int):  # the client named no token
        stop = None
    if stop is not None and reason == "end_turn":
        reason = "stop_sequence"
    return {"stop_reason": reason, "stop_sequence": stop}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    """Counts tokens like Anthropic: those from the cache are not among those of the input."""
    num_cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": usage["prompt_tokens"] - num_cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": usage["completion_tokens"],
    }

"""Answers of POST /v1/responses, whole and as typed events."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from common.errors import BatonError
from router.gateway.answering.answer_format import Answer
from router.gateway.answering.typed_events import TypedEventsFormat, typed_event
from router.replies.part_runs import Run, runs_of
from router.replies.reply import Call, Part, Reasoning, Text
from router.wire.answer_struct import AnswerStruct

_INCOMPLETE = {"length": "max_output_tokens"}


class CachedTokens(AnswerStruct):
    """The sources of the prompt's KV."""

    cached_tokens: int


class OutputTokensDetails(AnswerStruct):
    """The kinds of the answer's tokens."""

    reasoning_tokens: int


class ResponseUsage(AnswerStruct):
    """Token counts."""

    input_tokens: int
    input_tokens_details: CachedTokens
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Response(msgspec.Struct):
    """Answer of POST /v1/responses, unless it is streamed; it also repeats fields of the request. Items are `message`,
    `reasoning` or `function_call`."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["completed", "incomplete", "in_progress"]
    error: None
    incomplete_details: dict[str, str] | None
    output: list[dict[str, Any]]
    usage: ResponseUsage | None


class ResponsesFormat(TypedEventsFormat):
    """/v1/responses. Its answers have one choice."""

    object_name = "response"

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._sequence = itertools.count()
        self._done: list[dict[str, Any]] = []  # items of the stream that are complete
        self._text: list[str] = []  # text of the item that is being streamed
        self._finish_label: str | None = None

    def whole(self, answers: Sequence[Answer], echoes: Sequence[str], usage: dict[str, Any]) -> list[bytes]:
        """See AnswerFormat."""
        (answer,) = answers
        runs = list(runs_of(answer.parts))
        output = [self._item(run, number) for number, run in enumerate(runs)]
        if runs and not isinstance(runs[-1], Call):
            output[-1]["status"] = _status_of_last(answer.finish_label)
        return [msgspec.json.encode(self._response(answer.finish_label, output, usage))]

    def opening(
        self, index: int, usage: dict[str, Any] | None = None, prompt_token_ids: Sequence[int] | None = None
    ) -> bytes:
        """See AnswerFormat."""
        response = self._response(None, [], None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def _finish(self, finish_label: str, stop_reason: str | int | None, usage: dict[str, Any] | None) -> bytes:
        self._finish_label = finish_label
        return b""

    def end(self, usage: dict[str, Any]) -> bytes:
        """See AnswerFormat."""
        closing = b"".join(self._close())
        response = self._response(self._finish_label, self._done, usage)
        return closing + self._event(f"response.{response['status']}", response=response)

    def error_events(self, error: BatonError) -> bytes:
        """See AnswerFormat."""
        return self._event("error", code=error.code.label, message=error.message, param=error.param)

    def _gain(self, part: Part) -> Iterator[bytes]:
        where = self._where
        match part:
            case Text():
                self._text.append(part.text)
                yield self._event("response.output_text.delta", **where, content_index=0, delta=part.text, logprobs=[])
            case Reasoning():
                self._text.append(part.text)
                yield self._event("response.reasoning_text.delta", **where, content_index=0, delta=part.text)
            case Call():
                yield self._event("response.function_call_arguments.delta", **where, delta=part.arguments)
                yield self._event(
                    "response.function_call_arguments.done", **where, name=part.name, arguments=part.arguments
                )
                yield from self._finish_item(self._item(part, len(self._done)))

    def _begin(self, part: Part) -> Iterator[bytes]:
        number = len(self._done)
        self._text = []
        empty: Run = part._replace(arguments="") if isinstance(part, Call) else type(part)("")
        item = self._item(empty, number, status="in_progress")
        if not isinstance(part, Call):
            item["content"] = []
        yield self._event("response.output_item.added", output_index=number, item=item)
        if not isinstance(part, Call):
            yield self._event("response.content_part.added", **self._where, content_index=0, part=_content(empty))

    def _close(self) -> Iterator[bytes]:
        """Ends the item of text or reasoning that is open."""
        if self._open is None:
            return
        text, where = "".join(self._text), self._where
        run: Run = Reasoning(text) if self._open is Reasoning else Text(text)
        if isinstance(run, Text):
            yield self._event("response.output_text.done", **where, content_index=0, text=text, logprobs=[])
        else:
            yield self._event("response.reasoning_text.done", **where, content_index=0, text=text)
        yield self._event("response.content_part.done", **where, content_index=0, part=_content(run))
        yield from self._finish_item(self._item(run, len(self._done), _status_of_last(self._finish_label)))

    def _finish_item(self, item: dict[str, Any]) -> Iterator[bytes]:
        yield self._event("response.output_item.done", output_index=len(self._done), item=item)
        self._done.append(item)
        self._open = None

    @property
    def _where(self) -> dict[str, Any]:
        """The open item."""
        number = len(self._done)
        return {"item_id": self._item_id(self._open or Text, number), "output_index": number}

    def _item(self, run: Run, number: int, status: str = "completed") -> dict[str, Any]:
        item: dict[str, Any] = {"id": self._item_id(type(run), number), "status": status}
        match run:
            case Text():
                return {**item, "type": "message", "role": "assistant", "content": [_content(run)]}
            case Reasoning():
                return {**item, "type": "reasoning", "summary": [], "content": [_content(run)]}
            case Call():
                called = {"call_id": run.call_id, "name": run.name, "arguments": run.arguments}
                return {**item, "type": "function_call", **called}

    def _item_id(self, kind: type[Part], number: int) -> str:
        prefix = {Text: "msg", Reasoning: "rs", Call: "fc"}[kind]
        return f"{prefix}_{self._identity['id']}_{number}"

    def _response(
        self, finish_label: str | None, output: Sequence[dict[str, Any]], usage: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        reason = None if finish_label is None else _INCOMPLETE.get(finish_label)
        status = "in_progress" if usage is None else "completed" if reason is None else "incomplete"
        return {
            "id": self._identity["id"],
            "object": "response",
            "created_at": self._identity["created"],
            "model": self._identity["model"],
            "status": status,
            "error": None,
            "incomplete_details": None if reason is None else {"reason": reason},
            "output": output,
            "usage": None if usage is None else _usage(usage),
            **self._echoed,
        }

    def _event(self, kind: str, **fields: Any) -> bytes:
        return typed_event(kind, sequence_number=next(self._sequence), **fields)


def _status_of_last(finish_label: str | None) -> str:
    """Returns the status of the item of text or reasoning with which the answer ends, or, while it goes on, of an item
    before that."""
    return "incomplete" if finish_label in _INCOMPLETE else "completed"


def _content(run: Run) -> dict[str, Any]:
    if isinstance(run, Reasoning):
        return {"type": "reasoning_text", "text": run.text}
    assert isinstance(run, Text)
    return {"type": "output_text", "text": run.text, "annotations": [], "logprobs": []}


def _usage(usage: Mapping[str, Any]) -> dict[str, Any]:
    num_reasoning = usage.get("completion_tokens_details", {}).get("reasoning_tokens", 0)
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": usage["prompt_tokens_details"]["cached_tokens"]},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": usage["total_tokens"],
    }

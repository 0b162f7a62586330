"""JSON of answers. What is constant over a stream is encoded once; per chunk only the text is."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

from msgspec import Raw

from common.errors import BatonError
from common.types import FinishReason
from router.dispatching.text_generation import TextDelta
from router.gateway.answering.answer_format import Answer, AnswerFormat
from router.gateway.answering.encoded import EncodedList, encode_parts
from router.gateway.answering.prompt_logprobs import finite
from router.replies.reply import Call, Part, Reasoning, Text
from router.wire.errors import OPENAI_DONE, openai_error_events
from router.wire.one_line import encode_line

# What ends a choice in a chunk.
_FINISH: Mapping[FinishReason | None, bytes] = {
    reason: b',"finish_reason":' + encode_line(None if reason is None else reason.label) + b"}]"
    for reason in (None, *FinishReason)
}


class ChoicesFormat(AnswerFormat):
    """OpenAI's answers with `choices`."""

    chunk_object_name: str
    _before_text: bytes  # of a choice's field that holds the text
    _after_text: bytes
    _logprob_fields: tuple[str, ...]  # lists, with a value for each token
    _no_logprobs: Mapping[str, None] = MappingProxyType({})  # those of a choice without log probabilities

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._is_plain = not (self._wants_logprobs or self._wants_token_ids)
        head = encode_line({**self._identity, "object": self.chunk_object_name})[:-1]
        self._chunk_head = b"data: " + head + b',"choices":[{"index":'
        self._end = b',"usage":null}\n\n' if self._has_usage_chunk else b"}\n\n"
        self._plain_tail = self._after_text + b',"logprobs":null' + _FINISH[None] + self._end
        self._text_heads: dict[int, bytes] = {}  # by choice: all that precedes its text
        self._usage_head = b"data: " + head + b',"choices":[],"usage":'

    @abstractmethod
    def logprobs(self, delta: TextDelta, offset: int) -> Sequence[list[Any]]:
        """Log probabilities of the tokens of `delta`, for each of the fields; `offset` is the length of what precedes
        the answer's text."""

    @abstractmethod
    def choice(self, index: int, text: str, answer: Answer, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """One choice of a whole response."""

    def chunk(
        self, index: int, delta: TextDelta, prefix: str = "", usage: dict[str, Any] | None = None, *, offset: int = 0
    ) -> bytes:
        """See AnswerFormat."""
        head, text = self._text_head(index), encode_line(prefix + delta.text)
        if delta.finish_reason is None and self._is_plain and usage is None:
            return head + text + self._plain_tail
        logprobs = self._logprobs_of(delta, offset)
        more = b',"token_ids":' + encode_line(delta.token_ids) if self._wants_token_ids else b""
        if delta.finish_reason is not None:
            more += b',"stop_reason":' + encode_line(delta.stop_reason)
        finish, end = _FINISH[delta.finish_reason], self._end_with(usage)
        return b"".join((head, text, self._after_text, b',"logprobs":', logprobs, more, finish, end))

    def echo_chunk(self, index: int, echo: str, logprobs: Mapping[str, EncodedList]) -> bytes:
        """See AnswerFormat."""
        values = encode_line({**{name: encoded.whole() for name, encoded in logprobs.items()}, **self._no_logprobs})
        head, text = self._text_head(index), encode_line(echo)
        return b"".join((head, text, self._after_text, b',"logprobs":', values, _FINISH[None], self._end))

    def _text_head(self, index: int) -> bytes:
        head = self._text_heads.get(index)
        if head is None:
            head = self._text_heads[index] = self._chunk_head + str(index).encode() + self._before_text
        return head

    def end(self, usage: dict[str, Any]) -> bytes:
        """See AnswerFormat."""
        last = self._usage_head + encode_line(usage) + b"}\n\n" if self._has_usage_chunk else b""
        return last + OPENAI_DONE

    def error_events(self, error: BatonError) -> bytes:
        """See AnswerFormat."""
        return openai_error_events(error)

    def _logprobs_of(self, delta: TextDelta, offset: int) -> bytes:
        if not (self._wants_logprobs and delta.token_ids):
            return b"null"
        values = zip(self._logprob_fields, self.logprobs(delta, offset), strict=True)
        return encode_line({**dict(values), **self._no_logprobs})

    def _end_with(self, usage: dict[str, Any] | None) -> bytes:
        """Returns the end of a chunk that carries these token counts; None: none of its own."""
        return self._end if usage is None else b',"usage":' + encode_line(usage) + b"}\n\n"

    def _add_tokens(self, answer: Answer, delta: TextDelta, echo: str) -> None:
        super()._add_tokens(answer, delta, echo)
        if self._wants_token_ids:
            answer.token_ids.extend(delta.token_ids)
        if delta.logprobs:
            for name, values in zip(self._logprob_fields, self.logprobs(delta, len(echo)), strict=True):
                answer.logprobs.setdefault(name, EncodedList()).extend(values)

    def whole(self, answers: Sequence[Answer], echoes: Sequence[str], usage: dict[str, Any]) -> list[bytes]:
        """See AnswerFormat."""
        choices = []
        for index, (answer, echo) in enumerate(zip(answers, echoes, strict=True)):
            logprobs = self._logprobs_of_answer(answer) if self._wants_logprobs else None
            choice = self.choice(index, echo + "".join(answer.text), answer, logprobs)
            of_tokens = {"token_ids": answer.token_ids} if self._wants_token_ids else {}
            choices.append({**choice, "stop_reason": answer.stop_reason, **of_tokens})
        return self._body(choices, answers, usage)

    def _body(self, choices: list[dict[str, Any]], answers: Sequence[Answer], usage: dict[str, Any]) -> list[bytes]:
        """Returns an answer, in which each choice has the fields of its prompt."""
        for choice, answer in zip(choices, answers, strict=True):
            choice.update(answer.prompt_fields)
        return encode_parts({**self._identity, "choices": choices, "usage": usage})

    def _logprobs_of_answer(self, answer: Answer) -> dict[str, Any]:
        return {**{name: answer.logprobs.get(name, []) for name in self._logprob_fields}, **self._no_logprobs}


class CompletionFormat(ChoicesFormat):
    """/v1/completions."""

    object_name = "text_completion"
    chunk_object_name = "text_completion"
    _before_text = b',"text":'
    _after_text = b""
    _logprob_fields = ("tokens", "token_logprobs", "top_logprobs", "text_offset")

    def opening(
        self, index: int, usage: dict[str, Any] | None = None, prompt_token_ids: Sequence[int] | None = None
    ) -> bytes:
        """Says what the prompt's tokens are, if that is asked for."""
        if prompt_token_ids is None:
            return b""
        more = b',"logprobs":null,"prompt_token_ids":' + encode_line(prompt_token_ids) + _FINISH[None]
        return self._text_head(index) + b'""' + more + self._end_with(usage)

    def logprobs(self, delta: TextDelta, offset: int) -> Sequence[list[Any]]:
        """Four parallel lists."""
        text_of = self._tokenizer.token_text
        tokens: list[str] = []
        token_logprobs: list[float] = []
        top_logprobs: list[dict[str, float]] = []
        text_offsets: list[int] = []
        for token_id, position, start in zip(delta.token_ids, delta.logprobs, delta.text_offsets, strict=True):
            tokens.append(text_of(token_id))
            token_logprobs.append(finite(position.sampled))
            top = {text_of(each.token_id): finite(each.logprob) for each in position.top}
            top_logprobs.append({text_of(token_id): finite(position.sampled), **top})
            text_offsets.append(offset + start)
        return tokens, token_logprobs, top_logprobs, text_offsets

    def choice(self, index: int, text: str, answer: Answer, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """See AnswerFormat."""
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": answer.finish_label}


class ChatFormat(ChoicesFormat):
    """/v1/chat/completions."""

    object_name = "chat.completion"
    chunk_object_name = "chat.completion.chunk"
    _before_text = b',"delta":{"content":'
    _after_text = b"}"
    _logprob_fields = ("content",)
    _no_logprobs = MappingProxyType({"refusal": None})

    def opening(
        self, index: int, usage: dict[str, Any] | None = None, prompt_token_ids: Sequence[int] | None = None
    ) -> bytes:
        """Says whose turn it is, and what the prompt's tokens are."""
        role = b',"delta":{"role":"assistant","content":""},"logprobs":null' + _FINISH[None]
        if prompt_token_ids is not None:
            role += b',"prompt_token_ids":' + encode_line(prompt_token_ids)
        return self._chunk_head + str(index).encode() + role + self._end_with(usage)

    def _body(self, choices: list[dict[str, Any]], answers: Sequence[Answer], usage: dict[str, Any]) -> list[bytes]:
        """All choices have the same prompt."""
        fields = answers[0].prompt_fields if answers else {}
        return encode_parts({**self._identity, "choices": choices, "usage": usage, **fields})

    def logprobs(self, delta: TextDelta, offset: int) -> Sequence[list[Any]]:
        """One object per token."""
        content = []
        for token_id, position in zip(delta.token_ids, delta.logprobs, strict=True):
            top = [self._token(each.token_id, each.logprob) for each in position.top]
            content.append({**self._token(token_id, position.sampled), "top_logprobs": top})
        return (content,)

    def choice(self, index: int, text: str, answer: Answer, logprobs: dict[str, Any] | None) -> dict[str, Any]:
        """See AnswerFormat."""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reasoning := "".join([part.text for part in answer.parts if isinstance(part, Reasoning)]):
            message |= _both_names(reasoning)
        if calls := [part for part in answer.parts if isinstance(part, Call)]:
            message |= {"content": text or None, "tool_calls": [_tool_call(call) for call in calls]}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": answer.finish_label}

    def parts_chunk(
        self,
        index: int,
        delta: TextDelta,
        parts: Sequence[Part],
        finish_label: str | None,
        usage: dict[str, Any] | None,
    ) -> bytes:
        """See AnswerFormat. What ends an answer follows its last call in a chunk of its own: the `openai` client takes
        a call whose chunk has a finish reason for unfinished."""
        if finish_label is None or self._has_event_ids or not any(isinstance(part, Call) for part in parts):
            return self._parts_chunk(index, delta, parts, finish_label, usage)
        ending = delta._replace(token_ids=[], logprobs=[])
        called = self._parts_chunk(index, delta, parts, None, usage)
        return called + self._parts_chunk(index, ending, (), finish_label, usage)

    def _parts_chunk(
        self,
        index: int,
        delta: TextDelta,
        parts: Sequence[Part],
        finish_label: str | None,
        usage: dict[str, Any] | None,
    ) -> bytes:
        gained: dict[str, Any] = {}
        if text := "".join([part.text for part in parts if isinstance(part, Text)]):
            gained["content"] = text
        if reasoning := "".join([part.text for part in parts if isinstance(part, Reasoning)]):
            gained |= _both_names(reasoning)
        if calls := [part for part in parts if isinstance(part, Call)]:
            gained["tool_calls"] = [{"index": call.number, **_tool_call(call)} for call in calls]
        choice: dict[str, Any] = {"delta": gained, "logprobs": Raw(self._logprobs_of(delta, 0))}
        if self._wants_token_ids:
            choice["token_ids"] = delta.token_ids
        if finish_label is not None:
            choice["stop_reason"] = delta.stop_reason
        choice["finish_reason"] = finish_label
        head = self._chunk_head + str(index).encode() + b","
        return head + encode_line(choice)[1:] + b"]" + self._end_with(usage)

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        spelled = self._tokenizer.token_bytes(token_id)
        return {"token": spelled.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(spelled)}


def _both_names(reasoning: str) -> dict[str, str]:
    """Clients read either."""
    return {"reasoning": reasoning, "reasoning_content": reasoning}


def _tool_call(call: Call) -> dict[str, Any]:
    return {
        "id": call.call_id,
        "type": "function",
        "function": {"name": call.name, "arguments": call.arguments},
    }

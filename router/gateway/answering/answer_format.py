"""The base of every API's format of answers, and the sum of an answer's parts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from common.errors import BatonError
from common.tokenization import Tokenizer
from router.dispatching.text_generation import TextDelta
from router.gateway.answering.encoded import EncodedList
from router.replies.reply import Part, Text
from router.requests.request import SpeculationCounts


class Answer:
    """The sum of one choice's parts."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.parts: list[Part] = []  # of an answer that is parsed; their text is in `text` as well
        self.logprobs: dict[str, EncodedList] = {}  # by field
        self.finish_label: str | None = None
        self.stop_reason: str | int | None = None  # see TextDelta
        self.token_ids = EncodedList()
        self.log_probability = 0.0  # sum over its tokens, if pods report them
        self.prompt_fields: dict[str, Any] = {}  # fields of the answer that describe the prompt


class AnswerFormat(ABC):
    """One API's answers to one request. `chunk` and `echo_chunk` are for answers that are not parsed, `parts_chunk` for
    those that are; a format needs what its API has."""

    object_name: str
    is_always_parsed = False  # chunks are made by `parts_chunk` alone

    def __init__(
        self,
        request_id: str,
        created: int,
        model: str,
        tokenizer: Tokenizer,
        *,
        wants_logprobs: bool,
        has_usage_chunk: bool,
        echoed: Mapping[str, Any] = MappingProxyType({}),
        wants_token_ids: bool = False,
        has_event_ids: bool = False,
    ) -> None:
        """`created` is Unix time. `has_usage_chunk`: the last chunk has the token counts, others "usage": null unless
        they have counts of their own. `echoed`: fields of the request, for answers that repeat them. `has_event_ids`: a
        delta is one event, since its id counts all its tokens."""
        self._tokenizer = tokenizer
        self._wants_logprobs = wants_logprobs
        self._has_usage_chunk = has_usage_chunk
        self._echoed = echoed
        self._wants_token_ids = wants_token_ids
        self._has_event_ids = has_event_ids
        self._identity = {"id": request_id, "object": self.object_name, "created": created, "model": model}

    def opening(
        self, index: int, usage: dict[str, Any] | None = None, prompt_token_ids: Sequence[int] | None = None
    ) -> bytes:
        """Event that opens a choice; may be empty."""
        return b""

    def chunk(
        self, index: int, delta: TextDelta, prefix: str = "", usage: dict[str, Any] | None = None, *, offset: int = 0
    ) -> bytes:
        """Event with what one choice gained; `prefix` precedes its text, of which `offset` characters precede the
        answer, and `usage` are its token counts so far."""
        raise NotImplementedError

    def echo_chunk(self, index: int, echo: str, logprobs: Mapping[str, EncodedList]) -> bytes:
        """Event with the prompt and the log probabilities of its tokens, before an answer."""
        raise NotImplementedError

    def parts_chunk(
        self,
        index: int,
        delta: TextDelta,
        parts: Sequence[Part],
        finish_label: str | None,
        usage: dict[str, Any] | None,
    ) -> bytes:
        """Returns a `chunk` for a parsed answer, which gains `parts`."""
        raise NotImplementedError

    @abstractmethod
    def end(self, usage: dict[str, Any]) -> bytes:
        """Events that end a stream; `usage`: the token counts."""

    @abstractmethod
    def error_events(self, error: BatonError) -> bytes:
        """Events that end a stream with an error."""

    @abstractmethod
    def whole(self, answers: Sequence[Answer], echoes: Sequence[str], usage: dict[str, Any]) -> list[bytes]:
        """Body of a response that is not streamed, in parts; `echoes` precede the answers' texts."""

    def add(self, answer: Answer, delta: TextDelta, echo: str) -> None:
        """Takes the next delta of an answer that is sent whole. What takes long to encode is encoded now, so that the
        end of a long answer holds up no others."""
        answer.text.append(delta.text)
        answer.finish_label = None if delta.finish_reason is None else delta.finish_reason.label
        self._add_tokens(answer, delta, echo)

    def add_parts(self, answer: Answer, delta: TextDelta, parts: Sequence[Part], finish_label: str | None) -> None:
        """Does the same as `add` for a parsed answer, which gains `parts`."""
        answer.parts += parts
        answer.text += [part.text for part in parts if isinstance(part, Text)]
        answer.finish_label = finish_label
        self._add_tokens(answer, delta, "")

    def _add_tokens(self, answer: Answer, delta: TextDelta, echo: str) -> None:
        answer.stop_reason = delta.stop_reason


def usage_of(
    prompt_tokens: int,
    completion_tokens: int,
    cached_tokens: int,
    reasoning_tokens: int | None = None,
    speculation: Iterable[SpeculationCounts] = (),
) -> dict[str, Any]:
    """Token counts as OpenAI names them; without those of reasoning, answers are not searched for it. Drafts count as
    tokens of a prediction, although it is none of the client's."""
    usage = {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
    details = {} if reasoning_tokens is None else {"reasoning_tokens": reasoning_tokens}
    num_verified, num_accepted = SpeculationCounts.sum(speculation)
    if num_verified:
        details["accepted_prediction_tokens"] = num_accepted
        details["rejected_prediction_tokens"] = num_verified - num_accepted
    if details:
        usage["completion_tokens_details"] = details
    return usage

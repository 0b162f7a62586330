"""The results that clients return."""

from __future__ import annotations

from dataclasses import dataclass

from common.types import FinishReason, Logprobs

__all__ = ["Answer", "Choice", "FinishReason", "Logprobs", "Model", "Piece", "ToolCall", "Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of an answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens served by a prefix cache
    reasoning_tokens: int | None  # part of completion_tokens; None if reasoning is not separated from the answer
    accepted_prediction_tokens: int | None = None  # drafts among completion_tokens; None if no draft was verified
    rejected_prediction_tokens: int | None = None  # wrong drafts, not among completion_tokens; None likewise


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call made by the model. It can be sent back in the `tool_calls` of a message."""

    id: str  # goes into `tool_call_id` of the message with the result
    name: str
    arguments: str  # a JSON object
    index: int  # position among the calls of the answer


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a prompt."""

    index: int
    text: str  # in chats, without reasoning and tool calls
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[Logprobs]  # one per token if asked for, else empty
    prompt_logprobs: list[Logprobs]  # one per prompt token except the first if asked for, else empty
    stop_reason: str | int | None  # the stop string or stop token id that ended the answer
    reasoning: str  # chats only; may be empty
    tool_calls: list[ToolCall]  # chats only; may be empty


@dataclass(frozen=True, slots=True)
class Answer:
    """All answers to a prompt."""

    request_id: str
    choices: list[Choice]
    usage: Usage

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of a choice that arrived since its previous piece."""

    request_id: str
    index: int  # index of the choice
    text: str  # may be empty
    token_ids: list[int]  # may be empty
    logprobs: list[Logprobs]  # one per token if asked for, else empty
    finish_reason: FinishReason | None  # only in the last piece of a choice
    usage: Usage | None  # only in the last piece of a choice
    prompt_logprobs: list[Logprobs]  # see Choice; only in the first piece of a choice
    stop_reason: str | int | None  # see Choice; only in the last piece of a choice
    reasoning: str  # may be empty
    tool_calls: list[ToolCall]  # complete calls only; may be empty


@dataclass(frozen=True, slots=True)
class Model:
    """A served model, or an adapter of one."""

    name: str
    max_model_len: int  # limit on prompt plus answer, in tokens; 0 while no pod is ready
    parent: str = ""  # of a LoRA adapter: the name of its model; else empty

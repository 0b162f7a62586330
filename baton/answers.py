"""What clients return."""

from __future__ import annotations

from dataclasses import dataclass

from common.types import FinishReason, Logprobs

__all__ = ["Answer", "Choice", "FinishReason", "Logprobs", "Model", "Piece", "ToolCall", "Usage"]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt, served by a prefix cache
    reasoning_tokens: int | None  # of the completion; None: reasoning is not told from the answer
    accepted_prediction_tokens: int | None = None  # of the completion, drafts; None, as below: none were verified
    rejected_prediction_tokens: int | None = None  # drafts that were wrong; no part of the completion


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of a tool that the model made. May be sent back among the `tool_calls` of a message."""

    id: str  # for `tool_call_id` of the message with its result
    name: str
    arguments: str  # a JSON object
    index: int  # among the calls of its answer


@dataclass(frozen=True, slots=True)
class Choice:
    """One answer to a prompt."""

    index: int
    text: str  # to chats without reasoning and tool calls
    token_ids: list[int]
    finish_reason: FinishReason
    logprobs: list[Logprobs]  # one per token if asked for, else empty
    prompt_logprobs: list[Logprobs]  # if asked for, of each prompt token but the first
    stop_reason: str | int | None  # the stop text, or the one of stop_token_ids, that ended it
    reasoning: str  # of an answer to a chat; may be empty
    tool_calls: list[ToolCall]  # of an answer to a chat; may be empty


@dataclass(frozen=True, slots=True)
class Answer:
    """All answers to a prompt."""

    request_id: str
    choices: list[Choice]
    usage: Usage

    @property
    def text(self) -> str:
        """Of the first choice."""
        return self.choices[0].text


@dataclass(frozen=True, slots=True)
class Piece:
    """What a choice has gained since its last piece."""

    request_id: str
    index: int  # of the choice
    text: str  # may be empty
    token_ids: list[int]  # may be empty
    logprobs: list[Logprobs]  # one per token if asked for, else empty
    finish_reason: FinishReason | None  # set in the choice's last piece only
    usage: Usage | None  # the choice's, in its last piece only
    prompt_logprobs: list[Logprobs]  # if asked for, of each prompt token but the first; in the choice's first piece
    stop_reason: str | int | None  # as of Choice; in its last piece only
    reasoning: str  # may be empty
    tool_calls: list[ToolCall]  # each comes whole; may be empty


@dataclass(frozen=True, slots=True)
class Model:
    """A model that is served."""

    name: str
    max_model_len: int  # most tokens of prompt and answer; 0 while no pod is ready

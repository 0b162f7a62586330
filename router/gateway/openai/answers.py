"""The forms of answers, for the API's description.

Answers are written by chunks.py and ../answering/explain.py, for speed by hand; tests hold them against these.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from router.wire.answer_struct import AnswerStruct

FinishReason = Literal["stop", "length", "abort"]
ChatFinishReason = Literal["stop", "length", "abort", "tool_calls"]


class PromptTokensDetails(AnswerStruct):
    """The sources of the prompt's KV."""

    cached_tokens: int


class CompletionTokensDetails(AnswerStruct):
    """The kinds of the answer's tokens. `reasoning_tokens` is there where reasoning is told from the answer, the others
    where pods verified drafts (docs/speculation.md); rejected ones are no part of the answer."""

    reasoning_tokens: int | msgspec.UnsetType = msgspec.UNSET
    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET


class Usage(AnswerStruct):
    """Token counts. `completion_tokens_details` is there where it has a field."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class CompletionLogprobs(AnswerStruct):
    """Parallel lists, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]  # null: the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(AnswerStruct):
    """A token of a prompt, or one that might have stood there."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; null: the first token


class CompletionChoice(AnswerStruct):
    """One answer to a prompt. `stop_reason` is the stop text, or the one of `stop_token_ids`, that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(AnswerStruct):
    """Answer of POST /v1/completions, unless it is streamed."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(AnswerStruct):
    """Event of a streamed completion. With `include_usage` the last one, without choices, has the token counts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class TopLogprob(AnswerStruct):
    """A token that might have come."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(AnswerStruct):
    """The token that came, and what else might have."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(AnswerStruct):
    """One entry per token."""

    content: list[ChatLogprob]
    refusal: None


class CalledFunction(AnswerStruct):
    """The function that the model calls; `arguments` is a JSON object."""

    name: str
    arguments: str


class ToolCall(AnswerStruct):
    """A call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ToolCallDelta(ToolCall):
    """A call; it comes whole."""

    index: int


class AssistantMessage(AnswerStruct):
    """The model's turn. `content` is null where there are only calls; reasoning has two names."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(AnswerStruct):
    """One answer to a conversation."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(AnswerStruct):
    """Answer of POST /v1/chat/completions, unless it is streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(AnswerStruct):
    """The gain of the model's turn; empty while it is not certain what the tokens so far mean."""

    content: str | msgspec.UnsetType = msgspec.UNSET
    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(AnswerStruct):
    """The gain of one answer."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(AnswerStruct):
    """Event of a streamed chat completion. With `include_usage` the last one, without choices, has the token counts."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Candidate(AnswerStruct):
    """A pod that was weighed."""

    address: str
    score: float
    scores: dict[str, float]
    cached_tokens: int
    num_requests: int
    queued_tokens: int
    free_blocks: int
    predicted_ms: dict[str, float]


class Leg(AnswerStruct):
    """The choice of one pod."""

    leg: str
    taken: bool
    policy: str
    chosen: str
    candidates: list[Candidate]


class Route(AnswerStruct):
    """The route that a request would take."""

    object: Literal["route"]
    decode: str
    prefill: str | None
    prefill_on: Literal["local", "remote"]
    reason: str
    why: str
    num_prompt_tokens: int
    session: str
    legs: list[Leg]


class RouteList(AnswerStruct):
    """Answer of /v1/route/explain, and to `dry_run`: one route per prompt."""

    object: Literal["list"]
    data: list[Route]


class Tokenized(AnswerStruct):
    """Answer of POST /tokenize. `token_strs` are the tokens as the vocabulary spells them, if they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(AnswerStruct):
    """Answer of POST /detokenize; special tokens are part of the text."""

    prompt: str


class ModelCard(AnswerStruct):
    """A name of a served model; `root` is its first name, which answers have. Without a ready decode pod its context is
    not known. Of a LoRA adapter, `parent` is its model, and `root`, for operators, where it was loaded from."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ModelList(AnswerStruct):
    """Answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]

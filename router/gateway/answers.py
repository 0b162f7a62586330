"""What answers look like, for the API's description.

Answers are written by chunks.py and explain.py, for speed by hand; tests hold them against these.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from router.timelines.views import RequestSummary


class _Answer(msgspec.Struct, forbid_unknown_fields=True):
    """Has these fields and no others."""


FinishReason = Literal["stop", "length", "abort"]
ChatFinishReason = Literal["stop", "length", "abort", "tool_calls"]


class PromptTokensDetails(_Answer):
    """Where the prompt's KV came from."""

    cached_tokens: int


class CompletionTokensDetails(_Answer):
    """What the answer's tokens are. `reasoning_tokens` is there where reasoning is told from the answer, the others
    where pods verified drafts (docs/speculation.md); rejected ones are no part of the answer."""

    reasoning_tokens: int | msgspec.UnsetType = msgspec.UNSET
    accepted_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET
    rejected_prediction_tokens: int | msgspec.UnsetType = msgspec.UNSET


class Usage(_Answer):
    """Token counts. `completion_tokens_details` is there where it has a field."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | msgspec.UnsetType = msgspec.UNSET


class CompletionLogprobs(_Answer):
    """Parallel lists, one entry per token."""

    tokens: list[str]
    token_logprobs: list[float | None]  # null: the first token of an echoed prompt
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(_Answer):
    """A token of a prompt, or one that might have stood there."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]  # by token id; null: the first token


class CompletionChoice(_Answer):
    """One answer to a prompt. `stop_reason` is the stop text, or the one of `stop_token_ids`, that ended it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class Completion(_Answer):
    """Answer of POST /v1/completions, unless it is streamed."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(_Answer):
    """Event of a streamed completion. With `include_usage` the last one, without choices, has the token counts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET


class TopLogprob(_Answer):
    """A token that might have come."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(_Answer):
    """The token that came, and what else might have."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Answer):
    """One entry per token."""

    content: list[ChatLogprob]
    refusal: None


class CalledFunction(_Answer):
    """What the model calls; `arguments` is a JSON object."""

    name: str
    arguments: str


class ToolCall(_Answer):
    """A call."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ToolCallDelta(ToolCall):
    """A call; it comes whole."""

    index: int


class AssistantMessage(_Answer):
    """The model's turn. `content` is null where there are only calls; reasoning has two names."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(_Answer):
    """One answer to a conversation."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(_Answer):
    """Answer of POST /v1/chat/completions, unless it is streamed."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class ChatDelta(_Answer):
    """What the model's turn gains; empty while it is not certain what the tokens so far mean."""

    content: str | msgspec.UnsetType = msgspec.UNSET
    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(_Answer):
    """What one answer gains."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(_Answer):
    """Event of a streamed chat completion. With `include_usage` the last one, without choices, has the token counts."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class AnthropicUsage(_Answer):
    """Token counts; tokens from the cache are not among those of the input."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicMessage(_Answer):
    """Answer of POST /v1/messages, unless it is streamed. Blocks are `text`, `thinking` or `tool_use`."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"] | None
    stop_sequence: str | None
    usage: AnthropicUsage


class CachedTokens(_Answer):
    """Where the prompt's KV came from."""

    cached_tokens: int


class OutputTokensDetails(_Answer):
    """What the answer's tokens are."""

    reasoning_tokens: int


class ResponseUsage(_Answer):
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


class Candidate(_Answer):
    """A pod that was weighed."""

    address: str
    score: float
    scores: dict[str, float]
    cached_tokens: int
    num_requests: int
    queued_tokens: int
    free_blocks: int
    predicted_ms: dict[str, float]


class Leg(_Answer):
    """The choice of one pod."""

    leg: str
    taken: bool
    policy: str
    chosen: str
    candidates: list[Candidate]


class Route(_Answer):
    """Where a request would go."""

    object: Literal["route"]
    decode: str
    prefill: str | None
    prefill_on: Literal["local", "remote"]
    reason: str
    why: str
    num_prompt_tokens: int
    session: str
    legs: list[Leg]


class RouteList(_Answer):
    """Answer of /v1/route/explain, and to `dry_run`: one route per prompt."""

    object: Literal["list"]
    data: list[Route]


class Tokenized(_Answer):
    """Answer of POST /tokenize. `token_strs` are the tokens as the vocabulary spells them, if they were asked for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class CountedTokens(_Answer):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class Detokenized(_Answer):
    """Answer of POST /detokenize; special tokens are part of the text."""

    prompt: str


class ModelCard(_Answer):
    """A name of a served model; `root` is its first name, which answers have. Without a ready decode pod its context is
    not known."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    max_model_len: int | None


class ModelList(_Answer):
    """Answer of GET /v1/models."""

    object: Literal["list"]
    data: list[ModelCard]


class PodHealth(_Answer):
    """A pod as the router sees it."""

    address: str
    role: Literal["prefill", "decode"]
    model: str | None
    state: str
    detail: str


class ModelHealth(_Answer):
    """A served model; `reason`: why no request for it can be served, empty if one can."""

    name: str
    reason: str


class Health(_Answer):
    """Answer of GET /health and /readyz. Where there are API keys, `models` and `pods` are for operators."""

    status: Literal["ok", "unavailable"]
    reason: str
    models: list[ModelHealth] = []
    pods: list[PodHealth] = []


class Load(_Answer):
    """Answer of GET /load: generations under way, those that wait in the router included."""

    server_load: int


class Drained(_Answer):
    """Answer to draining a pod: requests and transfers of all routers that still run on it."""

    address: str
    num_unfinished: int


class Undrained(_Answer):
    """Answer to taking a drained pod back."""

    address: str


class LearnedTimes(_Answer):
    """The steps of a role's pods, by a line that the router has fitted to what they report; the least of their limits.

    `is_known`: enough steps were seen. Before that the line is a guess."""

    num_pods: int
    is_known: bool
    base_s: float  # seconds of any step
    token_s: float  # for each token that it computes
    context_s: float  # for each token of the requests there
    num_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int


class ModelStepTimes(_Answer):
    """A served model; `null` for a role without ready pods. Handoffs take `handoff_s`, and `handoff_token_s` for each
    token whose KV is moved."""

    name: str
    block_size: int
    max_model_len: int
    handoff_s: float
    handoff_token_s: float
    prefill: LearnedTimes | None
    decode: LearnedTimes | None


class StepTimesOfModels(_Answer):
    """Answer of GET /admin/step_times."""

    models: list[ModelStepTimes]


class PrefixCachesReset(_Answer):
    """Answer of POST /reset_prefix_cache."""

    pods: list[str]


class Liveness(_Answer):
    """Answer of GET /livez."""

    status: Literal["ok"]


class Version(_Answer):
    """Answer of GET /version."""

    version: str
    grpc_port: int  # of the same host


class RequestList(_Answer):
    """Answer of GET /v1/requests; the newest first, of at most `max_kept`."""

    object: Literal["list"]
    max_kept: int
    data: list[RequestSummary]

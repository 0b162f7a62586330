"""Conversion of requests to messages of baton.v1, and of messages to answers. Both clients share it."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from typing import Any, TypedDict, Unpack

from baton.answers import Answer, Choice, Model, Piece, ToolCall, Usage
from common.errors import InvalidRequestError, quoted
from common.pb import inference_pb2
from common.rpc.convert import finish_reason_from_pb, logprobs_from_pb, set_options
from common.types import Constraint, FinishReason, SamplingParams

Prompt = str | Sequence[int]
Conversation = Sequence[Mapping[str, Any]]

_MESSAGE_FIELDS = frozenset(inference_pb2.ChatMessage.DESCRIPTOR.fields_by_name)
_TOOL_MODES: dict[str, inference_pb2.ToolMode.ValueType] = {
    "auto": inference_pb2.TOOL_MODE_AUTO,
    "none": inference_pb2.TOOL_MODE_NONE,
    "required": inference_pb2.TOOL_MODE_REQUIRED,
}
_TERM_FIELDS = frozenset(inference_pb2.GenerateRequest.DESCRIPTOR.fields_by_name)
_OPTION_FIELDS = frozenset(inference_pb2.GenerateOptions.DESCRIPTOR.fields_by_name)


def pooling_input(prompt: Prompt) -> inference_pb2.PoolingInput:
    """A text, or its tokens, as a message."""
    if isinstance(prompt, str):
        return inference_pb2.PoolingInput(text=prompt)
    return inference_pb2.PoolingInput(tokens=inference_pb2.TokenPrompt(token_ids=prompt))


class Options(TypedDict, total=False):
    """Sampling parameters given one by one; omitted ones take the served model's defaults. See docs/api.md."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    num_logprobs: int
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    structured_outputs: Constraint  # see `baton.constraints`
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    prompt_logprobs: int
    vllm_xargs: Mapping[str, str | int | float | bool]
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    include_stop_str_in_output: bool
    truncate_prompt_tokens: int
    thinking_token_budget: int
    speculative: bool


class Terms(TypedDict, total=False):
    """Fields of a request other than its prompt and sampling parameters."""

    stop: str | Sequence[str]  # strings that end an answer and are not part of it
    n: int  # number of answers to the prompt
    use_beam_search: bool  # search for the n most likely answers; not for streams
    length_penalty: float  # beam search divides scores by length to this power
    best_of: int  # number of generated answers, of which the n most likely are returned; not for streams
    model: str  # served name; by default the first model
    request_id: str  # id for `abort`; by default the router chooses one
    cache_salt: str  # requests with different salts never share cached KV
    priority: int  # requests with lower values run first
    session_id: str  # requests of one session prefer the pods that have its KV
    timeout_s: float  # limit for the whole answer, retries included; defaults to the client's


class Request(Options, Terms, total=False):
    """Fields of a completion request."""


class ChatTerms(TypedDict, total=False):
    """Fields of a chat request other than its messages. Tools have OpenAI's form."""

    template_variables: Mapping[str, Any]  # variables of the chat template, such as {"enable_thinking": False}
    tools: Sequence[Mapping[str, Any]]  # {"type": "function", "function": {"name": ..., "parameters": {...}}}
    tool_choice: (
        str | Mapping[str, Any]
    )  # "auto", "none", "required" or {"type": "function", "function": {"name": ...}}
    parallel_tool_calls: bool  # False: at most one call per answer
    include_reasoning: bool  # False: reasoning is left out
    separate_reasoning: bool  # False: reasoning stays in the text with its tags


class ChatRequest(Request, ChatTerms, total=False):
    """Fields of a chat request."""


def text_request(
    prompt: Prompt, params: SamplingParams | None, **request: Unpack[Request]
) -> inference_pb2.GenerateRequest:
    """Builds the message that asks to complete `prompt`. Raises InvalidRequestError for invalid fields."""
    message = _request(params, request)
    try:
        if isinstance(prompt, str):
            message.text = prompt
        else:
            message.tokens.token_ids.extend(prompt)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"prompt must be a string or token ids: {error}", param="prompt") from error
    return message


def chat_request(
    messages: Conversation, params: SamplingParams | None, **request: Unpack[ChatRequest]
) -> inference_pb2.GenerateRequest:
    """Builds the message that asks to answer a conversation. Raises InvalidRequestError for invalid fields."""
    others: Any = dict(request)
    terms: Any = {name: others.pop(name) for name in ChatTerms.__annotations__.keys() & others.keys()}
    message = _request(params, others)
    message.chat.CopyFrom(chat_prompt(messages, **terms))
    return message


def chat_prompt(messages: Conversation, **terms: Unpack[ChatTerms]) -> inference_pb2.ChatPrompt:
    """Builds the message of a conversation. Raises InvalidRequestError for invalid fields."""
    chat = inference_pb2.ChatPrompt()
    for index, each in enumerate(messages):
        _add_message(chat, each, f"messages[{index}]")
    if variables := terms.get("template_variables"):
        chat.chat_template_kwargs = json.dumps(variables)
    for index, tool in enumerate(terms.get("tools", ())):
        _add_tool(chat, tool, f"tools[{index}]")
    if (choice := terms.get("tool_choice")) is not None:
        _set_tool_choice(chat, choice)
    for name in ("parallel_tool_calls", "include_reasoning", "separate_reasoning"):
        if name in terms:
            setattr(chat, name, terms[name])
    return chat


def timeout_of(request: Request, default_s: float) -> float:
    """Returns the limit for the whole answer in seconds. Raises InvalidRequestError if it is not positive."""
    timeout_s = request.get("timeout_s", default_s)
    if not timeout_s > 0:
        raise InvalidRequestError(f"timeout_s must be positive, got {timeout_s}", param="timeout_s")
    return timeout_s


def answer_of(message: inference_pb2.GenerateResponse) -> Answer:
    """Converts a complete answer."""
    return Answer(message.request_id, [_choice(each) for each in message.choices], _usage(message.usage))


def piece_of(message: inference_pb2.GenerateChunk) -> Piece:
    """Converts a piece of an answer."""
    finish_reason = finish_reason_from_pb(message.finish_reason)
    return Piece(
        message.request_id,
        message.index,
        message.text,
        list(message.token_ids),
        [logprobs_from_pb(each) for each in message.logprobs],
        finish_reason,
        None if finish_reason is None else _usage(message.usage),
        [logprobs_from_pb(each) for each in message.prompt_logprobs],
        _stop_reason(message),
        message.reasoning,
        [_call_from_pb(each) for each in message.tool_calls],
    )


def models_of(message: inference_pb2.ListModelsResponse) -> list[Model]:
    """Converts the list of served models."""
    return [Model(each.name, each.max_model_len, each.parent) for each in message.models]


def _add_message(chat: inference_pb2.ChatPrompt, message: Mapping[str, Any], where: str) -> None:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} must be a mapping, got {quoted(message)}", param=where)
    if unknown := message.keys() - _MESSAGE_FIELDS:
        field = f"{where}.{min(unknown)}"
        raise InvalidRequestError(f"{field} is not a field of a message over gRPC", param=field)
    calls = [_call_to_pb(each, f"{where}.tool_calls[{index}]") for index, each in enumerate(_calls_of(message))]
    try:
        chat.messages.add(**{**message, "tool_calls": calls})
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{where}: {error}", param=where) from error


def _calls_of(message: Mapping[str, Any]) -> Sequence[ToolCall | Mapping[str, Any]]:
    return message.get("tool_calls") or ()


def _call_to_pb(call: ToolCall | Mapping[str, Any], where: str) -> inference_pb2.ToolCall:
    if isinstance(call, ToolCall):
        return inference_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
    try:
        function = call["function"]
        return inference_pb2.ToolCall(id=call["id"], name=function["name"], arguments=function["arguments"])
    except (KeyError, TypeError) as error:
        problem = f"{where} must be a ToolCall or a call in OpenAI's form: {error!r}"
        raise InvalidRequestError(problem, param=where) from error


def _add_tool(chat: inference_pb2.ChatPrompt, tool: Mapping[str, Any], where: str) -> None:
    try:
        function = tool["function"]
        parameters = function.get("parameters")
        chat.tools.add(
            name=function["name"],
            description=function.get("description"),
            parameters=None if parameters is None else json.dumps(parameters),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"{where} must be a function in OpenAI's form: {error!r}", param=where) from error


def _set_tool_choice(chat: inference_pb2.ChatPrompt, choice: str | Mapping[str, Any]) -> None:
    try:
        if isinstance(choice, str):
            chat.tool_mode = _TOOL_MODES[choice]
        else:
            chat.tool_name = choice["function"]["name"]
    except (KeyError, TypeError) as error:
        problem = 'must be "auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
        raise InvalidRequestError(f"tool_choice {problem}", param="tool_choice") from error


def _request(params: SamplingParams | None, request: Request) -> inference_pb2.GenerateRequest:
    given: dict[str, Any] = dict(request)
    stop = given.pop("stop", ())
    given.pop("timeout_s", None)
    given.pop("session_id", None)  # metadata, as over HTTP
    options = {name: given.pop(name) for name in _OPTION_FIELDS & given.keys()}
    if params is not None:
        if options:
            name = min(options)
            raise InvalidRequestError(f"{name}: give params or single sampling parameters, not both", param=name)
        options = {name: getattr(params, name) for name in _OPTION_FIELDS & set(params.__struct_fields__)}
    message = inference_pb2.GenerateRequest()
    for name, value in given.items():
        _set_term(message, name, value)
    set_options(message.options, options)
    try:
        message.options.stop.extend([stop] if isinstance(stop, str) else stop)
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"stop must be a string or a list of strings: {error}", param="stop") from error
    return message


def _set_term(message: inference_pb2.GenerateRequest, name: str, value: Any) -> None:
    if name not in _TERM_FIELDS:
        close = difflib.get_close_matches(name, _TERM_FIELDS | _OPTION_FIELDS, n=1)
        raise InvalidRequestError(f"{name} is unknown" + (f"; did you mean {close[0]}?" if close else ""), param=name)
    try:
        message.MergeFrom(inference_pb2.GenerateRequest(**{name: value}))
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{name} cannot be {quoted(value)}: {error}", param=name) from error


def _choice(message: inference_pb2.Choice) -> Choice:
    return Choice(
        message.index,
        message.text,
        list(message.token_ids),
        finish_reason_from_pb(message.finish_reason) or FinishReason.ERROR,
        [logprobs_from_pb(each) for each in message.logprobs],
        [logprobs_from_pb(each) for each in message.prompt_logprobs],
        _stop_reason(message),
        message.reasoning,
        [_call_from_pb(each) for each in message.tool_calls],
    )


def _stop_reason(message: inference_pb2.Choice | inference_pb2.GenerateChunk) -> str | int | None:
    match message.WhichOneof("stop_reason"):
        case "stop_text":
            return message.stop_text
        case "stop_token_id":
            return message.stop_token_id
        case _:
            return None


def _call_from_pb(message: inference_pb2.ToolCall) -> ToolCall:
    return ToolCall(message.id, message.name, message.arguments, message.index)


def _usage(message: inference_pb2.Usage) -> Usage:
    return Usage(
        message.prompt_tokens,
        message.completion_tokens,
        message.cached_tokens,
        message.reasoning_tokens if message.HasField("reasoning_tokens") else None,
        message.accepted_prediction_tokens if message.HasField("accepted_prediction_tokens") else None,
        message.rejected_prediction_tokens if message.HasField("rejected_prediction_tokens") else None,
    )

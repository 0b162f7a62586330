"""Requests of baton.v1.Inference in the form that all fronts share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence, Sized
from typing import Any

import msgspec
from msgspec import Raw

from common.beam_search import EarlyStopping
from common.errors import InvalidRequestError, json_problem
from common.pb import common_pb2, inference_pb2
from common.rpc.convert import parameters_from_pb
from common.types import SamplingParams
from common.types.parameters import parameters_of
from common.types.validation import check_num_entries
from router.gateway.bodies.beam_options import BeamOptions, beam_options, check_no_rivals
from router.gateway.bodies.chat_prompts import chat_prompt, constraint_of_calls, decode_variables, reply_options_of
from router.gateway.bodies.decoding import request_errors
from router.gateway.bodies.messages import Message
from router.gateway.bodies.tools import Tool, ToolChoice, read_tool_choice, read_tools
from router.replies.reply import ReplyOptions
from router.requests.bounds import MAX_MESSAGES, MAX_STOPS, MAX_TOOLS
from router.requests.request import STRUCTURED, ChatPrompt, Draft, Prompt, TextPrompt, TokenPrompt
from router.requests.terms import Terms

_KV_FAILURE_POLICIES: dict[int, str | None] = {
    common_pb2.KV_FAILURE_POLICY_UNSPECIFIED: None,
    common_pb2.KV_FAILURE_POLICY_RECOMPUTE: "recompute",
    common_pb2.KV_FAILURE_POLICY_FAIL: "fail",
}
_COLLECTIONS = [
    field
    for field in parameters_of(SamplingParams).values()
    if field.parameter.max_entries is not None and field.parameter.option_tag is not None
]
_TOOL_MODES = {
    inference_pb2.TOOL_MODE_UNSPECIFIED: "auto",
    inference_pb2.TOOL_MODE_AUTO: "auto",
    inference_pb2.TOOL_MODE_NONE: "none",
    inference_pb2.TOOL_MODE_REQUIRED: "required",
}
_UNWEIGHTED = 1.0  # length_penalty that weights nothing
_EARLY_STOPPING: dict[int, EarlyStopping] = {
    inference_pb2.EARLY_STOPPING_UNSPECIFIED: False,
    inference_pb2.EARLY_STOPPING_ALWAYS: True,
    inference_pb2.EARLY_STOPPING_NEVER: "never",
}
_HOW_IT_TRAVELS = ("request_id", "resumable", "last_event_id")  # fields that do not change what is asked for


def draft_of(message: inference_pb2.GenerateRequest, terms: Terms, request_id: str = "") -> Draft:
    """`request_id`: of the stream that is resumed. Raises InvalidRequestError if there is no prompt, or a list is too
    long to be looked at."""
    options = message.options
    check_length(options.stop, MAX_STOPS, "stop")
    for field in _COLLECTIONS:
        check_num_entries(field, getattr(options, field.name), field.name)
    given = parameters_from_pb(options)  # includes zeros that the client has set
    stops = tuple(given.pop("stop", ()))
    prompt, param = _prompt(message)
    names = {}
    if isinstance(prompt, ChatPrompt) and (choice := _tool_choice(message.chat, prompt.tools)).must_call:
        rival = STRUCTURED if STRUCTURED in given else ""
        is_single = _calls_one(message.chat)
        given[STRUCTURED] = constraint_of_calls(prompt.tools, choice, is_single=is_single, rival=rival)
        names = {STRUCTURED: "tools"}
    return Draft(
        request_id=request_id or message.request_id or f"gen-{uuid.uuid4().hex}",
        model=message.model or None,
        prompt=prompt,
        prompt_param=param,
        max_tokens=given.pop("max_tokens", None),
        default_max_tokens=None,
        seed=given.pop("seed", None),
        sampling=given,  # of what is left
        stops=stops,
        cache_salt=message.cache_salt,
        priority=message.priority,
        kv_failure_policy=_kv_failure_policy(message.kv_failure_policy),
        terms=terms,
        names=names,
        arrived_at=time.monotonic(),
    )


def beams_of(message: inference_pb2.GenerateRequest) -> BeamOptions | None:
    """How to search; None: answers are sampled. Raises InvalidRequestError for what cannot be searched for."""
    given = {descriptor.name: value for descriptor, value in message.options.ListFields()}
    if not message.use_beam_search:
        for name in ("length_penalty", "early_stopping"):
            if getattr(message, name) not in (0, _UNWEIGHTED):
                raise InvalidRequestError(f"{name} needs use_beam_search", param=name)
        return None
    check_no_rivals({**given, "tools": message.chat.tools})
    if message.early_stopping not in _EARLY_STOPPING:
        problem = f"early_stopping must be an EarlyStopping, got {message.early_stopping}"
        raise InvalidRequestError(problem, param="early_stopping")
    n = message.n or 1
    penalty = message.length_penalty if message.HasField("length_penalty") else _UNWEIGHTED
    return beam_options(n, message.best_of or n, penalty, _EARLY_STOPPING[message.early_stopping])


def reply_options(message: inference_pb2.GenerateRequest, prompt: Prompt) -> ReplyOptions:
    """How answers to the prompt of its draft are parsed."""
    if not isinstance(prompt, ChatPrompt):
        return ReplyOptions(separates_reasoning=False)
    chat = message.chat
    return reply_options_of(
        prompt,
        _tool_choice(chat, prompt.tools),
        is_constrained=message.options.HasField("structured_outputs"),
        is_single=_calls_one(chat),
        separates_reasoning=chat.separate_reasoning or not chat.HasField("separate_reasoning"),
        shows_reasoning=chat.include_reasoning or not chat.HasField("include_reasoning"),
    )


def prompt_of(message: inference_pb2.TokenizeRequest) -> tuple[Prompt, str]:
    """The prompt and the field that it is in. Raises InvalidRequestError."""
    match message.WhichOneof("prompt"):
        case "text":
            begins = message.add_special_tokens if message.HasField("add_special_tokens") else True
            return TextPrompt(message.text, add_special_tokens=begins), "text"
        case "chat":
            return _chat(message.chat), "chat"
        case _:
            raise InvalidRequestError("a prompt is required: one of text, chat", param="prompt")


def asked_for(message: inference_pb2.GenerateRequest) -> bytes:
    """The same for two messages that ask for the same answer."""
    asked = inference_pb2.GenerateRequest()
    asked.CopyFrom(message)
    for name in _HOW_IT_TRAVELS:
        asked.ClearField(name)  # type: ignore[arg-type]  # names of fields
    asked.n = asked.n or 1
    return asked.SerializeToString(deterministic=True)


def check_length(items: Sized, limit: int, name: str) -> None:
    """Raises InvalidRequestError if there are more than `limit`."""
    if len(items) > limit:
        raise InvalidRequestError(f"{name} must have at most {limit} entries, got {len(items)}", param=name)


def _kv_failure_policy(number: int) -> str | None:
    """Returns the name that HTTP clients would write; a number from the future as it is, to be refused by name."""
    return _KV_FAILURE_POLICIES.get(number, str(number))


def _prompt(message: inference_pb2.GenerateRequest) -> tuple[Prompt, str]:
    match message.WhichOneof("prompt"):
        case "text":
            return TextPrompt(message.text), "text"
        case "tokens":
            return TokenPrompt(list(message.tokens.token_ids)), "tokens"
        case "chat":
            return _chat(message.chat), "chat"
        case _:
            raise InvalidRequestError("a prompt is required: one of text, tokens, chat", param="prompt")


def _chat(chat: inference_pb2.ChatPrompt) -> ChatPrompt:
    check_length(chat.messages, MAX_MESSAGES, "chat")
    if not chat.messages:
        raise InvalidRequestError("chat has no messages", param="chat")
    opens = chat.add_generation_prompt if chat.HasField("add_generation_prompt") else not chat.continue_final_message
    if opens and chat.continue_final_message:
        problem = "continue_final_message and add_generation_prompt cannot both be true"
        raise InvalidRequestError(problem, param="continue_final_message")
    sent_tools = _tools_as_json(chat.tools)
    tools = read_tools(sent_tools)
    return chat_prompt(
        _messages(chat.messages),
        tools=tools if _tool_choice(chat, tools).may_call else (),
        num_more_chars=len(bytes(sent_tools)) + len(chat.chat_template_kwargs),
        add_generation_prompt=opens,
        continue_final_message=chat.continue_final_message,
        add_special_tokens=chat.add_special_tokens,
        template_variables=decode_variables(Raw(chat.chat_template_kwargs.encode())),
    )


def _tools_as_json(tools: Sequence[inference_pb2.Tool]) -> Raw:
    """The tools as HTTP clients send them; empty: there are none. Raises InvalidRequestError for what is not JSON, and
    for more than are worth a look."""
    if not tools:
        return Raw()
    check_length(tools, MAX_TOOLS, "tools")
    return Raw(msgspec.json.encode([_tool_in_json(tool, f"tools[{index}]") for index, tool in enumerate(tools)]))


def _tool_in_json(tool: inference_pb2.Tool, where: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters:
        try:
            function["parameters"] = msgspec.json.decode(tool.parameters, type=Raw)
        except (msgspec.DecodeError, RecursionError) as error:
            param = f"{where}.parameters"
            raise InvalidRequestError(f"{param} is not valid JSON: {json_problem(error)}", param=param) from None
    return {"type": "function", "function": function}


def _tool_choice(chat: inference_pb2.ChatPrompt, tools: Sequence[Tool]) -> ToolChoice:
    """Raises InvalidRequestError."""
    match chat.WhichOneof("tool_choice"):
        case "tool_name":
            named = {"type": "function", "function": {"name": chat.tool_name}}
            return read_tool_choice(Raw(msgspec.json.encode(named)), tools)
        case "tool_mode":
            mode = _TOOL_MODES.get(chat.tool_mode, str(chat.tool_mode))  # one from the future is refused by name
            return read_tool_choice(Raw(msgspec.json.encode(mode)), tools)
        case _:
            return ToolChoice()


def _calls_one(chat: inference_pb2.ChatPrompt) -> bool:
    return chat.HasField("parallel_tool_calls") and not chat.parallel_tool_calls


def _messages(messages: Sequence[inference_pb2.ChatMessage]) -> list[Message]:
    with request_errors("chat.messages"):
        return msgspec.convert([_message(each) for each in messages], list[Message])


def _message(message: inference_pb2.ChatMessage) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "role": message.role,
        "content": message.content,
        "name": message.name or None,
        "reasoning": message.reasoning or None,
        "tool_call_id": message.tool_call_id or None,
    }
    if message.tool_calls:
        fields["content"] = message.content or None
        fields["tool_calls"] = Raw(msgspec.json.encode([_call(each) for each in message.tool_calls]))
    return fields


def _call(call: inference_pb2.ToolCall) -> dict[str, Any]:
    """In OpenAI's form."""
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}

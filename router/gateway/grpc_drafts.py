"""Requests of baton.v1.Inference in the form that all fronts share."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence, Sized

import msgspec

from common.errors import InvalidRequestError
from common.pb import common_pb2, inference_pb2
from common.rpc.convert import parameters_from_pb
from common.types import SamplingParams
from common.types.parameters import parameters_of
from common.types.validation import check_num_entries
from router.gateway.messages import Message
from router.gateway.protocol import chat_prompt, decode_variables, request_errors
from router.requests.bounds import MAX_MESSAGES, MAX_STOPS
from router.requests.request import ChatPrompt, Draft, Prompt, TextPrompt, TokenPrompt
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
_HOW_IT_TRAVELS = ("request_id", "resumable", "last_event_id")  # no part of what is asked for


def draft_of(message: inference_pb2.GenerateRequest, terms: Terms, request_id: str = "") -> Draft:
    """`request_id`: of the stream that is resumed. Raises InvalidRequestError if there is no prompt, or a list is too
    long to be looked at."""
    options = message.options
    check_length(options.stop, MAX_STOPS, "stop")
    for field in _COLLECTIONS:
        check_num_entries(field, getattr(options, field.name), field.name)
    given = parameters_from_pb(options)  # zeros that were set included
    stops = tuple(given.pop("stop", ()))
    prompt, param = _prompt(message)
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
        arrived_at=time.monotonic(),
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
    """What HTTP clients would write; a number from the future as it is, to be refused by name."""
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
    return chat_prompt(
        _messages(chat.messages),
        add_generation_prompt=opens,
        continue_final_message=chat.continue_final_message,
        add_special_tokens=chat.add_special_tokens,
        template_variables=decode_variables(msgspec.Raw(chat.chat_template_kwargs.encode())),
    )


def _messages(messages: Sequence[inference_pb2.ChatMessage]) -> list[Message]:
    with request_errors("chat.messages"):
        return msgspec.convert(
            [
                {
                    "role": each.role,
                    "content": each.content,
                    "name": each.name or None,
                    "reasoning": each.reasoning or None,
                    "tool_call_id": each.tool_call_id or None,
                }
                for each in messages
            ],
            list[Message],
        )

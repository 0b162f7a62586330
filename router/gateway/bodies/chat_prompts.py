"""Chats of all front ends as the prompt, the constraint and the parsing of answers that they ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta, Raw

from common.errors import InvalidRequestError
from common.types import Constraint
from router.gateway.bodies.decoding import check_field_values, request_errors
from router.gateway.bodies.forced_calls import forced_calls
from router.gateway.bodies.messages import Message
from router.gateway.bodies.tools import Tool, ToolChoice, name_of
from router.replies.reply import ReplyOptions
from router.requests.bounds import MAX_CONTENT_PARTS, MAX_TEMPLATE_BYTES
from router.requests.request import ChatPrompt

_documents_decoder = msgspec.json.Decoder(list[dict[str, Any]] | None)
_variables_decoder = msgspec.json.Decoder(dict[str, Any] | None)


Documents = Annotated[
    Raw,
    Meta(
        description="Documents, for templates that take them.",
        extra_json_schema={"type": "array", "items": {"type": "object"}},
    ),
]


class Continuing(Protocol):
    """A chat that may go on with its last message."""

    add_generation_prompt: bool | None
    continue_final_message: bool | None


def check_continuation(body: Continuing) -> None:
    """Raises InvalidRequestError if a chat both opens a turn and goes on with one."""
    if body.continue_final_message and body.add_generation_prompt:
        problem = "continue_final_message and add_generation_prompt cannot both be true"
        raise InvalidRequestError(problem, param="continue_final_message")


def chat_prompt(
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] = (),
    num_more_chars: int,
    add_generation_prompt: bool,
    continue_final_message: bool,
    add_special_tokens: bool,
    template_variables: Mapping[str, Any],
) -> ChatPrompt:
    """The conversation for the template. `num_more_chars`: of what it gets beside the messages. Raises
    InvalidRequestError."""
    if not messages:
        raise InvalidRequestError("messages is empty", param="messages")
    num_parts = sum(len(message.content) for message in messages if isinstance(message.content, list))
    if num_parts > MAX_CONTENT_PARTS:
        problem = f"messages must have at most {MAX_CONTENT_PARTS} content parts, got {num_parts}"
        raise InvalidRequestError(problem, param="messages")
    return ChatPrompt(
        [message.as_template_input(index) for index, message in enumerate(messages)],
        tools=tools,
        num_chars=sum(message.size for message in messages) + num_more_chars,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
        add_special_tokens=add_special_tokens,
        template_variables=template_variables,
    )


def constraint_of_calls(tools: Sequence[Tool], choice: ToolChoice, *, is_single: bool, rival: str) -> Constraint:
    """Returns the constraint of an answer that must call tools. `rival`: the field that constrains it as well, if one
    does. Raises InvalidRequestError."""
    if rival:
        raise InvalidRequestError(f"give {rival} or force calls, not both", param="tool_choice")
    return forced_calls(tools, choice, is_single=is_single)


def reply_options_of(
    prompt: ChatPrompt,
    choice: ToolChoice,
    *,
    is_constrained: bool,
    is_single: bool,
    separates_reasoning: bool,
    shows_reasoning: bool,
    budget_needs_reasoning: bool = True,
) -> ReplyOptions:
    """How answers to a chat are parsed. `is_constrained`: by what the client gave, not by calls that are forced."""
    return ReplyOptions(
        tools={name_of(tool): tool["function"].get("parameters") or {} for tool in prompt.tools},
        must_call=choice.must_call,
        max_calls=1 if is_single else None,
        # A grammar begins with the first token, so there is no reasoning before it.
        separates_reasoning=separates_reasoning and not (choice.must_call or is_constrained),
        shows_reasoning=shows_reasoning,
        budget_needs_reasoning=budget_needs_reasoning,
    )


def decode_documents(value: Raw) -> list[dict[str, Any]] | None:
    """`documents` as sent. Raises InvalidRequestError."""
    if not len(bytes(value)):
        return None
    check_field_values(value, "documents")
    with request_errors("documents"):
        documents: list[dict[str, Any]] | None = _documents_decoder.decode(value)
        return documents


def decode_variables(value: Raw) -> dict[str, Any]:
    """`chat_template_kwargs` as sent. Raises InvalidRequestError."""
    num_bytes = len(bytes(value))
    if not num_bytes:
        return {}
    if num_bytes > MAX_TEMPLATE_BYTES:
        problem = f"chat_template_kwargs must have at most {MAX_TEMPLATE_BYTES} bytes of JSON, got {num_bytes}"
        raise InvalidRequestError(problem, param="chat_template_kwargs")
    with request_errors("chat_template_kwargs"):
        return _variables_decoder.decode(value) or {}

"""Errors of /v1/messages and /v1/responses name the field that the client sent."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from common.errors import InvalidRequestError, OverloadedError
from router.gateway.anthropic.bodies import parse_messages
from router.gateway.bodies.field_names import CHAT_NAMES, MESSAGES_NAMES, RESPONSES_NAMES, FieldNames
from router.gateway.responses.bodies import parse_responses
from tests.unit.router.gateway.test_tools_http import HERMES, start

__all__ = ["start"]
ASKS = [{"role": "user", "content": "Weather?"}]
DEEP_SCHEMA = {"a": json.loads("[" * 100 + "]" * 100)}


def in_errors(names: FieldNames, error: Exception) -> Exception:
    with pytest.raises(type(error)) as caught, names.in_errors():
        raise error
    return caught.value


@pytest.mark.parametrize(
    ("names", "param", "message", "renamed", "new_message"),
    [
        (MESSAGES_NAMES, "tools[3].function.parameters", "tools[3].function.parameters is nested",
         "tools[3].input_schema", "tools[3].input_schema is nested"),
        (MESSAGES_NAMES, "tools[3].function.name", "tools[3].function.name is", "tools[3].name", "tools[3].name is"),
        (MESSAGES_NAMES, "parallel_tool_calls", "x", "tool_choice.disable_parallel_tool_use", "x"),
        (MESSAGES_NAMES, "reasoning_effort", "x", "output_config.effort", "x"),
        (MESSAGES_NAMES, "response_format", "give response_format, not both", "output_config.format",
         "give output_config.format, not both"),
        (MESSAGES_NAMES, "response_format.json_schema.schema", "x", "output_config.format.schema", "x"),
        (MESSAGES_NAMES, "structured_outputs", "structured_outputs is empty", "output_config.format",
         "output_config.format is empty"),
        (MESSAGES_NAMES, "chat_template_kwargs", "x", "thinking", "x"),
        (MESSAGES_NAMES, "thinking_token_budget", "thinking_token_budget is not supported", "thinking.budget_tokens",
         "thinking.budget_tokens is not supported"),
        (MESSAGES_NAMES, "stop", "stop must have 2, got 'stop'", "stop_sequences",
         "stop_sequences must have 2, got 'stop'"),
        (MESSAGES_NAMES, "temperature", "it must not stop", "temperature", "it must not stop"),
        (RESPONSES_NAMES, "messages", "messages has 2 tokens and max_tokens is 3", "input",
         "input has 2 tokens and max_output_tokens is 3"),
        (RESPONSES_NAMES, "max_tokens", "max_tokens must be 'max_tokens'", "max_output_tokens",
         "max_output_tokens must be 'max_tokens'"),
        (RESPONSES_NAMES, "tools[0].function.name", "tools[0]: x", "tools[0].name", "tools[0]: x"),
        (RESPONSES_NAMES, "reasoning_effort", "x", "reasoning.effort", "x"),
        (RESPONSES_NAMES, "response_format", "x", "text.format", "x"),
        (RESPONSES_NAMES, "response_format.json_schema.schema", "x", "text.format.schema", "x"),
        (RESPONSES_NAMES, "structured_outputs", "x", "text.format", "x"),
        (CHAT_NAMES, "response_format", "response_format is wrong", "response_format", "response_format is wrong"),
    ],
)  # fmt: skip
def test_fields_of_chats_are_renamed(
    names: FieldNames, param: str, message: str, renamed: str, new_message: str
) -> None:
    error = in_errors(names, InvalidRequestError(message, param=param))
    assert isinstance(error, InvalidRequestError)
    assert (error.param, error.message) == (renamed, new_message)


def test_an_error_keeps_what_else_it_says() -> None:
    error = in_errors(MESSAGES_NAMES, OverloadedError("too many", param="stop", retry_after_s=7.0))
    assert isinstance(error, OverloadedError)
    assert (error.param, error.retry_after_s) == ("stop_sequences", 7.0)


@pytest.mark.parametrize(
    ("parse", "body", "hint"),
    [
        (parse_messages, {"max_tokens": 5, "messages": ASKS, "stop": ["a"]}, "did you mean stop_sequences?"),
        (parse_responses, {"input": "a", "max_tokens": 5}, "did you mean max_output_tokens?"),
        (parse_responses, {"input": "a", "response_format": {}}, "did you mean text.format?"),
    ],
)
def test_a_field_of_chats_is_told_from_one_that_is_unknown(parse, body: dict[str, Any], hint: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"unknown field '[a-z_]+'; {re.escape(hint)}"):
        parse(json.dumps(body).encode())


TOOL = {"name": "weather", "input_schema": {"type": "object"}}
FUNCTION = {"type": "function", "name": "weather", "parameters": {"type": "object"}}
OBJECT = {"type": "json_schema", "schema": {"type": "object"}}
REFUSED_MESSAGES = [
    ({"tools": [{**TOOL, "input_schema": [1]}]}, "tools[0].input_schema"),
    ({"tools": [{**TOOL, "input_schema": DEEP_SCHEMA}]}, "tools[0].input_schema"),
    ({"tools": [TOOL, TOOL]}, "tools[1].name"),
    ({"tools": [{**TOOL, "name": ""}]}, "tools[0].name"),
    ({"output_config": {"format": {**OBJECT, "schema": 3}}}, "output_config.format.schema"),
    ({"stop_sequences": ["a", ""]}, "stop_sequences"),
    ({"thinking": {"type": "enabled", "budget_tokens": 0}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": 60}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "disabled", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ({"thinking": {"type": "enabled", "budget_tokens": "5"}}, "thinking.budget_tokens"),
    ({"response_format": {}}, "response_format"),  # an unknown field keeps its name
]
REFUSED_RESPONSES = [
    ({"tools": [{**FUNCTION, "parameters": [1]}]}, "tools[0].parameters"),
    ({"tools": [{**FUNCTION, "name": ""}]}, "tools[0].name"),
    ({"text": {"format": {**OBJECT, "schema": 3}}}, "text.format.schema"),
    ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
    ({"input": "a" * 100_000}, "input"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
    ({"input": [{"type": "function_call", "name": "a", "arguments": "{"}]}, "input[0].arguments"),
    ({"max_output_tokens": 10_000_000}, "input"),
    ({"max_output_tokens": -1}, "max_output_tokens"),
    ({"max_tokens": 5}, "max_tokens"),
]  # fmt: skip


async def test_http_errors_name_the_field_as_it_was_sent(start) -> None:
    cluster = await start(HERMES, "Hi")
    for path, body, refused in (
        ("/v1/messages", {"max_tokens": 50, "messages": ASKS}, REFUSED_MESSAGES),
        ("/v1/responses", {"input": "Weather?"}, REFUSED_RESPONSES),
    ):
        for fields, param in refused:
            response = await cluster.post(path, **{**body, **fields})
            assert response.status_code == 400, fields
            error = response.json()["error"]
            assert error["param"] == param, error
            assert param.partition("[")[0] in error["message"]

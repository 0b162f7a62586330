"""Requests to each API, and the pods' answers. Prompt and answer are those of benchmarks.router."""

from __future__ import annotations

from typing import NamedTuple

from benchmarks.router.workload import ANSWER, COMPLETION, PROMPT, Call

_DONE = "data: [DONE]"
_CHAT = {"messages": [{"role": "user", "content": PROMPT}], "temperature": 0}
_WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
_SCHEMA = {
    "type": "object",
    "properties": {"dog": {"type": "string"}, "color": {"enum": ["red", "blue"]}},
    "required": ["dog", "color"],
    "additionalProperties": False,
}
_FORMAT = {"type": "json_schema", "json_schema": {"name": "story", "schema": _SCHEMA}}
_CALL = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 3}}\n</tool_call>\n'
_RESPONSE = {"input": PROMPT, "temperature": 0}


class Case(NamedTuple):
    """One kind of request."""

    name: str
    call: Call | None  # None: a chat over gRPC


class Setup(NamedTuple):
    """The cases of one start of the router."""

    cases: tuple[Case, ...]
    answer: str = ANSWER  # of the pods, again and again until it is as long as asked for
    options: tuple[str, ...] = ()  # of the router


def _chat(name: str, **fields: object) -> Case:
    return Case(name, Call("/v1/chat/completions", {**_CHAT, **fields}, "max_tokens", _DONE))


SETUPS = (
    Setup(
        (
            Case("completion", COMPLETION),
            _chat("chat"),
            _chat("chat, response_format", response_format=_FORMAT),
            Case("/v1/messages", Call("/v1/messages", _CHAT, "max_tokens", "event: message_stop")),
            Case("/v1/responses", Call("/v1/responses", _RESPONSE, "max_output_tokens", "event: response.incomplete")),
            Case("gRPC chat", None),
        )
    ),
    Setup((_chat("chat, tools", tools=[_WEATHER]),), answer=ANSWER + _CALL),
    Setup(
        (_chat("chat, reasoning"),),
        answer=f"<think>\n{ANSWER * 2}\n</think>\n{ANSWER * 2}",
        options=("--reasoning-parser", "qwen3"),
    ),
)

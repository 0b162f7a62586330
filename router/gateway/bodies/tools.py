"""The tools of a request, in OpenAI's form: what the model may call, and what it must."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import Raw

from common.errors import InvalidRequestError, quoted
from router.gateway.bodies.decoding import check_field_values
from router.replies.tools.base import MAX_NAME_CHARS
from router.replies.tools.json_scanner import MAX_DEPTH
from router.requests.bounds import MAX_TOOLS, MAX_TOOLS_BYTES

Tool = Mapping[str, Any]
"""As it was sent: its type, and a function with a name."""


class _Function(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Tool(msgspec.Struct):
    type: Literal["function"]
    function: _Function


class _NamedFunction(msgspec.Struct):
    name: str


class _NamedChoice(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: _NamedFunction


class ToolChoice(NamedTuple):
    """The calls that the model may or must make."""

    may_call: bool = True
    must_call: bool = False
    name: str = ""  # the only one that it must call; empty: any


_CHOICES = {
    "none": ToolChoice(may_call=False),
    "auto": ToolChoice(),
    "required": ToolChoice(must_call=True),
}
_list_decoder = msgspec.json.Decoder(list[Raw] | None)
_any_decoder = msgspec.json.Decoder()
_choice_decoder = msgspec.json.Decoder(str | _NamedChoice | None)


def name_of(tool: Tool) -> str:
    """The name of the tool's function."""
    name = tool["function"]["name"]
    assert isinstance(name, str)
    return name


def object_or_empty(value: Raw) -> Raw:
    """An object as it was sent; an empty one if none was."""
    return value if bytes(value) not in (b"", b"null") else Raw(b"{}")


def read_tools(value: Raw) -> list[Tool]:
    """`tools` as sent; empty: they were not. Raises InvalidRequestError."""
    num_bytes = len(bytes(value))
    if not num_bytes:
        return []
    if num_bytes > MAX_TOOLS_BYTES:
        raise _invalid(f"tools must have at most {MAX_TOOLS_BYTES} bytes of JSON, got {num_bytes}", "tools")
    check_field_values(value, "tools")
    try:
        items = _list_decoder.decode(value) or []
    except msgspec.ValidationError as error:
        raise _invalid(f"tools: {error}", "tools") from None
    if len(items) > MAX_TOOLS:
        raise _invalid(f"tools must have at most {MAX_TOOLS} entries, got {len(items)}", "tools")
    tools = [_read_tool(item, f"tools[{index}]") for index, item in enumerate(items)]
    _check_names([name_of(tool) for tool in tools])
    return tools


def read_tool_choice(value: Raw, tools: Sequence[Tool]) -> ToolChoice:
    """`tool_choice` as sent; empty: it was not. Raises InvalidRequestError."""
    try:
        sent = _choice_decoder.decode(value) if len(bytes(value)) else None
    except msgspec.ValidationError:
        sent = ""
    if sent is None:
        return ToolChoice()
    if isinstance(sent, str):
        if sent not in _CHOICES:
            problem = 'must be "auto", "none", "required" or {"type": "function", "function": {"name": ...}}'
            raise _invalid(f"tool_choice {problem}", "tool_choice")
        choice = _CHOICES[sent]
    else:
        choice = ToolChoice(must_call=True, name=sent.function.name)
    if choice.must_call and not tools:
        raise _invalid("tool_choice needs tools", "tool_choice")
    if choice.name and choice.name not in map(name_of, tools):
        raise _invalid(f"tool_choice: there is no tool {quoted(choice.name)} among tools", "tool_choice")
    return choice


def _read_tool(item: Raw, where: str) -> Tool:
    try:
        tool = _any_decoder.decode(item)
        named = msgspec.convert(tool, _Tool).function
    except msgspec.ValidationError as error:
        raise _misfit(error, where) from None
    except RecursionError:
        raise _too_deep(where) from None
    if _is_deeper(named.parameters, MAX_DEPTH):
        raise _too_deep(f"{where}.function.parameters")
    if not 0 < len(named.name) <= MAX_NAME_CHARS:
        param = f"{where}.function.name"
        raise _invalid(f"{param} must have 1 to {MAX_NAME_CHARS} characters", param)
    assert isinstance(tool, dict)
    return tool


def _check_names(names: Sequence[str]) -> None:
    seen: set[str] = set()
    for index, name in enumerate(names):
        if name in seen:
            raise _invalid(f"tools[{index}]: there is another tool {quoted(name)}", f"tools[{index}].function.name")
        seen.add(name)


def _is_deeper(value: Any, depth: int) -> bool:
    """Whether lists and objects are nested more than `depth` deep."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return not depth or any(_is_deeper(each, depth - 1) for each in inner)


def _misfit(error: msgspec.ValidationError, where: str) -> InvalidRequestError:
    """ "Expected `str` - at `$.function.name`" -> "tools[0].function.name: expected `str`"."""
    problem, _, path = str(error).partition(" - at `$.")
    param = ".".join(filter(None, (where, path.rstrip("`"))))
    return _invalid(f"{param}: {problem[:1].lower()}{problem[1:]}", param)


def _too_deep(param: str) -> InvalidRequestError:
    return _invalid(f"{param} is nested more than {MAX_DEPTH} deep", param)


def _invalid(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param)

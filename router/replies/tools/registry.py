"""Parsers of tool calls by name; an implementation is imported when it is asked for.

Other distributions add parsers by entry points of the group `baton.tool_parsers`: a name, and a subclass of ToolParser.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import NamedTuple

from common.errors import ConfigError
from router.replies.tools.base import ToolParser

GROUP = "baton.tool_parsers"
AUTO, NONE = "auto", "none"
_PARSERS = {
    "harmony": ("router.replies.tools.harmony", "HarmonyParser"),
    "hermes": ("router.replies.tools.hermes", "HermesParser"),
    "llama3_json": ("router.replies.tools.llama3", "Llama3JsonParser"),
    "mistral": ("router.replies.tools.mistral", "MistralParser"),
    "pythonic": ("router.replies.tools.pythonic", "PythonicParser"),
    "qwen3_coder": ("router.replies.tools.qwen3_coder", "Qwen3CoderParser"),
}


class _Sign(NamedTuple):
    """Text that the chat templates of a family have."""

    text: str
    parser: str


_SIGNS = (  # the first that is found decides
    _Sign("<parameter=", "qwen3_coder"),
    _Sign("<function=", NONE),  # with arguments in other forms
    _Sign("<|channel|>analysis", "harmony"),
    _Sign("[TOOL_CALLS]", "mistral"),
    _Sign("<tool_call>", "hermes"),
    _Sign("func_name1(params_name1=", "pythonic"),
    _Sign("<|python_start|>", "pythonic"),
    _Sign("<|python_tag|>", "llama3_json"),
    _Sign('"parameters": dictionary of argument name and its value', "llama3_json"),
)


def find_tool_parser(setting: str, chat_template: str) -> tuple[str, type[ToolParser] | None]:
    """Name and class of the parser that --tool-parser says; none: calls are not parsed. Raises ConfigError."""
    name = _detect(chat_template) if setting == AUTO else setting
    return name, None if name == NONE else load_tool_parser(name)


def load_tool_parser(name: str) -> type[ToolParser]:
    """Raises ConfigError if there is none of that name, or it is no parser."""
    if name in _PARSERS:
        module, attribute = _PARSERS[name]
        found = getattr(importlib.import_module(module), attribute)
    else:
        points = {point.name: point for point in entry_points(group=GROUP)}
        if name not in points:
            known = ", ".join((AUTO, NONE, *_PARSERS, *sorted(points)))
            raise ConfigError(f"--tool-parser: there is no {name!r}; there are {known}", param="tool_parser")
        found = points[name].load()
    if not (isinstance(found, type) and issubclass(found, ToolParser)):
        raise ConfigError(f"--tool-parser: {name!r} is not a subclass of ToolParser", param="tool_parser")
    return found


def _detect(chat_template: str) -> str:
    return next((sign.parser for sign in _SIGNS if sign.text in chat_template), NONE)

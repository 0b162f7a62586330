"""Calls of Qwen 3 Coder and models after it:

    <tool_call>
    <function=name>
    <parameter=key>
    value
    </parameter>
    </function>
    </tool_call>

Some answers leave the opening <tool_call> out, and have the closing one or not: a function that is among the request's
tools is a call then, too. Values are texts as they are, without the line breaks beside the tags, and JSON where the
schema has another type.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Mapping
from typing import Any

import msgspec
from msgspec import Raw

from router.replies.tools.base import MAX_CALL_CHARS, MAX_NAME_CHARS, ReadingParser, ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _END_OF_FUNCTION = "<function=", "</function>"
_PARAMETER, _END_OF_PARAMETER = "<parameter=", "</parameter>"
_COMPOSING = ("anyOf", "oneOf", "allOf")
_WORDS = {"True": b"true", "False": b"false", "None": b"null"}  # as Python has them
_TYPES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    type(None): "null",
}
_CONTAINERS: Mapping[bytes, str] = {b"[": "array", b"{": "object"}  # by how they begin
_MAX_SCHEMAS = 256  # parts of a parameter's schema that are looked at, each time that it is given
_raw_decoder = msgspec.json.Decoder(Raw)


class Qwen3CoderParser(ReadingParser):
    """See ToolParser."""

    markers = (_OPEN, _CLOSE)  # special tokens in some vocabularies

    def _read(self) -> Generator[None, None, None]:
        may_close = False  # a call that nothing opened
        while marker := (yield from self._take_text_until(_OPEN, _FUNCTION, _CLOSE)):
            call = None
            if marker == _OPEN:
                call = yield from self._take_call()
            elif marker == _FUNCTION:
                call = yield from self._take_function()
                call = call if call is not None and call.name in self.tools else None
            if call is not None:
                self._add(call)
            if call is not None or (marker == _CLOSE and may_close):
                self._drop()
            else:
                self._give_back()
            may_close = marker == _FUNCTION and call is not None

    def _take_call(self) -> Generator[None, None, ToolCall | None]:
        yield from self._skip_spaces()
        if not (yield from self._takes(_FUNCTION)):
            return None
        call = yield from self._take_function()
        if call is None:
            return None
        yield from self._skip_spaces()
        return call if (yield from self._takes(_CLOSE)) else None

    def _take_function(self) -> Generator[None, None, ToolCall | None]:
        """Reads a function from its name on."""
        name = yield from self._take_key()
        if not name:
            return None
        texts = yield from self._take_parameters()
        if texts is None:
            return None
        schemas = self.tools.get(name, {}).get("properties")
        known = schemas if isinstance(schemas, Mapping) else {}
        arguments = {key: _value_of(text, known.get(key)) for key, text in texts.items()}
        return ToolCall(name, msgspec.json.encode(arguments).decode())

    def _take_key(self) -> Generator[None, None, str]:
        """Reads the name that a tag has, and the end of the tag; empty: there is none."""
        key = yield from self._take_up_to(">", MAX_NAME_CHARS)
        return key if key and key.isprintable() and "<" not in key else ""

    def _take_parameters(self) -> Generator[None, None, dict[str, str] | None]:
        """Reads parameters up to the end of the function."""
        texts: dict[str, str] = {}
        room = MAX_CALL_CHARS
        while True:
            yield from self._skip_spaces()
            if not (yield from self._takes("<")):
                return None
            if (yield from self._sees("/")):
                return texts if (yield from self._takes(_END_OF_FUNCTION[1:])) else None
            if not (yield from self._takes(_PARAMETER[1:])):
                return None
            key = yield from self._take_key()
            text = None if not key else (yield from self._take_up_to(_END_OF_PARAMETER, room))
            if not key or text is None:
                return None
            room -= len(key) + len(text) + len(_PARAMETER)
            texts[key] = text.removeprefix("\n").removesuffix("\n")


def _value_of(text: str, schema: Any) -> str | Raw:
    """The text, or the JSON that it is, if the schema has no text there."""
    types = _types_of(schema)
    stripped = text.strip()
    encoded = _WORDS.get(stripped) or stripped.encode()
    if types and types != {"string"} and _type_of(encoded) & types:
        return Raw(encoded)
    return text


def _types_of(schema: Any) -> set[str]:
    """The types that a schema allows, as far as its first _MAX_SCHEMAS parts say; none if they do not say."""
    types: set[str] = set()
    waiting = deque([schema])
    for _ in range(_MAX_SCHEMAS):
        if not waiting:
            break
        part = waiting.popleft()
        if not isinstance(part, Mapping):
            continue
        named = part.get("type")
        types.update(each for each in _beginning(named) or [named] if isinstance(each, str))
        for keyword in _COMPOSING:
            waiting.extend(_beginning(part.get(keyword)))
    return types


def _beginning(value: Any) -> list[Any]:
    """The first entries of a list; none of what is no list."""
    return value[:_MAX_SCHEMAS] if isinstance(value, list) else []


def _type_of(encoded: bytes) -> set[str]:
    """The types of JSON that it is; none: it is no JSON."""
    container = _CONTAINERS.get(encoded[:1])
    try:
        if container:  # may be large, and what is in it does not matter
            _raw_decoder.decode(encoded)
            return {container}
        value = msgspec.json.decode(encoded)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return set()
    if isinstance(value, float) and not math.isfinite(value):
        return set()
    name = _TYPES.get(type(value), "string")
    if isinstance(value, float) and value.is_integer():
        return {"number", "integer"}
    return {"integer", "number"} if name == "integer" else {name}

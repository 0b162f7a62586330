"""Calls of Llama 3.2, Llama 4 and others that write Python: the answer is `[name(argument=value, ...), ...]`.

Values are literals; `true`, `false` and `null` are also understood. As a list may begin any answer, only a call of one
of the request's tools is one.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Generator
from typing import Any

import msgspec

from router.replies.tools.base import ReadingParser, ToolCall

_MAX_ARGUMENT_CHARS = 2**14  # about 10 ms of Python's parser
_MAX_DEPTH = 64
_PLAIN = re.compile(r"""[^()\[\]{}"'\\]*""")
_IN_TEXT = {quote: re.compile(rf"[^{quote}\\]*") for quote in "\"'"}
_CLOSER = {"(": ")", "[": "]", "{": "}"}
_NAMED = {"true": True, "false": False, "null": None, "none": None}
_START = "<|python_start|>"
_END = "<|python_end|>"


class PythonicParser(ReadingParser):
    """See ToolParser."""

    def _read(self) -> Generator[None, None, None]:
        self._begin()
        yield from self._skip_spaces()
        has_start = not (yield from self._sees("<")) or (yield from self._takes(_START))
        if has_start and (yield from self._takes("[")):
            yield from self._take_calls()
        else:
            self._give_back()
        yield from self._take_rest()

    def _take_calls(self) -> Generator[None, None, None]:
        while True:
            yield from self._skip_spaces()
            call = yield from self._take_call()
            if call is None:
                return self._give_back()
            self._add(call)
            yield from self._skip_spaces()
            if (yield from self._sees("]")):
                self._at += 1
                self._begin()
                if (yield from self._sees("<")) and (yield from self._takes(_END)):
                    return self._drop()
                return self._give_back()
            if not (yield from self._takes(",")):
                return self._give_back()

    def _take_call(self) -> Generator[None, None, ToolCall | None]:
        name = yield from self._take_name()
        if name not in self.tools or not (yield from self._takes("(")):
            return None
        scanner, texts, num_chars = _Scanner(), [], 0
        while not scanner.is_over and num_chars < _MAX_ARGUMENT_CHARS and (yield from self._has_more()):
            start = self._at
            end = min(len(self._piece), start + _MAX_ARGUMENT_CHARS - num_chars)
            self._at = scanner.scan(self._piece, start, end)
            texts.append(self._piece[start : self._at])
            num_chars += self._at - start
        return _read_call(name, "".join(texts)) if scanner.is_complete else None


class _Scanner:
    """Finds the parenthesis that ends the arguments."""

    def __init__(self) -> None:
        self.is_complete = False
        self._has_failed = False
        self._closers = [")"]
        self._quote = ""
        self._is_escaped = False

    @property
    def is_over(self) -> bool:
        return self.is_complete or self._has_failed

    def scan(self, text: str, at: int, end: int) -> int:
        while at < end and not self.is_over:
            if self._is_escaped:
                self._is_escaped = False
                at += 1
                continue
            plain = (_IN_TEXT[self._quote] if self._quote else _PLAIN).match(text, at, end)
            assert plain is not None
            at = plain.end()
            if at < end:
                self._take(text[at])
                at += not self._has_failed
        return at

    def _take(self, character: str) -> None:
        if character == "\\":
            self._is_escaped = True
            self._has_failed = not self._quote
        elif self._quote:
            self._quote = ""
        elif character in _IN_TEXT:
            self._quote = character
        elif character in _CLOSER:
            self._closers.append(_CLOSER[character])
            self._has_failed = len(self._closers) > _MAX_DEPTH
        else:
            self._has_failed = self._closers.pop() != character
            self.is_complete = not (self._closers or self._has_failed)


def _read_call(name: str, text: str) -> ToolCall | None:
    """The call with these arguments, up to the parenthesis that ends them; None: they are not keywords and literals."""
    try:
        call = ast.parse(f"f({text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args or any(keyword.arg is None for keyword in call.keywords):
            return None
        arguments = {keyword.arg: _value(keyword.value) for keyword in call.keywords}
        if len(arguments) < len(call.keywords):
            return None
        return ToolCall(name, msgspec.json.encode(arguments).decode())
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return None


def _value(node: ast.expr) -> Any:
    """Raises ValueError for what JSON does not have."""
    match node:
        case ast.Constant(value=float() as number) if not math.isfinite(number):
            raise ValueError
        case ast.Constant(value=str() | bool() | int() | float() | None):
            return node.value
        case ast.Name(id=name) if name in _NAMED:
            return _NAMED[name]
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float())):
            return -_value(node.operand)
        case ast.List() | ast.Tuple():
            return [_value(each) for each in node.elts]
        case ast.Dict() if None not in node.keys:
            keys = [_value(key) for key in node.keys if key is not None]
            if not all(isinstance(key, str) for key in keys):
                raise ValueError
            return dict(zip(keys, map(_value, node.values), strict=True))
    raise ValueError

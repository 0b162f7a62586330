"""Finds the end of a JSON object whose text comes in pieces."""

from __future__ import annotations

import enum
import re

from router.replies.markers import SPACES

MAX_DEPTH = 64
_MAX_SCALAR_CHARS = 400
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')  # characters of a string that need no attention
_IN_SCALAR = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"true|false|null|-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?", re.ASCII)
_HEX = "0123456789abcdefABCDEF"


class _Expects(enum.Enum):
    OBJECT = enum.auto()  # the whole document, which is an object
    VALUE = enum.auto()
    FIRST_VALUE = enum.auto()  # or the end of the array
    KEY = enum.auto()
    FIRST_KEY = enum.auto()  # or the end of the object
    COLON = enum.auto()
    COMMA = enum.auto()  # or the end of the array or object
    TEXT = enum.auto()  # the rest of a string
    ESCAPE = enum.auto()
    HEX = enum.auto()
    SCALAR = enum.auto()


class JsonScanner:
    """Reads one object, strictly, to its end or to where it turns out to be none. Linear in the text."""

    def __init__(self) -> None:
        self.is_complete = False
        self._has_failed = False
        self._expects = _Expects.OBJECT
        self._closers: list[str] = []
        self._is_key = False  # the text that is being read
        self._num_hex = 0  # digits to come
        self._scalar = ""

    @property
    def is_over(self) -> bool:
        """It is complete, or none."""
        return self.is_complete or self._has_failed

    def scan(self, text: str, at: int, end: int) -> int:
        """Reads on, from `at` to `end`. Returns where the object ends, or the first character that no object has there,
        else `end`."""
        while at < end and not self.is_over:
            match self._expects:
                case _Expects.TEXT:
                    at = self._scan_text(text, at, end)
                case _Expects.SCALAR:
                    at = self._scan_scalar(text, at, end)
                case _:
                    if self._take(text[at]):
                        at += 1
        return at

    def _scan_text(self, text: str, at: int, end: int) -> int:
        plain = _PLAIN.match(text, at, end)
        assert plain is not None
        at = plain.end()
        if at == end:
            return at
        match text[at]:
            case '"':
                self._expects = _Expects.COLON if self._is_key else _Expects.COMMA
            case "\\":
                self._expects = _Expects.ESCAPE
            case _:
                self._has_failed = True
                return at
        return at + 1

    def _scan_scalar(self, text: str, at: int, end: int) -> int:
        scalar = _IN_SCALAR.match(text, at, end)
        assert scalar is not None
        self._scalar += scalar[0][: _MAX_SCALAR_CHARS + 1]
        if len(self._scalar) > _MAX_SCALAR_CHARS:
            self._has_failed = True
            return at
        if scalar.end() < end:
            if _SCALAR.fullmatch(self._scalar):
                self._expects = _Expects.COMMA
            else:
                self._has_failed = True
        return scalar.end()

    def _take(self, character: str) -> bool:
        """Reads one character; False: not this one."""
        expects = self._expects
        match expects:
            case _Expects.ESCAPE:
                return self._take_escape(character)
            case _Expects.HEX:
                return self._take_hex(character)
        if character in SPACES and expects is not _Expects.OBJECT:
            return True
        match expects, character:
            case ((_Expects.OBJECT | _Expects.VALUE | _Expects.FIRST_VALUE), "{"):
                return self._open("}", _Expects.FIRST_KEY)
            case ((_Expects.VALUE | _Expects.FIRST_VALUE), "["):
                return self._open("]", _Expects.FIRST_VALUE)
            case (_Expects.FIRST_KEY, "}") | (_Expects.FIRST_VALUE, "]"):
                return self._close()
            case ((_Expects.VALUE | _Expects.FIRST_VALUE | _Expects.KEY | _Expects.FIRST_KEY), '"'):
                self._is_key = expects in (_Expects.KEY, _Expects.FIRST_KEY)
                return self._next(_Expects.TEXT)
            case ((_Expects.VALUE | _Expects.FIRST_VALUE), _) if _IN_SCALAR.fullmatch(character):
                self._scalar = ""
                self._expects = _Expects.SCALAR
                return False  # the next state reads the character
            case _Expects.COLON, ":":
                return self._next(_Expects.VALUE)
            case _Expects.COMMA, ",":
                return self._next(_Expects.KEY if self._closers[-1] == "}" else _Expects.VALUE)
            case _Expects.COMMA, _ if character == self._closers[-1]:
                return self._close()
        return self._fail()

    def _take_escape(self, character: str) -> bool:
        if character == "u":
            self._num_hex = 4
            return self._next(_Expects.HEX)
        return self._next(_Expects.TEXT) if character in '"\\/bfnrt' else self._fail()

    def _take_hex(self, character: str) -> bool:
        if character not in _HEX:
            return self._fail()
        self._num_hex -= 1
        return self._next(_Expects.HEX if self._num_hex else _Expects.TEXT)

    def _open(self, closer: str, expects: _Expects) -> bool:
        if len(self._closers) == MAX_DEPTH:
            return self._fail()
        self._closers.append(closer)
        return self._next(expects)

    def _close(self) -> bool:
        self._closers.pop()
        self.is_complete = not self._closers
        return self._next(_Expects.COMMA)

    def _next(self, expects: _Expects) -> bool:
        self._expects = expects
        return True

    def _fail(self) -> bool:
        self._has_failed = True
        return False

"""The constraint of a request on the text of its answer, and the bounds that are checked at the edge.

Whether it can be compiled is found out in the pod, which has the vocabulary. A router builds the same values from
`response_format`, `structured_outputs` and whatever else needs a constrained answer.
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Sequence
from typing import Any, Self

import msgspec

from common.errors import InvalidRequestError, json_problem, quoted
from common.types.schemas import check_references, schemas_of_tag

MAX_CONSTRAINT_BYTES = 128 * 2**10  # of the text of a constraint, as UTF-8
MAX_CONSTRAINT_DEPTH = 64  # objects and lists within each other
MAX_CONSTRAINT_VALUES = 20_000  # JSON values of a schema
MAX_CHOICES = 4096
MAX_WHITESPACE_PATTERN_CHARS = 256

_TEXT = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # of JSON; to the end if that of the text is missing
_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_STRUCTURE = bytes(set(range(256)) - set(b"[]{},"))


class ConstraintKind(enum.IntEnum):
    """How `Constraint.text` is read. Values equal baton.v1.ConstraintKind."""

    JSON_SCHEMA = 1  # a JSON schema
    JSON_OBJECT = 2  # nothing: any JSON object
    REGEX = 3  # a regular expression that the whole answer matches
    CHOICE = 4  # a JSON list of texts, one of which is the answer
    GRAMMAR = 5  # a context-free grammar in EBNF, whose start is `root`
    STRUCTURAL_TAG = 6  # JSON: free text with constrained parts, see xgrammar's structural tags


_JSON_KINDS = frozenset({ConstraintKind.JSON_SCHEMA, ConstraintKind.CHOICE, ConstraintKind.STRUCTURAL_TAG})


class Constraint(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A grammar for the answer's text; equal ones are compiled once. The classmethods make valid ones of plain values;
    `check_constraint` checks one from outside."""

    kind: ConstraintKind
    text: str = ""
    any_whitespace: bool = True  # JSON: whitespace between tokens is the model's choice
    whitespace_pattern: str = ""  # JSON: regular expression of it; empty: JSON's own

    @classmethod
    def json_schema(
        cls, schema: dict[str, Any] | bool | str, *, any_whitespace: bool = True, whitespace_pattern: str = ""
    ) -> Self:
        """`schema`: as a value or as JSON."""
        text = schema if isinstance(schema, str) else msgspec.json.encode(schema).decode()
        return cls(
            kind=ConstraintKind.JSON_SCHEMA,
            text=text,
            any_whitespace=any_whitespace,
            whitespace_pattern=whitespace_pattern,
        )

    @classmethod
    def json_object(cls, *, any_whitespace: bool = True, whitespace_pattern: str = "") -> Self:
        """Any JSON object."""
        return cls(
            kind=ConstraintKind.JSON_OBJECT, any_whitespace=any_whitespace, whitespace_pattern=whitespace_pattern
        )

    @classmethod
    def regex(cls, pattern: str) -> Self:
        """Text that the pattern matches as a whole."""
        return cls(kind=ConstraintKind.REGEX, text=pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Self:
        """One of the texts."""
        return cls(kind=ConstraintKind.CHOICE, text=msgspec.json.encode(list(choices)).decode())

    @classmethod
    def grammar(cls, ebnf: str) -> Self:
        """Text that `root` of the grammar derives."""
        return cls(kind=ConstraintKind.GRAMMAR, text=ebnf)

    @classmethod
    def structural_tag(cls, tag: dict[str, Any] | str) -> Self:
        """Free text with constrained parts."""
        text = tag if isinstance(tag, str) else msgspec.json.encode(tag).decode()
        return cls(kind=ConstraintKind.STRUCTURAL_TAG, text=text)


@functools.lru_cache(maxsize=4)  # as one request may have it for many prompts
def check_constraint(constraint: Constraint, param: str) -> None:
    """Checks size, depth, JSON and references, at a cost in proportion to the size. Raises InvalidRequestError; `param`
    names the field."""
    text = constraint.text
    num_bytes = len(text) if text.isascii() else len(_encoded(text, param))
    if num_bytes > MAX_CONSTRAINT_BYTES:
        raise _invalid(param, f"has {num_bytes} bytes, more than the limit of {MAX_CONSTRAINT_BYTES}")
    if len(constraint.whitespace_pattern) > MAX_WHITESPACE_PATTERN_CHARS:
        raise _invalid(param, f"whitespace_pattern has more than {MAX_WHITESPACE_PATTERN_CHARS} characters")
    if not text and constraint.kind is not ConstraintKind.JSON_OBJECT:
        raise _invalid(param, "is empty")
    if constraint.kind in _JSON_KINDS:
        _check_json(constraint, param)


def _check_json(constraint: Constraint, param: str) -> None:
    encoded = _encoded(constraint.text, param)
    check_json_shape(encoded, param)
    try:
        value = msgspec.json.decode(encoded)
    except (msgspec.DecodeError, RecursionError) as error:
        raise _invalid(param, f"is not valid JSON: {json_problem(error)}") from error
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA if not isinstance(value, dict | bool):
            raise _invalid(param, f"must be a JSON schema, an object, got {quoted(value)}")
        case ConstraintKind.STRUCTURAL_TAG if not isinstance(value, dict):
            raise _invalid(param, f"must be an object, got {quoted(value)}")
        case ConstraintKind.JSON_SCHEMA:
            check_references(value, param)
        case ConstraintKind.STRUCTURAL_TAG:
            for schema in schemas_of_tag(value):
                check_references(schema, param)
        case _:
            _check_choices(value, param)


def _check_choices(choices: object, param: str) -> None:
    if not isinstance(choices, list) or not choices or not all(isinstance(each, str) for each in choices):
        raise _invalid(param, "must have a list of at least one text as choice")
    if len(choices) > MAX_CHOICES:
        raise _invalid(param, f"has {len(choices)} choices, more than the limit of {MAX_CHOICES}")
    if "" in choices:
        raise _invalid(param, "has an empty choice")


def check_json_shape(encoded: bytes, param: str) -> None:
    """Raises InvalidRequestError if the JSON is too deep or holds too many values; does not recurse."""
    structure = _TEXT.sub(b"", encoded).translate(_SQUARE, _NO_STRUCTURE)
    if structure.count(b"[") + structure.count(b",") > MAX_CONSTRAINT_VALUES:
        raise _invalid(param, f"holds more than {MAX_CONSTRAINT_VALUES} JSON values")
    brackets = structure.replace(b",", b"")
    for _ in range(MAX_CONSTRAINT_DEPTH):
        num_bytes = len(brackets)
        brackets = brackets.replace(b"[]", b"")  # the innermost ones
        if len(brackets) == num_bytes:
            return  # they do not match, which the decoder tells better
    if brackets:
        raise _invalid(param, f"is nested more than {MAX_CONSTRAINT_DEPTH} levels deep")


def _encoded(text: str, param: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise _invalid(param, "holds a lone surrogate, which is no character") from error


def _invalid(param: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{param} {problem}", param=param)

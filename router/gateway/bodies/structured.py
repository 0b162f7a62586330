"""`response_format` and `structured_outputs` of a body, and the constraint that they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Raw, field

from common.errors import InvalidRequestError, quoted
from common.types import Constraint
from common.types.constraint import MAX_CHOICES, MAX_CONSTRAINT_BYTES, check_json_shape
from router.requests.bounds import MAX_NAME_CHARS
from router.requests.request import STRUCTURED

FORMAT = "response_format"

_KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
_Name = Annotated[str, Meta(max_length=MAX_NAME_CHARS)]


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, rename={"schema_": "schema"}):
    """`json_schema` of a response_format."""

    schema_: Raw
    name: _Name | None = None
    description: str | None = None
    strict: bool | None = None  # the schema is always kept to


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """OpenAI's form."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchemaFormat | None = None
    format: Raw = field(default_factory=Raw)  # of a structural tag
    structures: Raw = field(default_factory=Raw)  # of a structural tag in its older form
    triggers: Raw = field(default_factory=Raw)


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's form: one constraint, and options."""

    json: Raw = field(default_factory=Raw)
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(max_length=MAX_CHOICES)] | None = None
    grammar: str | None = None
    structural_tag: Raw = field(default_factory=Raw)
    disable_any_whitespace: bool | None = None
    whitespace_pattern: str | None = None
    disable_additional_properties: bool | None = (
        None  # of no effect: properties that a schema does not name are left out
    )
    disable_fallback: bool | None = None  # of no effect: the backend is the pods' setting

    @property
    def kinds(self) -> list[str]:
        """The constraints that are given."""
        return [name for name in _KINDS if _is_given(getattr(self, name))]


_format_decoder = msgspec.json.Decoder(ResponseFormat)
_structured_decoder = msgspec.json.Decoder(StructuredOutputs)


def constraint_of_format(value: Raw) -> Constraint | None:
    """Returns the constraint of `response_format` as it was sent, not null; None: any text. Raises InvalidRequestError,
    or msgspec's errors for a field of the wrong type."""
    _check_raw(value, FORMAT)
    wanted = _format_decoder.decode(value)
    match wanted.type:
        case "text":
            return None
        case "json_object":
            return Constraint.json_object()
        case "json_schema":
            if wanted.json_schema is None:
                raise _invalid(f"{FORMAT}.json_schema is required with the type json_schema", FORMAT)
            return Constraint.json_schema(_text(wanted.json_schema.schema_, f"{FORMAT}.json_schema.schema"))
        case "structural_tag":
            return Constraint.structural_tag(bytes(value).decode())


def constraint_of_structured(value: Raw) -> Constraint | None:
    """Returns the constraint of `structured_outputs` as it was sent, not null; None: nothing is asked for. Raises the
    errors of `constraint_of_format`."""
    _check_raw(value, STRUCTURED)
    wanted = _structured_decoder.decode(value)
    kinds = wanted.kinds
    if not kinds:
        return None
    if len(kinds) > 1:
        raise _invalid(f"{STRUCTURED} must have one constraint, got {', '.join(kinds)}", STRUCTURED)
    options: dict[str, Any] = {
        "any_whitespace": not wanted.disable_any_whitespace,
        "whitespace_pattern": wanted.whitespace_pattern or "",
    }
    match kinds[0]:
        case "json":
            return Constraint.json_schema(_text(wanted.json, f"{STRUCTURED}.json"), **options)
        case "json_object":
            return Constraint.json_object(**options)
        case "regex":
            return Constraint.regex(wanted.regex or "")
        case "choice":
            return Constraint.choice(wanted.choice or ())
        case "grammar":
            return Constraint.grammar(wanted.grammar or "")
        case _:
            return Constraint.structural_tag(_text(wanted.structural_tag, f"{STRUCTURED}.structural_tag"))


@contextmanager
def errors_of_constraint(name: str) -> Iterator[None]:
    """Pods name the constraint that they cannot keep to; the client may have given it as the field `name`."""
    try:
        yield
    except InvalidRequestError as error:
        if error.param != STRUCTURED:
            raise
        raise type(error)(error.message, param=name) from error


def _is_given(value: object) -> bool:
    if isinstance(value, Raw):
        return bytes(value) not in (b"", b"null")
    return value not in (None, False)


def _check_raw(value: Raw, param: str) -> None:
    encoded = bytes(value)
    if len(encoded) > MAX_CONSTRAINT_BYTES:
        raise _invalid(f"{param} has {len(encoded)} bytes, more than the limit of {MAX_CONSTRAINT_BYTES}", param)
    check_json_shape(encoded, param)


def _text(value: Raw, param: str) -> str:
    """JSON that was sent as a value or as a text."""
    decoded = msgspec.json.decode(value)
    if isinstance(decoded, str):
        return decoded
    if not isinstance(decoded, dict | bool):
        raise _invalid(f"{param} must be an object, got {quoted(decoded)}", param)
    return bytes(value).decode()


def _invalid(message: str, param: str) -> InvalidRequestError:
    return InvalidRequestError(message, param=param)

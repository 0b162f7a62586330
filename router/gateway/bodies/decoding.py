"""Decoding of JSON bodies: how many values they may have, and errors that name the field."""

from __future__ import annotations

import difflib
import re

import msgspec
from msgspec import Raw

from common.errors import InvalidRequestError, PayloadTooLargeError, json_problem, quoted
from router.gateway.bodies.field_names import FieldNames
from router.gateway.bodies.stream_options import StreamOptions
from router.gateway.bodies.structured import FORMAT, JsonSchemaFormat, ResponseFormat, StructuredOutputs
from router.requests.bounds import MAX_FIELD_VALUES
from router.requests.request import STRUCTURED

_SEPARATORS = b",[{"  # each begins another JSON value
_AT = re.compile(r" - at (`key` in )?`(key in )?\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"Object contains unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"Object missing required field `(?P<name>[^`]*)`")
_NESTED: dict[str, type[msgspec.Struct] | None] = {
    "stream_options": StreamOptions,
    FORMAT: ResponseFormat,
    f"{FORMAT}.json_schema": JsonSchemaFormat,
    STRUCTURED: StructuredOutputs,
}
_MAX_GUESSED_CHARS = 64  # of an unknown field's name; comparing takes as long as both are


def check_num_values(body: bytes, limit: int) -> None:
    """Raises PayloadTooLargeError if the JSON holds more than `limit` values, which would take long to parse. Commas
    and brackets within texts count as well."""
    if _has_more_values(body, limit):
        raise PayloadTooLargeError(f"the body holds more JSON values than the limit of {limit} (max_body_values)")


def check_encoding(body: bytes) -> None:
    """Raises InvalidRequestError for what is not UTF-8, also in fields that are decoded later."""
    if not body.isascii():
        with request_errors():
            body.decode()


def check_field_values(value: Raw, param: str) -> None:
    """Raises InvalidRequestError if a field that was kept as it was sent holds more values than may be decoded at once.
    Commas and brackets within texts count as well."""
    if _has_more_values(bytes(value), MAX_FIELD_VALUES):
        problem = f"{param} holds more JSON values than the limit of {MAX_FIELD_VALUES}"
        raise InvalidRequestError(problem, param=param)


def _has_more_values(encoded: bytes, limit: int) -> bool:
    return len(encoded) > limit and len(encoded) - len(encoded.translate(None, _SEPARATORS)) > limit


class _Name:
    """The name of a field of a body. A mapping with it as a key cannot have it twice: the comparison raises."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __hash__(self) -> int:
        return hash(self._name)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _Name) and other._name == self._name:
            raise InvalidRequestError(f"{self._name} is given more than once", param=self._name)
        return False


_names_decoder = msgspec.json.Decoder(dict[_Name, Raw], dec_hook=lambda _, name: _Name(name))


def check_fields_are_unique(body: bytes) -> None:
    """Raises InvalidRequestError at the first field of a JSON object that is given again: a proxy before the router may
    have obeyed the other value. The body must have been parsed, so that its names are few."""
    _names_decoder.decode(body)


class request_errors:  # noqa: N801  used as a context manager
    """Turns msgspec's errors into ours."""

    def __init__(self, field: str = "", *, struct: type[msgspec.Struct] | None = None) -> None:
        """`field`: that is decoded; empty: the whole body, which is a `struct`."""
        self._field = field
        self._struct = struct

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, msgspec.ValidationError):
            raise _validation_error(str(error), self._field, self._struct) from None
        if isinstance(error, msgspec.DecodeError | UnicodeDecodeError | RecursionError):
            raise InvalidRequestError(f"the body is not valid JSON: {_malformed(error)}") from None


def _malformed(error: Exception) -> str:
    """Describes the malformed place in JSON."""
    detail = json_problem(error).removeprefix("JSON is malformed: ")
    if detail == "Input data was truncated":
        return "it is cut off, or ends after half of a surrogate pair"
    return detail.replace("unexpected end of hex escape", "half of a surrogate pair")


def _validation_error(message: str, field: str, struct: type[msgspec.Struct] | None) -> InvalidRequestError:
    """ "Expected `int`, got `str` - at `$.max_tokens`" -> "max_tokens: expected `int`, got `str`"."""
    where = _AT.search(message)
    path = ".".join(filter(None, (field, where["path"] if where else ""))).replace(".[", "[")
    problem = message[: where.start()] if where else message
    if unknown := _UNKNOWN.match(problem):
        name = unknown["name"]
        param = f"{path}.{name}".lstrip(".")
        return InvalidRequestError(f"unknown field {quoted(param)}{_hint(name, path, struct)}", param=param)
    if missing := _MISSING.match(problem):
        param = f"{path}.{missing['name']}".lstrip(".")
        return InvalidRequestError(f"{param} is required", param=param)
    if not path:
        return InvalidRequestError(f"the body must be a JSON object: {problem[0].lower()}{problem[1:]}")
    return InvalidRequestError(f"{path}: {problem[0].lower()}{problem[1:]}", param=path)


def _hint(name: str, path: str, struct: type[msgspec.Struct] | None) -> str:
    """Returns a hint at the field that was probably meant by that name; may be empty."""
    known = {"": struct, **_NESTED}.get(path)
    if known is None or len(name) > _MAX_GUESSED_CHARS:
        return ""
    if path_with_it := getattr(known, "ELSEWHERE", {}).get(name):
        return f"; it is a field of {path_with_it}"
    names: FieldNames | None = getattr(known, "NAMES", None)
    if names is not None and (other := names.get(name)):
        return f"; did you mean {other}?"
    close = difflib.get_close_matches(name, known.__struct_fields__, n=1)
    return f"; did you mean {close[0]}?" if close else ""

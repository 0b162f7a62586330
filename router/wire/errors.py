"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}; and as Anthropic's do."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from common.errors import (
    MAX_QUOTED_CHARS,
    BatonError,
    ErrorCode,
    OverloadedError,
    UnattainableError,
    UnauthenticatedError,
    UnavailableError,
    shortened,
)
from router.wire.one_line import encode_line

MESSAGES_PATH = "/v1/messages"
OPENAI_DONE = b"data: [DONE]\n\n"  # the last event of a stream
_UNAVAILABLE_RETRY_AFTER_S = 1.0


class ErrorObject(msgspec.Struct):
    """An error in OpenAI's form."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct):
    """Body of every answer that is not a success."""

    error: ErrorObject


class AnthropicErrorBody(msgspec.Struct):
    """The same as Anthropic's clients expect it."""

    type: str
    error: ErrorObject


def error_json(error: BatonError) -> bytes:
    """The body for this error, or an event's data: one line."""
    return _openai_body(error.code, error.message, error.param, error.code.label)


def _openai_body(code: ErrorCode, message: str, param: str | None, label: str) -> bytes:
    return encode_line(ErrorBody(ErrorObject(message, code.value.openai_type, param, label)))


def openai_error_events(error: BatonError) -> bytes:
    """Returns the end of an OpenAI stream with this error."""
    return b"data: " + error_json(error) + b"\n\n" + OPENAI_DONE


_ANTHROPIC_TYPES = {
    ErrorCode.INVALID_ARGUMENT: "invalid_request_error",
    ErrorCode.GRAMMAR_TOO_SLOW: "invalid_request_error",
    ErrorCode.NOT_FOUND: "not_found_error",
    ErrorCode.TOO_LARGE: "request_too_large",
    ErrorCode.UNAUTHENTICATED: "authentication_error",
    ErrorCode.PERMISSION_DENIED: "permission_error",
    ErrorCode.RESOURCE_EXHAUSTED: "rate_limit_error",
    ErrorCode.UNAVAILABLE: "overloaded_error",
    ErrorCode.DEADLINE_EXCEEDED: "timeout_error",
}


def anthropic_error_json(error: BatonError) -> bytes:
    """The body for this error as Anthropic's clients expect it, with `param` and `code` beside."""
    return _anthropic_body(error.code, error.message, error.param, error.code.label)


def _anthropic_body(code: ErrorCode, message: str, param: str | None, label: str) -> bytes:
    detail = ErrorObject(message, _ANTHROPIC_TYPES.get(code, "api_error"), param, label)
    return encode_line(AnthropicErrorBody("error", detail))


def anthropic_error_events(error: BatonError) -> bytes:
    """Returns the end of an Anthropic stream with this error."""
    return b"event: error\ndata: " + anthropic_error_json(error) + b"\n\n"


class Dialect(NamedTuple):
    """How one API writes errors."""

    error_body: Callable[[BatonError], bytes]
    error_events: Callable[[BatonError], bytes]


_OPENAI = Dialect(error_json, openai_error_events)
ANTHROPIC = Dialect(anthropic_error_json, anthropic_error_events)


def dialect_of(path: str) -> Dialect:
    """How errors of this path are written."""
    return ANTHROPIC if path == MESSAGES_PATH or path.startswith(f"{MESSAGES_PATH}/") else _OPENAI


def error_headers(error: BatonError) -> list[tuple[bytes, bytes]]:
    """Headers beside the usual: when to come back, or not to, what to bring."""
    if isinstance(error, UnauthenticatedError):
        return [(b"www-authenticate", b'Bearer realm="baton"')]
    if isinstance(error, UnattainableError):  # OpenAI's clients try every 503 again, unless they are told
        return [(b"x-should-retry", b"false")]
    if isinstance(error, OverloadedError):
        seconds = error.retry_after_s
    elif isinstance(error, UnavailableError):
        seconds = _UNAVAILABLE_RETRY_AFTER_S
    else:
        return []
    return [(b"retry-after", str(math.ceil(seconds)).encode())]


def route_error(status: int, method: str, path: str) -> tuple[int, bytes]:
    """Status and body for a request that no route takes."""
    write = _anthropic_body if dialect_of(path) is ANTHROPIC else _openai_body
    path = shortened(path, MAX_QUOTED_CHARS)
    if status == 405:
        body = write(ErrorCode.INVALID_ARGUMENT, f"{method} is not allowed on {path}", None, "method_not_allowed")
    else:
        body = write(ErrorCode.NOT_FOUND, f"there is nothing at {path}", None, ErrorCode.NOT_FOUND.label)
    return status, body

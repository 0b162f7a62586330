"""Errors as OpenAI's clients expect them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import math

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
from router.gateway.one_line import encode_line

_UNAVAILABLE_RETRY_AFTER_S = 1.0


class ErrorObject(msgspec.Struct):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(msgspec.Struct):
    """Body of every answer that is not a success."""

    error: ErrorObject


def error_json(error: BatonError) -> bytes:
    """The body for this error, or an event's data: one line."""
    code = error.code
    return encode_line(ErrorBody(ErrorObject(error.message, code.value.openai_type, error.param, code.label)))


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
    path = shortened(path, MAX_QUOTED_CHARS)
    if status == 405:
        message = f"{method} is not allowed on {path}"
    else:
        message = f"there is nothing at {path}"
    code = ErrorCode.NOT_FOUND if status == 404 else ErrorCode.INVALID_ARGUMENT
    return status, msgspec.json.encode(
        ErrorBody(
            ErrorObject(message, code.value.openai_type, None, code.label if status == 404 else "method_not_allowed")
        )
    )

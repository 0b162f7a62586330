"""What clients raise. All are a BatonError, with `message` and `code`; `param` names the field at fault, if one is."""

from __future__ import annotations

from common.errors import (
    BatonError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnknownModelError,
    UnreachableError,
)

__all__ = [
    "BatonError",
    "DeadlineExceededError",
    "InvalidRequestError",
    "OverloadedError",
    "PermissionDeniedError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnknownModelError",
    "UnreachableError",
]

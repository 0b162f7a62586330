"""The errors that clients raise, all of them a BatonError with `message` and `code`. `param` names a bad field."""

from __future__ import annotations

from common.errors import (
    BatonError,
    ConflictError,
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
    "ConflictError",
    "DeadlineExceededError",
    "InvalidRequestError",
    "OverloadedError",
    "PermissionDeniedError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnknownModelError",
    "UnreachableError",
]

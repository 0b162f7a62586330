"""The one mapping between BatonError, gRPC statuses and `baton.v1.Error`.

A status carries the exact error class in trailing metadata, since several classes share one gRPC status:

    baton-error-code      lower-case name of the ErrorCode
    baton-error-param     request field at fault, if one is
    baton-retry-after-s   seconds, of an OverloadedError

Servicers wrap their bodies in `rpc_errors`; clients turn an AioRpcError into a BatonError with `from_rpc_error`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any, NoReturn, cast

import grpc
from google.protobuf.message import DecodeError

from common.errors import (
    MAX_MESSAGE_CHARS,
    BatonError,
    ErrorCode,
    InvalidRequestError,
    OverloadedError,
    UnreachableError,
    make_error,
    shortened,
)
from common.pb import common_pb2

logger = logging.getLogger(__name__)

CODE_KEY = "baton-error-code"
PARAM_KEY = "baton-error-param"
RETRY_AFTER_KEY = "baton-retry-after-s"

# For a status without our metadata: gRPC itself, or a proxy, made it.
_CODES_BY_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: ErrorCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND: ErrorCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED: ErrorCode.TOO_LARGE,  # gRPC's code for a message over the size limit
    grpc.StatusCode.UNAUTHENTICATED: ErrorCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED: ErrorCode.PERMISSION_DENIED,
    grpc.StatusCode.DEADLINE_EXCEEDED: ErrorCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED: ErrorCode.CANCELLED,
    grpc.StatusCode.FAILED_PRECONDITION: ErrorCode.INCOMPATIBLE,
    grpc.StatusCode.UNIMPLEMENTED: ErrorCode.INCOMPATIBLE,  # the peer serves another API
}


def from_rpc_error(error: grpc.RpcError | grpc.Call) -> BatonError:
    """Converts the error of a failed call. Callers write `raise from_rpc_error(error) from error`."""
    call = cast("grpc.Call", error)  # which has the same methods, also in asyncio
    pairs = cast("Iterable[tuple[str, str | bytes]]", call.trailing_metadata() or ())  # the type stubs know less
    metadata = {key: value for key, value in pairs if isinstance(value, str)}
    message = call.details() or call.code().name
    name = metadata.get(CODE_KEY)
    if name is not None and name.upper() in ErrorCode.__members__:
        code = ErrorCode[name.upper()]
    elif call.code() is grpc.StatusCode.UNAVAILABLE:
        return UnreachableError(message)
    else:
        code = _CODES_BY_STATUS.get(call.code(), ErrorCode.INTERNAL)
    return make_error(
        code, message, param=metadata.get(PARAM_KEY), retry_after_s=_seconds(metadata.get(RETRY_AFTER_KEY))
    )


async def abort_with(context: grpc.aio.ServicerContext[Any, Any], error: BatonError) -> NoReturn:
    """Ends the call with the status and metadata of `error`."""
    metadata = [(CODE_KEY, error.code.label)]
    if error.param:
        metadata.append((PARAM_KEY, _ascii(error.param)))
    if isinstance(error, OverloadedError):
        metadata.append((RETRY_AFTER_KEY, f"{error.retry_after_s:g}"))
    await context.abort(grpc.StatusCode[error.code.value.grpc_status], _line(error.message), tuple(metadata))


def drop_frames(error: BaseException) -> None:
    """Drops what the traceback of an aborted call's error holds. gRPC keeps the error in a cycle with the call, so that
    the request, however large, would be freed only when the garbage collector runs."""
    error.__traceback__ = error.__context__ = error.__cause__ = None


@asynccontextmanager
async def rpc_errors(
    context: grpc.aio.ServicerContext[Any, Any], count_internal: Callable[[], None] = lambda: None
) -> AsyncIterator[None]:
    """Turns a servicer's exceptions into the call's status; an unexpected one is logged, counted and reported as
    INTERNAL."""
    try:
        yield
    except BatonError as error:
        await abort_with(context, error)
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError as error:  # the call itself has ended, so there is no peer to answer
        logger.info("the peer ended a call before it was answered: %s", error)
        raise asyncio.CancelledError from error
    except DecodeError as error:  # of a stream; `parsing` rejects invalid unary requests
        await abort_with(context, InvalidRequestError(f"invalid message: {error}"))
    except Exception:
        count_internal()
        logger.exception("internal error in a call")
        await abort_with(context, BatonError("internal error; see the log of the process that answered"))


def error_to_pb(error: BatonError) -> common_pb2.Error:
    """The error as an event on a stream."""
    return common_pb2.Error(
        code=common_pb2.ErrorCode.ValueType(error.code.value.number),
        message=_line(error.message),
        param=error.param or "",
    )


def error_from_pb(message: common_pb2.Error) -> BatonError:
    """The error that a stream event carries."""
    return make_error(ErrorCode.from_number(message.code), message.message, param=message.param or None)


def _line(text: str) -> str:
    """Makes a message one line, short enough for the metadata of a status, whatever text of a peer it quotes."""
    return shortened(" ".join(text.split()), MAX_MESSAGE_CHARS)


def _ascii(text: str) -> str:
    """Escapes a metadata value, which must be printable ASCII."""
    return text.encode("ascii", "backslashreplace").decode().replace("\n", " ")


def _seconds(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None

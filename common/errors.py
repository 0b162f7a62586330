"""Every failure Baton can name.

BatonError                      code -> HTTP status, gRPC status, metric label
|-- ConfigError                 a setting is wrong; the process exits with code 2
|   `-- ModelLoadError          the model directory is unusable or its architecture unsupported
|-- InvalidRequestError         400; `param` names the field
|   |-- PromptTooLongError      400 on HTTP as OpenAI does it
|   `-- GrammarTooSlowError     400; following the grammar takes too long
|-- UnknownModelError           404
|-- UnknownPodError             404
|-- UnknownRequestError         404
|-- ConflictError               409; it contradicts what there is, such as a name that is taken
|-- UnauthenticatedError        401; no valid API key
|-- PermissionDeniedError       403; the API key is not one that may do this
|-- PayloadTooLargeError        413
|-- OverloadedError             429; `retry_after_s`: when to retry
|-- UnavailableError            503; no pod can serve, or the pod is draining
|   |-- EngineDeadError         the engine process is gone
|   |-- UnreachableError        no answer from the peer: no connection, or it broke
|   `-- UnattainableError       no pod could keep a limit that the request names; a retry cannot help
|-- DeadlineExceededError       504
|-- RequestCancelledError       499; the client went away
|-- NonFiniteError              500; the model's logits for this request are infinite or NaN
|-- IncompatiblePeerError       fingerprints, connectors or layouts do not match
`-- TransferError               KV could not be moved; `reason` is the metric label of the recompute
    |-- BlockMissingError       the store has no such block
    |-- BlockCorruptError       length, header or digest is wrong
    |-- StoreError              the medium failed: full, unreachable, unwritable
    |   `-- StoreUnavailableError  its circuit breaker is open: the operation was not tried
    |-- TransferTimeoutError    the transfer did not end within its deadline
    `-- TransferCancelledError  the blocks are no longer needed
"""

from __future__ import annotations

import enum
from typing import NamedTuple, Self


class CodeSpec(NamedTuple):
    """The representations of one error code for each kind of client."""

    number: int  # value of baton.v1.ErrorCode
    http_status: int
    grpc_status: str  # name in grpc.StatusCode
    openai_type: str  # `type` of an OpenAI-style error object


class ErrorCode(enum.Enum):
    """Class of a failure. The lower-case name is the metric label."""

    INVALID_ARGUMENT = CodeSpec(1, 400, "INVALID_ARGUMENT", "invalid_request_error")
    NOT_FOUND = CodeSpec(2, 404, "NOT_FOUND", "invalid_request_error")
    TOO_LARGE = CodeSpec(3, 413, "INVALID_ARGUMENT", "invalid_request_error")
    UNAUTHENTICATED = CodeSpec(5, 401, "UNAUTHENTICATED", "authentication_error")
    RESOURCE_EXHAUSTED = CodeSpec(6, 429, "RESOURCE_EXHAUSTED", "rate_limit_error")
    UNAVAILABLE = CodeSpec(7, 503, "UNAVAILABLE", "server_error")
    DEADLINE_EXCEEDED = CodeSpec(8, 504, "DEADLINE_EXCEEDED", "server_error")
    CANCELLED = CodeSpec(9, 499, "CANCELLED", "server_error")
    INCOMPATIBLE = CodeSpec(10, 500, "FAILED_PRECONDITION", "server_error")
    INTERNAL = CodeSpec(11, 500, "INTERNAL", "server_error")
    PERMISSION_DENIED = CodeSpec(12, 403, "PERMISSION_DENIED", "permission_error")
    NON_FINITE = CodeSpec(13, 500, "INTERNAL", "server_error")
    GRAMMAR_TOO_SLOW = CodeSpec(14, 400, "INVALID_ARGUMENT", "invalid_request_error")
    CONFLICT = CodeSpec(15, 409, "ALREADY_EXISTS", "invalid_request_error")

    @property
    def label(self) -> str:
        """Value of the `code` label in metrics and of `code` in OpenAI-style errors."""
        return self.name.lower()

    @classmethod
    def from_number(cls, number: int) -> ErrorCode:
        """The code with this number in baton.v1.ErrorCode; unknown numbers are INTERNAL."""
        return _BY_NUMBER.get(number, cls.INTERNAL)


MAX_MESSAGE_CHARS = 500  # of an error, whose text clients and peers influence
MAX_QUOTED_CHARS = 200  # of a value in it
JSON_DEPTH = 512  # levels of JSON that are always read; how many more depends on the interpreter's stack

_BY_NUMBER = {code.value.number: code for code in ErrorCode}


def shortened(text: str, max_chars: int) -> str:
    """Returns the text, or its beginning and its end if it is too long."""
    if len(text) <= max_chars:
        return text
    num_last = max_chars // 4
    return f"{text[: max_chars - num_last - 3]}...{text[-num_last:]}"


def quoted(value: object) -> str:
    """Quotes a value from a client or a peer in an error message: its repr, at most MAX_QUOTED_CHARS of it."""
    if isinstance(value, str) and len(value) > 2 * MAX_QUOTED_CHARS:
        value = value[:MAX_QUOTED_CHARS] + value[-MAX_QUOTED_CHARS:]
    return shortened(repr(value), MAX_QUOTED_CHARS)


def json_problem(error: Exception) -> str:
    """Says what is wrong with JSON that could not be decoded."""
    return f"it is nested more than {JSON_DEPTH} levels deep" if isinstance(error, RecursionError) else str(error)


class BatonError(Exception):
    """Base of all errors. `message` is one line for a person, `param` the field or setting at fault. Both are
    shortened, as they may quote a client or a peer."""

    code = ErrorCode.INTERNAL
    is_for_terminal = False  # True: the message may be long

    def __init__(self, message: str, *, param: str | None = None) -> None:
        if not self.is_for_terminal:
            message = shortened(message, MAX_MESSAGE_CHARS)
        super().__init__(message)
        self.message = message
        self.param = None if param is None else shortened(param, MAX_QUOTED_CHARS)


class ConfigError(BatonError):
    """A setting is wrong. Raised at start only; the process prints the message and exits with code 2."""

    code = ErrorCode.INVALID_ARGUMENT
    is_for_terminal = True

    @classmethod
    def of(cls, setting: str, reason: str) -> Self:
        """Names the setting by its option, as those errors do that come before a process starts anything."""
        return cls(f"--{setting.replace('_', '-')}: {reason}", param=setting)


class ModelLoadError(ConfigError):
    """The model cannot be loaded or its architecture cannot be served."""


class InvalidRequestError(BatonError):
    """The request is malformed or out of range; nothing was started."""

    code = ErrorCode.INVALID_ARGUMENT


class PromptTooLongError(InvalidRequestError):
    """Prompt plus answer do not fit the model's context."""


class GrammarTooSlowError(InvalidRequestError):
    """Following the request's grammar takes more time or memory than it may."""

    code = ErrorCode.GRAMMAR_TOO_SLOW


class UnknownModelError(BatonError):
    """No model of that name is served."""

    code = ErrorCode.NOT_FOUND


class UnknownPodError(BatonError):
    """No pod has that address."""

    code = ErrorCode.NOT_FOUND


class UnknownRequestError(BatonError):
    """Nothing is kept of a request with that id that this key may see."""

    code = ErrorCode.NOT_FOUND


class ConflictError(BatonError):
    """It contradicts what there is, such as a name that is taken."""

    code = ErrorCode.CONFLICT


class UnauthenticatedError(BatonError):
    """The request has no API key, or an unknown one."""

    code = ErrorCode.UNAUTHENTICATED


class PermissionDeniedError(BatonError):
    """The API key is valid, but may not be used for this."""

    code = ErrorCode.PERMISSION_DENIED


class PayloadTooLargeError(BatonError):
    """The body exceeds the configured limit."""

    code = ErrorCode.TOO_LARGE


class OverloadedError(BatonError):
    """Too many requests are running or waiting; retry after `retry_after_s` seconds."""

    code = ErrorCode.RESOURCE_EXHAUSTED

    def __init__(self, message: str, *, param: str | None = None, retry_after_s: float = 1.0) -> None:
        super().__init__(message, param=param)
        self.retry_after_s = retry_after_s


class UnavailableError(BatonError):
    """No pod can serve this now."""

    code = ErrorCode.UNAVAILABLE


class EngineDeadError(UnavailableError):
    """The engine process ended; the pod must be restarted."""


class UnreachableError(UnavailableError):
    """The peer did not answer: there is no connection, it broke, or a proxy has no server behind it."""


class UnattainableError(UnavailableError):
    """No pod could keep a limit that the request names, even with no other request."""


class DeadlineExceededError(BatonError):
    """The request's deadline passed."""

    code = ErrorCode.DEADLINE_EXCEEDED


class RequestCancelledError(BatonError):
    """The client went away or aborted."""

    code = ErrorCode.CANCELLED


class NonFiniteError(BatonError):
    """The model computed no finite logit for the request: its weights or KV overflow, or the device is faulty."""

    code = ErrorCode.NON_FINITE


class IncompatiblePeerError(BatonError):
    """Two sides of a handoff do not fit together."""

    code = ErrorCode.INCOMPATIBLE


class TransferError(BatonError):
    """KV blocks could not be moved. Never fatal: missing KV is recomputed and counted under `reason`."""

    reason = "transfer"


class BlockMissingError(TransferError):
    """The store does not hold the block."""

    reason = "block_missing"


class BlockCorruptError(TransferError):
    """A block's header, length or digest is wrong."""

    reason = "block_corrupt"


class StoreError(TransferError):
    """The medium failed."""

    reason = "store_failed"


class StoreUnavailableError(StoreError):
    """The medium failed before and is not used until a probe succeeds. The original failure has been logged."""


class TransferTimeoutError(TransferError):
    """The transfer did not end within its deadline."""

    reason = "transfer_timeout"


class TransferCancelledError(TransferError):
    """The blocks are no longer needed: the request ended or the connector closes."""

    reason = "transfer_cancelled"


_CLASSES: dict[ErrorCode, type[BatonError]] = {
    ErrorCode.INVALID_ARGUMENT: InvalidRequestError,
    ErrorCode.NOT_FOUND: UnknownModelError,
    ErrorCode.CONFLICT: ConflictError,
    ErrorCode.UNAUTHENTICATED: UnauthenticatedError,
    ErrorCode.PERMISSION_DENIED: PermissionDeniedError,
    ErrorCode.TOO_LARGE: PayloadTooLargeError,
    ErrorCode.UNAVAILABLE: UnavailableError,
    ErrorCode.DEADLINE_EXCEEDED: DeadlineExceededError,
    ErrorCode.CANCELLED: RequestCancelledError,
    ErrorCode.NON_FINITE: NonFiniteError,
    ErrorCode.GRAMMAR_TOO_SLOW: GrammarTooSlowError,
    ErrorCode.INCOMPATIBLE: IncompatiblePeerError,
}


def make_error(
    code: ErrorCode, message: str, *, param: str | None = None, retry_after_s: float | None = None
) -> BatonError:
    """The BatonError of this code, as a peer reported it."""
    if code is ErrorCode.RESOURCE_EXHAUSTED:
        return OverloadedError(message, param=param, retry_after_s=1.0 if retry_after_s is None else retry_after_s)
    error = _CLASSES.get(code, BatonError)(message, param=param)
    error.code = code
    return error

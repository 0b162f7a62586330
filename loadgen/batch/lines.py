"""Lines of OpenAI's batch format: requests in, answers out."""

from __future__ import annotations

import hashlib
import re
from typing import Any, NamedTuple

import msgspec

from common.recorded_trace import problem_of
from loadgen.http_client import Response

ID_PREFIX = "batch_req_"
_DIGEST_BYTES = 16
_PATH = re.compile(r"/v1(/[A-Za-z0-9_-]+)+")
_OK = 200


class BatchRequest(NamedTuple):
    """A request of the input."""

    id: str
    custom_id: str
    path: str
    body: bytes  # as the input has it


class InvalidLineError(Exception):
    """A line of the input that is no request. It becomes a line of the output with an error."""

    def __init__(self, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.custom_id = custom_id


def line_id(number: int, line: bytes) -> str:
    """Returns the id of the answer to a line of the input. It is made of the line and its number, so that an output
    file shows which input it belongs to."""
    digest = hashlib.sha256(b"%d:" % number + line.strip()).hexdigest()
    return ID_PREFIX + digest[: 2 * _DIGEST_BYTES]


class _Line(msgspec.Struct):
    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class _Body(msgspec.Struct):
    stream: Any = None


def parse_line(number: int, line: bytes) -> BatchRequest:
    """Returns the request of a line. Raises InvalidLineError."""
    try:
        read = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidLineError(f"line {number}: {problem_of(error)}", _custom_id_of(line)) from error
    body = bytes(read.body)
    if problem := _problem(read, body):
        raise InvalidLineError(f"line {number}: {problem}", read.custom_id)
    return BatchRequest(line_id(number, line), read.custom_id, read.url, body)


def _problem(read: _Line, body: bytes) -> str:
    if read.method != "POST":
        return f"method: must be POST, got {read.method[:20]!r}"
    if not _PATH.fullmatch(read.url):
        return f"url: must be a path such as /v1/chat/completions, got {read.url[:100]!r}"
    try:
        fields = msgspec.json.decode(body, type=_Body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return f"body: {problem_of(error)}"
    return "body.stream: a batch has whole answers, no streams" if fields.stream else ""


def _custom_id_of(line: bytes) -> str | None:
    """Returns the line's custom_id; None if it cannot be read."""
    try:
        document = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    custom_id = document.get("custom_id") if isinstance(document, dict) else None
    return custom_id if isinstance(custom_id, str) else None


class BatchError(msgspec.Struct):
    """Why a request has no answer."""

    code: str
    message: str


class BatchResponse(msgspec.Struct):
    """The endpoint's answer, also if that is an error."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class BatchAnswer(msgspec.Struct):
    """A line of the output."""

    id: str
    custom_id: str | None
    response: BatchResponse | None = None
    error: BatchError | None = None

    @property
    def is_good(self) -> bool:
        """Whether the endpoint did what it was asked."""
        return self.response is not None and self.response.status_code == _OK


def answer_of(request: BatchRequest, response: Response) -> BatchAnswer:
    """Returns the line for what the endpoint answered."""
    answer = BatchAnswer(request.id, request.custom_id)
    try:
        msgspec.json.decode(response.body)
        body = response.body.replace(b"\n", b" ").replace(b"\r", b" ")  # JSON has them between tokens only
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        if response.status == _OK:
            answer.error = BatchError("invalid_response", "the answer is not JSON")
            return answer
        body = msgspec.json.encode({"error": {"message": response.body[:1000].decode("utf-8", "replace")}})
    request_id = response.headers.get("x-request-id", "")
    answer.response = BatchResponse(response.status, request_id, msgspec.Raw(body))
    return answer

"""HTTP connections whose clients must say what they want, in time and in few words.

uvicorn bounds neither the size of a request's head (request line and headers) nor the time it takes.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from common.errors import InvalidRequestError
from router.gateway.errors import error_json
from router.security.config import LimitsConfig


class _HeadTooLargeError(Exception):
    """Ends the parsing."""


def bounded_connections(limits: LimitsConfig) -> type[asyncio.Protocol]:
    """The protocol class for a uvicorn server."""

    class Bounded(BoundedConnection):
        max_header_bytes = limits.max_header_bytes
        header_timeout_s = limits.header_timeout_s

    return Bounded


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's, with both limits. The time of the first head runs from the connection on, later ones' from their first
    byte; between requests uvicorn's keep-alive timeout holds. A body that was refused gets as much time to end."""

    max_header_bytes: int
    header_timeout_s: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False  # a request has begun and its head has not ended
        self._in_request = False  # one has begun and its body has not ended
        self._is_head_too_large = False
        self._num_head_bytes = 0  # in chunks that were all head
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """A client connects."""
        super().connection_made(transport)
        self._expect_end()

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Some bytes of one or more requests."""
        was_in_head = self._in_head
        super().data_received(data)
        if was_in_head and self._in_head and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > self.max_header_bytes:
                self._refuse_large_head()

    def on_message_begin(self) -> None:
        """First byte of a request."""
        super().on_message_begin()
        self._in_head = self._in_request = True
        self._num_head_bytes = 0
        if self._deadline is None:
            self._expect_end()

    def on_headers_complete(self) -> None:
        """End of its head. Raises _HeadTooLargeError, which ends the parsing."""
        self._in_head = False
        self._stop_waiting()
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.max_header_bytes:
            self._is_head_too_large = True
            raise _HeadTooLargeError
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """End of its body."""
        self._in_request = False
        self._stop_waiting()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """It has been answered, perhaps before its body has come."""
        super().on_response_complete()
        if self._in_request and not self._in_head:
            self._expect_end()

    def send_400_response(self, msg: str) -> None:
        """What cannot be parsed."""
        if self._is_head_too_large:
            self._refuse_large_head()
        else:
            self._refuse(HTTPStatus.BAD_REQUEST, msg)

    def _expect_end(self) -> None:
        self._stop_waiting()
        self._deadline = self.loop.call_later(self.header_timeout_s, self._on_overdue)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _on_overdue(self) -> None:
        self._deadline = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._expect_end()  # the answer to the request before is still being written
        elif self._in_head:
            self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"the headers did not arrive within {self.header_timeout_s:g} s")
        else:
            self.transport.close()

    def _refuse_large_head(self) -> None:
        message = f"the headers are larger than the limit of {self.max_header_bytes} bytes"
        self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answers without a request, and closes."""
        body = error_json(InvalidRequestError(message))
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        if not self.transport.is_closing():
            self.transport.write(head.encode() + body)
            self.transport.close()

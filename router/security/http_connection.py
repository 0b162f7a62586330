"""HTTP connections of clients that may send anything.

uvicorn bounds neither what precedes a body and what follows it, nor the time and the memory of unfinished bodies. Here
a client that goes over a bound gets an error object, and its connection is closed.

0. There are at most `max_connections`, so that descriptors are left for all else.
1. A head (request line and headers) has a size and a time: from the connection on for the first one, for later ones
   from their first byte; between requests uvicorn's keep-alive timeout holds.
2. A body has a pace, see BodyPace. What a read leaves of an unfinished body is counted in a BodyBudget until the body
   was tokenised or answered, so a request that comes at once is never refused for the bodies of others.
3. Trailers are dropped. They, and the framing of chunks beyond what small chunks need, have the size of a head.
4. One request is served at a time. A client that sends the next one before it has the answer gets this answer, and the
   connection is closed, as HTTP allows; what it sends is read and dropped. So a client that leaves is always noticed.
5. After a refusal, what still comes is read and dropped for as long as a head may take: closing at once could take the
   answer from a client that is still sending. A body that its endpoint refused has as long to end.
6. A client that does not read its answer is cut off after a while. Closing alone would wait for it for ever.
7. HTTP/1.0 has no chunks: a request with Transfer-Encoding is refused, as its end would be a guess, and an answer of
   unknown length ends with the connection.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from common.errors import BatonError, InvalidRequestError, UnavailableError
from router.security.bodies import BodyBudget, BodyPace, client_of
from router.security.config import LimitsConfig
from router.security.refusals import Refusals
from router.wire.errors import error_headers, error_json
from router.wire.exchange import RELEASE_BODY

_RESERVED_FILES = 128  # for pods, gRPC clients and files, of those that the process may open
_MAX_HEADERS = 256
_HEAD_END = b"\r\n\r\n"
_FRAMING_PER_BYTE = 8  # bytes of framing that each byte of a chunked body allows for; a chunk of one byte needs 5


class _StopParsing(Exception):  # noqa: N818  # no error: how a callback ends the parsing
    """Raised in callbacks of the parser, which can then be used no more."""


class _RefusedError(Exception):
    """Raised in callbacks for what is over a bound."""

    def __init__(self, reason: str, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.status = status


def bounded_connections(limits: LimitsConfig, bodies: BodyBudget, refusals: Refusals) -> type[asyncio.Protocol]:
    """The protocol class for a uvicorn server."""
    num_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    max_connections = limits.max_connections or max(num_files // 2, num_files - _RESERVED_FILES)
    shared = {"limits": limits, "max_connections": max_connections, "bodies": bodies, "refusals": refusals}
    return type("Bounded", (BoundedConnection,), shared)


class BoundedConnection(HttpToolsProtocol):
    """uvicorn's, with bounds."""

    limits: LimitsConfig
    max_connections: int
    bodies: BodyBudget
    refusals: Refusals

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._begins = False  # a request begins in the read at hand
        self._in_head = False  # a request has begun and its head has not ended
        self._in_body = False  # a head has ended and its body has not
        self._num_head_bytes = 0  # in reads that were all head
        self._num_body_bytes = 0  # body bytes of this request, without framing
        self._num_held_bytes = 0  # body bytes that are counted in `bodies`
        self._num_framing_bytes = 0  # beyond what the body allows for
        self._num_trailer_bytes = 0
        self._pace: BodyPace | None = None  # pace of a body that is not complete
        self._client = ""  # client that the body's bytes are charged to
        self._drops_input = False
        self._is_refused = False
        self._deadline: asyncio.TimerHandle | None = None
        self._send_deadline: asyncio.TimerHandle | None = None  # while the client reads too little

    # --- what the transport calls ---

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """A client connects."""
        super().connection_made(transport)
        self._client = client_of(self.client[0]) if self.client else ""
        if len(self.connections) > self.max_connections:
            message = f"all {self.max_connections} HTTP connections are in use; try again later"
            self._refuse("connections", HTTPStatus.SERVICE_UNAVAILABLE, UnavailableError(message))
            self._close()
            return
        self._call_later(self.limits.header_timeout_s, self._on_head_overdue)

    def connection_lost(self, exc: Exception | None) -> None:
        """It is gone."""
        self._stop_waiting()
        self._stop_waiting_for_reader()
        self._release_body()
        self._unset_keepalive_if_required()  # uvicorn's own keeps it running if the client reset the connection
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """One read of whatever it sends."""
        self._unset_keepalive_if_required()
        if self._drops_input:
            return
        was_in_head, was_in_body, num_body_bytes = self._in_head, self._in_body, self._num_body_bytes
        self._begins = False
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # to what is not spoken here: HTTP/1.1 goes on
        except httptools.HttpParserError as error:
            self._on_unparsable(error)
            return
        if self._in_head:
            self._on_unfinished_head(len(data) if was_in_head and not self._begins else 0)
        elif self._in_body and was_in_body and not self._begins:
            num_new_bytes = self._num_body_bytes - num_body_bytes
            self._on_unfinished_body(len(data) - num_new_bytes, num_new_bytes)
        elif self._in_body:
            self._on_unfinished_body(0, self._num_body_bytes)
        elif self.cycle is not None and self.cycle.response_complete:
            # The end of a body that was refused, or line breaks. uvicorn's timer stopped with the read.
            self._call_later(self.timeout_keep_alive, self._close)

    def pause_writing(self) -> None:
        """The client reads more slowly than it is sent to."""
        super().pause_writing()
        self._send_deadline = self.loop.call_later(self.limits.send_timeout_s, self._on_stalled)

    def resume_writing(self) -> None:
        """It has read enough."""
        self._stop_waiting_for_reader()
        super().resume_writing()

    # --- what uvicorn calls ---

    def shutdown(self) -> None:
        """The server stops."""
        if self._is_refused:
            self._close()
        else:
            super().shutdown()

    def timeout_keep_alive_handler(self) -> None:
        """No request has come for a while."""
        self._close()

    # --- what the parser calls ---

    def on_message_begin(self) -> None:
        """First byte of a request."""
        if self._is_answering:
            raise _StopParsing
        if self.cycle is not None:  # the first request's time runs from the connection on
            self._stop_waiting()
        super().on_message_begin()
        self._begins = self._in_head = True
        self._num_head_bytes = self._num_body_bytes = self._num_framing_bytes = self._num_trailer_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header, or a trailer, which is nothing to the application."""
        if self._in_head:
            super().on_header(name, value)
            return
        self._num_trailer_bytes += len(name) + len(value) + 4
        if self._num_trailer_bytes > self.limits.max_header_bytes:
            raise self._head_too_large()

    def on_headers_complete(self) -> None:
        """End of the head."""
        size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
        if size > self.limits.max_header_bytes:
            raise self._head_too_large()
        if len(self.headers) > _MAX_HEADERS:
            status = HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE
            raise _RefusedError("header_size", status, f"there are more than {_MAX_HEADERS} headers")
        is_old = self.parser.get_http_version() < "1.1"
        if is_old:
            if any(name == b"transfer-encoding" for name, _ in self.headers):
                message = "a request of HTTP/1.0 must have a Content-Length and no Transfer-Encoding"
                raise _RefusedError("malformed", HTTPStatus.BAD_REQUEST, message)
            self.expect_100_continue = False
        self._stop_waiting()
        super().on_headers_complete()
        if self.scope["method"] != "HEAD":  # responses to HEAD have no body
            transport = _Unchunked(self.cycle, self.transport) if is_old else self.transport
            self.cycle.transport = _HeadHolder(self.cycle, transport)  # type: ignore[assignment]  # all it needs
        self.scope[RELEASE_BODY] = self._release_body  # type: ignore[literal-required]  # a key of ours
        self._in_head, self._in_body = False, True

    def on_body(self, body: bytes) -> None:
        """Some of the body, without framing."""
        self._num_body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        """End of the body, which stays counted until it is needed no longer."""
        self._in_body = False
        self._stop_waiting()
        self._pace = None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """The request has been answered, perhaps before its body has come."""
        self._release_body()
        super().on_response_complete()
        if self.transport.is_closing():
            self._close()
        elif self._in_body:
            self._call_later(self.limits.header_timeout_s, self._close)

    # --- bounds ---

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _on_unfinished_head(self, num_bytes: int) -> None:
        """At the end of a read; `num_bytes` in it, if it was all head."""
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > self.limits.max_header_bytes:
            self._refuse_with(self._head_too_large())
        elif self._deadline is None:
            self._call_later(self.limits.header_timeout_s, self._on_head_overdue)

    def _on_head_overdue(self) -> None:
        if self._in_head:
            message = f"the headers did not arrive within {self.limits.header_timeout_s:g} s"
            self._refuse("header_time", HTTPStatus.REQUEST_TIMEOUT, InvalidRequestError(message))
        else:
            self._close()

    def _on_unfinished_body(self, num_framing_bytes: int, num_body_bytes: int) -> None:
        """At the end of a read with so many bytes of either kind."""
        extra = self._num_framing_bytes + num_framing_bytes - _FRAMING_PER_BYTE * num_body_bytes
        self._num_framing_bytes = max(0, extra)
        if extra > self.limits.max_header_bytes:
            self._refuse_with(self._head_too_large())
        elif not self.cycle.response_complete:
            try:
                self._hold_body()
            except BatonError as error:
                self._refuse("body_memory", HTTPStatus(error.code.value.http_status), error)

    def _hold_body(self) -> None:
        """Raises OverloadedError or UnavailableError if there is no memory for it."""
        if self._num_body_bytes > self._num_held_bytes:
            self.bodies.take(self._client, self._num_body_bytes - self._num_held_bytes)
            self._num_held_bytes = self._num_body_bytes
        if self._pace is None:
            limits, now = self.limits, self.loop.time()
            self._pace = BodyPace(limits.body_timeout_s, limits.min_body_rate, limits.body_grace_s, now)
            self._call_later(self._pace.begin_window(self._num_body_bytes, now), self._on_body_window)

    def _on_body_window(self) -> None:
        assert self._pace is not None
        problem = self._pace.problem(self._num_body_bytes)
        if problem:
            self._refuse("body_time", HTTPStatus.REQUEST_TIMEOUT, InvalidRequestError(problem))
        else:
            self._call_later(self._pace.begin_window(self._num_body_bytes, self.loop.time()), self._on_body_window)

    def _release_body(self) -> None:
        if self._num_held_bytes:
            self.bodies.give_back(self._client, self._num_held_bytes)
            self._num_held_bytes = 0
        self._pace = None

    def _head_too_large(self) -> _RefusedError:
        message = f"the headers are larger than the limit of {self.limits.max_header_bytes} bytes"
        return _RefusedError("header_size", HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, message)

    def _call_later(self, delay_s: float, call: Callable[[], None]) -> None:
        """Instead of what was to be called until now."""
        self._stop_waiting()
        self._deadline = self.loop.call_later(delay_s, call)

    def _stop_waiting(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _stop_waiting_for_reader(self) -> None:
        if self._send_deadline is not None:
            self._send_deadline.cancel()
            self._send_deadline = None

    # --- the end of a connection ---

    def _on_unparsable(self, error: httptools.HttpParserError) -> None:
        cause = error.__context__
        if self._is_answering and not self._in_body:
            self._drops_input = True
            self.cycle.keep_alive = False  # closes the connection after the answer
        elif isinstance(cause, _RefusedError):
            self._refuse_with(cause)
        else:
            answer = InvalidRequestError("Invalid HTTP request received.")
            self._refuse("malformed", HTTPStatus.BAD_REQUEST, answer, str(cause or error))

    def _refuse_with(self, refusal: _RefusedError) -> None:
        self._refuse(refusal.reason, refusal.status, InvalidRequestError(str(refusal)))

    def _refuse(self, reason: str, status: HTTPStatus, error: BatonError, detail: str = "") -> None:
        """Ends the request that is being read, and the connection. `detail` is for the log only."""
        self.refusals.note(reason, self._client, detail or error.message)
        self._drops_input = self._is_refused = True
        self._release_body()
        self.flow.resume_reading()
        if self._in_body:
            cycle = self.cycle
            cycle.disconnected = True
            cycle.waiting_for_100_continue = False
            cycle.message_event.set()
            if cycle.response_started:  # a response that has begun cannot become an error
                self._close()
                return
        self.transport.write(_response(status, error))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._call_later(self.limits.header_timeout_s, self._close)

    def _close(self) -> None:
        """Once the client has what was written, or after the time that it may take to read it."""
        self.transport.close()
        self._call_later(self.limits.send_timeout_s, self._on_stalled)

    def _on_stalled(self) -> None:
        self.refusals.note("send_time", self._client, f"reads nothing for {self.limits.send_timeout_s:g} s")
        self.transport.abort()


class _HeadHolder:
    """The transport of a response until its body begins, with which its head is sent: a system call less."""

    __slots__ = ("_cycle", "_head", "_transport", "is_closing")

    def __init__(self, cycle: RequestResponseCycle, transport: asyncio.Transport | _Unchunked) -> None:
        self._cycle = cycle
        self._transport = transport
        self._head = b""
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        """The head, the first part of the body, or what comes before both."""
        if self._cycle.response_started and not self._head:
            self._head = data
            return
        if self._head:
            self._cycle.transport = self._transport  # type: ignore[assignment]  # all it needs
        self._transport.write(self._head + data)

    def close(self) -> None:
        """The application has ended early."""
        self._transport.write(self._head)
        self._transport.close()


class _Unchunked:
    """The transport of a response in HTTP/1.0, which has no chunks: takes away what uvicorn puts around them."""

    __slots__ = ("_cycle", "_in_body", "_transport", "close", "is_closing")

    def __init__(self, cycle: RequestResponseCycle, transport: asyncio.Transport) -> None:
        self._cycle = cycle
        self._transport = transport
        self._in_body = False
        self.close = transport.close
        self.is_closing = transport.is_closing

    def write(self, data: bytes) -> None:
        """The head with the first chunk or without any, then at most one chunk each time, perhaps with the last one."""
        if self._cycle.chunked_encoding:
            head = b""
            if not self._in_body:
                head, end, data = data.partition(_HEAD_END)
                head = head.removesuffix(b"\r\ntransfer-encoding: chunked") + end
                self._in_body = True
            size, _, chunk = data.partition(b"\r\n")
            data = head + chunk[: int(size or b"0", 16)]
        self._transport.write(data)


def _response(status: HTTPStatus, error: BatonError) -> bytes:
    body = error_json(error)
    head = [b"HTTP/1.1 %d %b" % (status.value, status.phrase.encode())]
    head += [b"%b: %b" % header for header in error_headers(error)]
    head += [b"content-type: application/json", b"content-length: %d" % len(body), b"connection: close", b"", body]
    return b"\r\n".join(head)

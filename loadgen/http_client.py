"""An HTTP/1.1 client for many streams at once.

Each request under way has a connection of its own, which is kept and used again. There is no task per connection: the C
parser of httptools is fed as bytes arrive, and the time of a part of a body is taken before it is parsed.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httptools

from common import __version__
from common.client_tls import tls_context, tls_problem
from common.errors import ConfigError

Clock = Callable[[], float]
BodyReader = Callable[[bytes, float], None]  # bytes of a body, and when they arrived; raises RequestFailed
Connect = Callable[[Callable[[], asyncio.Protocol]], Awaitable[Any]]  # opens a connection for the protocol

CONNECT_TIMEOUT_S = 10.0
_MAX_BODY_BYTES = 256 * 2**20
_MAX_IDLE_S = 4.0  # servers such as uvicorn close idle connections after 5 s
_OK = 200


class RequestFailed(Exception):  # noqa: N818  (an outcome that is counted, not an error of this program)
    """A request without a usable answer. `kind` is what failures are counted by."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class Response(NamedTuple):
    """A complete answer. The body is empty if a reader took it."""

    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes


class HttpClient:
    """Sends requests to one server. Use it within one event loop, and close it there."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str = "",
        tls_ca: str = "",
        clock: Clock = time.perf_counter,
        connect: Connect | None = None,
    ) -> None:
        """`connect` stands in for the network in tests. Raises ConfigError for a bad URL or authority."""
        parts = split_url(url)
        self.clock = clock
        self.base_path = parts.base_path
        self._parts = parts
        self._tls = tls_context(tls_ca) if parts.is_tls else None
        authorization = f"authorization: Bearer {api_key}\r\n" if api_key else ""
        self._fixed_head = f"host: {parts.netloc}\r\nuser-agent: baton/{__version__}\r\n{authorization}"
        self._connect = connect or self._open
        self._idle: list[_Connection] = []  # the one used last is at the end
        self._open_connections: set[_Connection] = set()

    async def request(
        self, method: str, path: str, body: bytes = b"", *, timeout_s: float, on_body: BodyReader | None = None
    ) -> Response:
        """Sends a request and waits for its complete answer.

        `on_body` gets the body of an answer with status 200 as it arrives. Raises RequestFailed.
        """
        head = f"{method} {self.base_path}{path} HTTP/1.1\r\n{self._fixed_head}content-length: {len(body)}\r\n"
        message = f"{head}content-type: application/json\r\n\r\n".encode("latin-1") + body
        try:
            async with asyncio.timeout(timeout_s):
                return await self._exchange(message, on_body)
        except TimeoutError as error:
            raise RequestFailed("timeout", f"no complete answer within {timeout_s:g} s") from error

    async def _exchange(self, message: bytes, on_body: BodyReader | None) -> Response:
        connection = self._take_idle() or await self._new_connection()
        ended: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        exchange = _Exchange(ended, on_body)
        try:
            connection.send(message, exchange)
            return await ended
        finally:
            if exchange.keeps_connection and connection.is_open:
                connection.release(self.clock())
                self._idle.append(connection)
            else:
                connection.abort()

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and self.clock() - connection.idle_since < _MAX_IDLE_S:
                return connection
            connection.abort()
        return None

    async def _new_connection(self) -> _Connection:
        connection = _Connection(self.clock, self._open_connections.discard)
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._connect(lambda: connection)
        except ssl.SSLError as error:
            raise RequestFailed("tls", f"TLS with {self._parts.netloc} failed: {tls_problem(error)}") from error
        except TimeoutError as error:
            raise RequestFailed(
                "connect", f"no connection to {self._parts.netloc} within {CONNECT_TIMEOUT_S:g} s"
            ) from error
        except OSError as error:
            raise RequestFailed("connect", f"cannot connect to {self._parts.netloc}: {_reason(error)}") from error
        self._open_connections.add(connection)
        return connection

    async def _open(self, protocol: Callable[[], asyncio.Protocol]) -> None:
        await asyncio.get_running_loop().create_connection(protocol, self._parts.host, self._parts.port, ssl=self._tls)

    def close(self) -> None:
        """Drops all connections."""
        for connection in list(self._open_connections):
            connection.abort()
        self._idle.clear()


class _Exchange:
    """One request and its answer; the callbacks of the parser."""

    def __init__(self, ended: asyncio.Future[Response], on_body: BodyReader | None) -> None:
        self.ended = ended
        self.keeps_connection = False
        self._reader = on_body
        self._parser = httptools.HttpResponseParser(self)
        self._arrived_s = 0.0
        self._status = 0
        self._headers: dict[str, str] = {}
        self._body = bytearray()

    def feed(self, data: bytes, arrived_s: float) -> None:
        """Takes bytes that the server sent."""
        self._arrived_s = arrived_s
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self.fail(RequestFailed("invalid response", f"the answer is not HTTP: {error}"))

    def fail(self, error: RequestFailed) -> None:
        """Ends the exchange without an answer."""
        if not self.ended.done():
            self.ended.set_exception(error)

    def connection_lost(self, error: Exception | None) -> None:
        """The server closed the connection; that may be how it ends a body."""
        is_delimited = "content-length" in self._headers or "transfer-encoding" in self._headers
        if self._status and not is_delimited and error is None:
            self._finish()
        else:
            why = f": {_reason(error)}" if isinstance(error, OSError) else ""
            self.fail(RequestFailed("disconnected", f"the connection closed before the answer was complete{why}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        if self._reader is None or self._status != _OK:
            self._body += body
            if len(self._body) > _MAX_BODY_BYTES:
                self.fail(RequestFailed("invalid response", f"the answer has more than {_MAX_BODY_BYTES} bytes"))
            return
        try:
            self._reader(body, self._arrived_s)
        except RequestFailed as error:
            self.fail(error)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self._status < _OK:  # 100 Continue: the answer itself follows
            self._headers.clear()
            return
        self.keeps_connection = self._parser.should_keep_alive() and not self.ended.done()
        self._finish()

    def _finish(self) -> None:
        if not self.ended.done():
            self.ended.set_result(Response(self._status, self._headers, bytes(self._body)))


class _Connection(asyncio.Protocol):
    """A connection, with at most one exchange at a time."""

    def __init__(self, clock: Clock, on_lost: Callable[[_Connection], None]) -> None:
        self.idle_since = 0.0
        self.is_open = False
        self._clock = clock
        self._on_lost = on_lost
        self._transport: Any = None
        self._exchange: _Exchange | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self.is_open = True

    def send(self, message: bytes, exchange: _Exchange) -> None:
        """Begins an exchange."""
        self._exchange = exchange
        if self.is_open:
            self._transport.write(message)
        else:
            exchange.connection_lost(None)

    def release(self, now: float) -> None:
        """Ends the exchange; the connection can be used again."""
        self._exchange = None
        self.idle_since = now

    def data_received(self, data: bytes) -> None:
        arrived_s = self._clock()
        if self._exchange is None:  # nothing was asked, as when a server says 408 to an idle connection
            self.abort()
        else:
            self._exchange.feed(data, arrived_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._on_lost(self)
        if self._exchange is not None:
            self._exchange.connection_lost(exc)

    def abort(self) -> None:
        """Drops the connection."""
        self.is_open = False
        self._exchange = None
        self._on_lost(self)
        if self._transport is not None:
            self._transport.abort()


class ServerAddress(NamedTuple):
    """The parts of a server's URL."""

    host: str
    port: int
    netloc: str  # as the Host header has it
    is_tls: bool
    base_path: str  # before /v1; usually empty


def split_url(url: str) -> ServerAddress:
    """Returns the address that a URL names, with or without /v1 at its end. Raises ConfigError."""
    try:
        parts = urlsplit(url)
        port = parts.port
        (parts.hostname or "").encode("idna")  # as the resolver does, which takes no label of more than 63 characters
    except ValueError:
        parts, port = urlsplit(""), None
    is_plain = not (parts.query or parts.fragment or parts.username or parts.password)
    is_printable = url.isascii() and url.isprintable() and " " not in url
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or not (is_plain and is_printable):
        raise ConfigError(f"--url: expected http://host:port or https://host:port, got {url!r}", param="url")
    is_tls = parts.scheme == "https"
    base_path = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return ServerAddress(parts.hostname, port or (443 if is_tls else 80), parts.netloc, is_tls, base_path)


def _reason(error: OSError) -> str:
    if error.errno is not None and error.errno > 0:  # errors of name resolution have others
        return os.strerror(error.errno)  # asyncio has its own words, with the address once more
    return error.strerror or str(error) or type(error).__name__

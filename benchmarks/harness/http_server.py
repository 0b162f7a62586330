"""The connections of HTTP servers that cost almost nothing, of which only the answers differ."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httptools

_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


class Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, answer: Callable[[Connection, str, bytes], None]) -> None:
        """`answer` gets each request: path and body."""
        self.is_open = self.is_writable = True
        self._answer = answer
        self._parser = httptools.HttpRequestParser(self)
        self._transport: Any = None
        self._path = self._body = b""

    def send(self, body: bytes, status: str = "200 OK") -> None:
        """Sends a whole answer, of JSON."""
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write(head.encode() + body)

    def begin_stream(self) -> None:
        """Sends the head of an answer in parts."""
        self._transport.write(_STREAM)

    def send_part(self, part: bytes, *, is_last: bool = False) -> None:
        """Sends a part of an answer, in a write of its own."""
        self._transport.write(b"%x\r\n%b\r\n%b" % (len(part), part, b"0\r\n\r\n" if is_last else b""))

    # -- asyncio and the parser ---------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See Protocol."""
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """See Protocol."""
        self.is_open = False

    def pause_writing(self) -> None:
        """See Protocol."""
        self.is_writable = False

    def resume_writing(self) -> None:
        """See Protocol."""
        self.is_writable = True

    def data_received(self, data: bytes) -> None:
        """See Protocol."""
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._transport.abort()  # a client tries whether it is HTTP/2

    def on_message_begin(self) -> None:
        """Called by the parser."""
        self._path = self._body = b""

    def on_url(self, url: bytes) -> None:
        """Called by the parser."""
        self._path += url

    def on_body(self, body: bytes) -> None:
        """Called by the parser."""
        self._body += body

    def on_message_complete(self) -> None:
        """Called by the parser."""
        self._answer(self, self._path.decode("latin-1"), self._body)

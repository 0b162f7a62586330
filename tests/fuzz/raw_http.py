"""HTTP by hand: any bytes out, strictly parsed answers in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import h11

_ENDLESS = 2**20  # bytes
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: closing sends RST


@dataclass(frozen=True)
class RawAnswer:
    """A complete HTTP response."""

    status: int
    headers: dict[str, str]
    body: bytes
    is_to_head: bool  # so it has no body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Wire:
    """A connection on which anything can be sent."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._parser = h11.Connection(h11.CLIENT)

    @classmethod
    @contextlib.asynccontextmanager
    async def to(cls, port: int, *, client: str = "127.0.0.1") -> AsyncIterator[Wire]:
        """Connected from an address; closed when it is left."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port, local_addr=(client, 0))
        try:
            yield cls(reader, writer)
        finally:
            await _close(writer)

    async def send(self, *pieces: bytes) -> None:
        """Each on its own."""
        await _send(self._writer, pieces)

    async def receive(self) -> RawAnswer:
        """The next answer."""
        if self._parser.our_state is self._parser.their_state is h11.DONE:
            self._parser.start_next_cycle()
        answer = await _receive(self._reader, self._parser, is_head=False)
        assert answer is not None, "the server hung up without an answer"
        return answer

    async def receive_while_sending(self, piece: bytes) -> RawAnswer:
        """The next answer, which must come however often `piece` is sent."""
        sending = asyncio.create_task(self.send_until_closed(piece))
        try:
            return await self.receive()
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)

    async def send_until_closed(self, piece: bytes) -> None:
        """Returns when the server has closed the connection; fails if it takes far more than it should."""
        num_bytes = 0
        with contextlib.suppress(ConnectionError):
            while not self._writer.is_closing():
                assert (num_bytes := num_bytes + len(piece)) <= _ENDLESS, "the server takes whatever comes"
                await self.send(piece)

    async def receive_until(self, text: bytes) -> None:
        """Reads the beginning of an answer, up to this text."""
        begun = await self._reader.readuntil(text)
        if self._parser.our_state is h11.IDLE:
            _expect_answer(self._parser, is_head=False)
        self._parser.receive_data(begun)

    async def is_closed(self) -> bool:
        """Waits for the end of what the server sends; False if there is more before it."""
        return not self._parser.trailing_data[0] and not await _read(self._reader)


async def exchange(port: int, pieces: Sequence[bytes]) -> RawAnswer | None:
    """Sends the pieces and reads one answer; None: the server hung up without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        is_head = b"".join(pieces).lstrip(b"\r\n").startswith(b"HEAD ")
        sending = asyncio.create_task(_send(writer, pieces))
        try:
            return await _receive(reader, h11.Connection(h11.CLIENT), is_head=is_head)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
    finally:
        await _close(writer)


async def leave(port: int, pieces: Sequence[bytes], num_answer_bytes: int, *, reset: bool) -> None:
    """Sends the pieces, reads so much of the answer at most, and is gone: politely or not."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        await _send(writer, pieces)
        if num_answer_bytes:
            await reader.read(num_answer_bytes)
    except ConnectionError:
        pass  # refused before it was all sent
    finally:
        if reset:
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        await _close(writer)


async def _send(writer: asyncio.StreamWriter, pieces: Sequence[bytes]) -> None:
    for piece in pieces:
        writer.write(piece)
        await writer.drain()
        await asyncio.sleep(0)  # the server may see each piece on its own


def _expect_answer(parser: h11.Connection, *, is_head: bool) -> None:
    parser.send(h11.Request(method="HEAD" if is_head else "GET", target="/", headers=[("host", "test")]))
    parser.send(h11.EndOfMessage())


async def _receive(reader: asyncio.StreamReader, parser: h11.Connection, *, is_head: bool) -> RawAnswer | None:
    if parser.our_state is h11.IDLE:
        _expect_answer(parser, is_head=is_head)
    head, body = None, b""
    while True:
        event = parser.next_event()
        if event is h11.NEED_DATA:
            data = await _read(reader)
            if not data and head is None:
                return None
            parser.receive_data(data)
        elif isinstance(event, h11.Response):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            assert head is not None
            headers = {name.decode(): value.decode("latin-1") for name, value in head.headers}
            return RawAnswer(head.status_code, headers, body, is_head)
        else:
            assert isinstance(event, h11.InformationalResponse), event


async def _read(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read(65536)
    except ConnectionError:
        return b""


async def _close(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(ConnectionError):  # closed all the same
        await writer.wait_closed()

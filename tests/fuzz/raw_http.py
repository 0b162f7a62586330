"""HTTP by hand: any bytes out, strictly parsed answers in."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import h11

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


async def exchange(port: int, pieces: Sequence[bytes]) -> RawAnswer | None:
    """Sends the pieces and reads one answer; None: the server hung up without one."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        is_head = b"".join(pieces).lstrip(b"\r\n").startswith(b"HEAD ")
        sending = asyncio.create_task(_send(writer, pieces))
        try:
            return await _receive(reader, is_head=is_head)
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


async def _receive(reader: asyncio.StreamReader, *, is_head: bool) -> RawAnswer | None:
    parser = h11.Connection(h11.CLIENT)
    parser.send(h11.Request(method="HEAD" if is_head else "GET", target="/", headers=[("host", "test")]))
    parser.send(h11.EndOfMessage())
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

"""Questions and answers between a worker and its parent, over one socket, in both directions at once.

Each message is a length of 4 bytes and msgpack. The socket's end is the other process's.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import struct
from collections.abc import Awaitable, Callable

import msgspec

from common.errors import BatonError, UnavailableError, UnreachableError

logger = logging.getLogger(__name__)

Answer = Callable[[str, bytes], Awaitable[bytes]]
"""Answers the question of this name, with what it is about. A BatonError is told to the asker."""

_LENGTH = struct.Struct("!I")
_MAX_MESSAGE_BYTES = 256 * 2**20
_MAX_QUESTIONS = 1024  # of one asker that are being answered at once
_MAX_UNREAD_BYTES = 16 * 2**20  # beyond which the other side is asked nothing more until it reads


class _Question(msgspec.Struct, frozen=True, array_like=True, tag=0):
    number: int
    name: str
    about: bytes


class _Answered(msgspec.Struct, frozen=True, array_like=True, tag=1):
    number: int
    answer: bytes


class _Failed(msgspec.Struct, frozen=True, array_like=True, tag=2):
    number: int
    problem: str


class Link:
    """One end. `open` it first; then `run` reads, and `ask` may be called at any time."""

    def __init__(self, end: socket.socket, answer: Answer) -> None:
        """Takes the socket over. `answer` is called for what the other side asks."""
        self._socket = end
        self._answer = answer
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._numbers = itertools.count()
        self._open: dict[int, asyncio.Future[bytes]] = {}  # own questions
        self._answering: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        """Opens the link: messages wait from now on for the other side to read."""
        self._reader, self._writer = await asyncio.open_unix_connection(sock=self._socket)

    async def run(self) -> None:
        """Reads and answers until the other side is gone. Cancel to end."""
        reader, writer = self._reader, self._writer
        assert reader is not None
        assert writer is not None
        try:
            while True:
                (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                if length > _MAX_MESSAGE_BYTES:
                    raise ConnectionResetError(f"a message of {length} bytes")
                self._take(_decoder.decode(await reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            writer.close()
            self._writer = None
            for future in self._open.values():
                if not future.done():
                    future.set_exception(UnreachableError("the other process has ended"))
            for task in self._answering:
                task.cancel()

    async def ask(self, name: str, about: bytes, timeout_s: float) -> bytes:
        """The other side's answer. Raises UnavailableError if there is none in time, or it has failed."""
        if self._writer is None:
            raise UnreachableError("the other process has ended")
        if self._writer.transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
            raise UnavailableError(f"{name}: the other process does not read what it is asked")
        number = next(self._numbers)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._open[number] = future
        try:
            self._send(_Question(number, name, about))
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError as error:
            raise UnavailableError(f"{name}: no answer within {timeout_s:g} s") from error
        finally:
            del self._open[number]

    def _take(self, message: _Question | _Answered | _Failed) -> None:
        if isinstance(message, _Question):
            if len(self._answering) >= _MAX_QUESTIONS:
                self._send(_Failed(message.number, "too many questions at once"))
                return
            task = asyncio.create_task(self._reply(message), name=f"answer-{message.name}")
            self._answering.add(task)
            task.add_done_callback(self._answering.discard)
        elif (future := self._open.get(message.number)) is not None and not future.done():
            if isinstance(message, _Answered):
                future.set_result(message.answer)
            else:
                future.set_exception(UnavailableError(message.problem))

    async def _reply(self, question: _Question) -> None:
        try:
            reply: _Answered | _Failed = _Answered(question.number, await self._answer(question.name, question.about))
        except BatonError as error:
            reply = _Failed(question.number, error.message)
        except Exception:
            logger.exception("%s: internal error", question.name)
            reply = _Failed(question.number, "internal error; the log has the details")
        self._send(reply)

    def _send(self, message: _Question | _Answered | _Failed) -> None:
        if self._writer is not None:
            payload = msgspec.msgpack.encode(message)
            self._writer.write(_LENGTH.pack(len(payload)) + payload)


_decoder = msgspec.msgpack.Decoder(_Question | _Answered | _Failed)

"""One exchange with a Redis server: commands sent in one go, and their replies.

It goes on while something moves, so that large blocks get through a slow link, and fails soon after nothing does, as
requests wait for it. Something moves when

- bytes are sent or arrive on this connection,
- bytes arrive from the same server on another connection, which may take all of a slow link, or
- the server's machine acknowledges bytes: the kernel takes those to send faster than a link carries them.

A process that is stopped cannot be told from a busy one by its connections: its kernel still accepts them, and bytes
until a buffer is full.
"""

from __future__ import annotations

import fcntl
import re
import socket
import struct
import termios
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import redis

from kv_store.base import Buffer

_T = TypeVar("_T")

_CHECKS = 4  # checks for progress in the time that a server may be silent
_ALIVE_ELSEWHERE = 10  # times as long one connection may be silent while its server is heard on others

Command = tuple[bytes | memoryview, ...]


@dataclass
class Activity:
    """The time of the last answer from a server, on any of its connections. Shared by threads."""

    heard_at: float = 0.0  # monotonic seconds


class Exchange:
    """A connection of a pool while one operation uses it."""

    def __init__(
        self,
        pool: redis.ConnectionPool,
        activity: Activity,
        *,
        silence_s: float,
        timeout_s: float,
        clock: Callable[[], float],
    ) -> None:
        """The exchange fails with redis.TimeoutError when nothing has moved for `silence_s` seconds, or when it has
        taken `timeout_s`."""
        self._activity = activity
        self._silence_s = silence_s
        self._clock = clock
        self._moved_at = clock()
        self._give_up_at = self._moved_at + timeout_s
        self._count_unacknowledged: Callable[[], int] = lambda: 0  # until it is connected
        self._num_unacknowledged = 0
        self.connection: redis.Connection = self._wait_for(pool.get_connection)
        self._socket: socket.socket = self.connection._sock  # noqa: SLF001 - the client's own waits are for a fixed time
        self._socket.settimeout(silence_s / _CHECKS)
        self._count_unacknowledged = partial(_count_unacknowledged, self._socket)

    def send(self, commands: Sequence[Command]) -> None:
        """Sends commands, uncopied, where a pipeline of the client would copy each frame three times."""
        for piece in _pack(commands):
            left = memoryview(piece)
            while left:
                left = left[self._wait_for(partial(self._socket.send, left)) :]

    def reply(self) -> object:
        """Reads a reply. Raises redis.ResponseError if it is an error."""
        return self._receive(partial(self.connection.read_response, disconnect_on_error=False))

    def recv(self, size: int) -> bytes:
        """See socket.socket."""
        return self._receive(partial(self._socket.recv, size))

    def recv_into(self, buffer: Buffer) -> int:
        """See socket.socket."""
        return self._receive(partial(self._socket.recv_into, buffer))

    def _receive(self, operation: Callable[[], _T]) -> _T:
        received = self._wait_for(operation)
        self._activity.heard_at = self._moved_at
        return received

    def _wait_for(self, operation: Callable[[], _T]) -> _T:
        """Repeats an operation that times out, while something moves."""
        while self._clock() < self._give_up_at:
            try:
                done = operation()
            except (TimeoutError, redis.TimeoutError) as error:
                if not self._is_moving():
                    raise redis.TimeoutError("it does not answer") from error
            else:
                self._moved_at = self._clock()
                return done
        raise redis.TimeoutError("it is too slow")

    def _is_moving(self) -> bool:
        now = self._clock()
        num_unacknowledged = self._count_unacknowledged()
        if num_unacknowledged < self._num_unacknowledged:
            self._moved_at = now
        self._num_unacknowledged = num_unacknowledged
        silent_s = now - self._moved_at
        is_alive = now - self._activity.heard_at < self._silence_s
        return silent_s < self._silence_s * (_ALIVE_ELSEWHERE if is_alive else 1)


def _count_unacknowledged(connected: socket.socket) -> int:
    """Bytes that were sent and that the other machine has not acknowledged."""
    (number,) = struct.unpack("i", fcntl.ioctl(connected, termios.TIOCOUTQ, bytes(4)))
    return int(number)


def _pack(commands: Sequence[Command]) -> Iterator[bytes | memoryview]:
    """Serialises commands for Redis in pieces, with the frames as pieces of their own, uncopied."""
    text = b""
    for command in commands:
        text += b"*%d\r\n" % len(command)
        for word in command:
            text += b"$%d\r\n" % len(word)
            if isinstance(word, memoryview):
                yield text
                yield word
                text = b"\r\n"
            else:
                text += word + b"\r\n"
    yield text


class FrameReader:
    """Reads replies that are strings straight into buffers, where hiredis would copy them twice."""

    _LOOK_AHEAD = 32  # bytes read to find the length; what they have of a frame is copied
    _MAX_LINE = 1 << 12  # most bytes of an error line

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._ahead = b""  # received and not yet taken

    def read_into(self, buffer: Buffer) -> int | None:
        """Copies the next reply into `buffer`, as far as it fits. Returns its size in bytes; None: there is no
        value."""
        line = self._take_line()
        if line.startswith(b"-"):
            raise _reply_error(line[1:].decode(errors="replace"))
        if not re.fullmatch(rb"\$(-1|\d+)", line):
            raise redis.InvalidResponse(f"invalid string length: {line!r}")
        if (size := int(line[1:])) < 0:
            return None
        fitting = buffer[:size]
        self._take_into(fitting)
        left_out = size - len(fitting)
        while left_out:
            left_out -= self._take_into(memoryview(bytearray(min(left_out, 1 << 16))))
        self._take_into(memoryview(bytearray(2)))  # the line break after the frame
        return size

    def _take_line(self) -> bytes:
        while b"\r\n" not in self._ahead:
            if len(self._ahead) > self._MAX_LINE:
                raise redis.InvalidResponse("unterminated line")
            self._look_ahead()
        line, _, self._ahead = self._ahead.partition(b"\r\n")
        return line

    def _take_into(self, buffer: memoryview) -> int:
        """Fills `buffer` and returns its size."""
        if len(buffer) <= self._LOOK_AHEAD:  # the read may include the next length
            while len(self._ahead) < len(buffer):
                self._look_ahead()
        filled = min(len(buffer), len(self._ahead))
        buffer[:filled], self._ahead = self._ahead[:filled], self._ahead[filled:]
        while filled < len(buffer):
            filled += self._received(self._exchange.recv_into(buffer[filled:]))
        return filled

    def _look_ahead(self) -> None:
        received = self._exchange.recv(self._LOOK_AHEAD)
        self._received(len(received))
        self._ahead += received

    @staticmethod
    def _received(num_bytes: int) -> int:
        if not num_bytes:
            raise redis.ConnectionError("the server closed the connection")
        return num_bytes


def _reply_error(line: str) -> redis.RedisError:
    """Converts an error reply to the client's exception, as far as it matters here."""
    return _REPLY_ERRORS.get(line.partition(" ")[0], redis.ResponseError)(line)


_REPLY_ERRORS = {"LOADING": redis.BusyLoadingError, "READONLY": redis.ReadOnlyError}

"""Messages over a stream socket, each with its length before it."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

from common.engine.executor.multiproc.tls import TlsStream

_LENGTH = struct.Struct("!I")
_TIMEVAL = struct.Struct("@ll")


class Channel:
    """One end. Any thread may send; one receives."""

    def __init__(self, own: socket.socket | TlsStream) -> None:
        self._socket = own
        self._sending = threading.Lock()

    def fileno(self) -> int:
        """Descriptor of the socket, readable when there are messages."""
        return self._socket.fileno()

    @property
    def own_host(self) -> str:
        """Address of this end on the network."""
        return str(self._socket.getsockname()[0])

    def limit_sends(self, seconds: float) -> None:
        """From now on, `send` raises TimeoutError when the other end takes nothing for as long."""
        self._limit(socket.SO_SNDTIMEO, seconds)

    def limit_receives(self, seconds: float) -> None:
        """From now on, `receive` raises TimeoutError when nothing comes for as long."""
        self._limit(socket.SO_RCVTIMEO, seconds)

    def send(self, message: bytes) -> None:
        """Raises OSError if the other end is closed."""
        with self._sending:
            try:
                self._socket.sendall(_LENGTH.pack(len(message)) + message)
            except BlockingIOError as error:
                raise TimeoutError from error

    @property
    def has_buffered(self) -> bool:
        """Whether there may be messages although the descriptor is not readable."""
        return isinstance(self._socket, TlsStream) and self._socket.has_buffered

    def receive(self, max_bytes: int = 2**32) -> bytearray:
        """Waits for a message. Raises EOFError if the other end is closed, or if the message is longer."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if length > max_bytes:
            raise EOFError(f"a message of {length} bytes")
        return self._read(length)

    def shut_down(self) -> None:
        """Ends whatever waits on the socket, at both ends. May be called from any thread."""
        with contextlib.suppress(OSError):  # the other end is gone, or this one is closed
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Closes the socket. Idempotent."""
        self._socket.close()

    def _limit(self, option: int, seconds: float) -> None:
        self._socket.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(int(seconds), int(seconds % 1 * 1e6)))

    def _read(self, length: int) -> bytearray:
        buffer = bytearray(length)
        view, num_read = memoryview(buffer), 0
        while num_read < length:
            try:
                part = self._socket.recv_into(view[num_read:])
            except BlockingIOError as error:
                raise TimeoutError from error
            except OSError as error:  # also of a network that is gone
                raise EOFError from error
            if not part:
                raise EOFError
            num_read += part
        return buffer

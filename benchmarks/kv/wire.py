"""Messages between the benchmark and its two sides: msgpack frames over socket pairs. Nothing is pickled."""

from __future__ import annotations

import socket
import struct
from typing import Literal

import msgspec

_LENGTH = struct.Struct("!I")

Mode = Literal["ours", "bare", "threaded", "memcpy", "undigested"]
"""How bytes are moved: through the connector; over its medium alone; the same on several threads; by one copy into
shared memory; through the connector with digests that cost nothing."""

MODES: tuple[Mode, ...] = ("ours", "bare", "threaded", "memcpy", "undigested")


class Setup(msgspec.Struct, frozen=True, tag=True):
    """First word to a side: what it is."""

    connector: str
    options: dict[str, str | int | float | bool]
    block_bytes: int
    num_blocks: int
    scratch: str  # directory on a tmpfs


class OpenBare(msgspec.Struct, frozen=True, tag=True):
    """Open the bare media; answered by Ready. Memory is measured before."""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A side's connector, or its bare medium, is open."""

    address: bytes = b""


class Meet(msgspec.Struct, frozen=True, tag=True):
    """The addresses of the other side's connector, or bare medium."""

    address: bytes
    is_bare: bool = False


class Run(msgspec.Struct, frozen=True, tag=True):
    """Do `num_handoffs` at once, of `num_blocks` each. `seed` makes the blocks' hashes new."""

    mode: Mode
    seed: int
    num_blocks: int
    num_handoffs: int = 1
    check: bool = False  # wipe the target first, and tell what is in it afterwards; takes time of its own


class Ran(msgspec.Struct, frozen=True, tag=True):
    """The times of a side's run. They are monotonic seconds, the same clock on both sides."""

    times: list[float]  # producer: forward end, one; consumer: runnable, one for each handoff
    cpu_s: float
    error: str = ""
    content: bytes = b""  # digest of the blocks moved, if checked
    num_stubbed: int = 0  # digests left out
    rss_growth: int = 0  # if checked: most bytes resident during the run, less those when the connector was opened


class Close(msgspec.Struct, frozen=True, tag=True):
    """Exit."""


class Go(msgspec.Struct, frozen=True, tag=True):
    """Consumer to producer: blocks are reserved, begin."""


class Moved(msgspec.Struct, frozen=True, tag=True):
    """Producer to consumer: blocks of one handoff are in the medium or in place. The bare media move all at once."""

    index: int
    first: int = 0  # block
    num_blocks: int = 0
    digests: list[bytes] = []
    error: str = ""


Message = Setup | OpenBare | Ready | Meet | Run | Ran | Close | Go | Moved


class Link:
    """One end of a socket pair."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)

    def fileno(self) -> int:
        """Returns the descriptor for `select`."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """One frame."""
        body = self._encoder.encode(message)
        self._socket.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> Message:
        """Wait for a frame. Raises EOFError when the other end is closed."""
        (size,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        return self._decoder.decode(self._exactly(size))

    def _exactly(self, size: int) -> bytes:
        received = bytearray()
        while len(received) < size:
            piece = self._socket.recv(size - len(received))
            if not piece:
                raise EOFError("the other process ended")
            received += piece
        return bytes(received)

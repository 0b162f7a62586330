"""The messages between the engine, the fork server and the processes of grammars: msgpack, each with its length before
it, over Unix sockets.

Engine to fork server:  `Settings` once, then `Fork` with the socket of the process to be, and `Reap`.
Fork server to engine:  `Started` once, then `Forked` or `Ended`, one answer to each message.
Engine to a grammar:    `Compile` once, then `Open`, `Accept`, `LookAhead` and `Close` of matchers.
A grammar to engine:    `Compiled`, and `Ready` if that went well, then `Masks`: one for each `Open`, for each matcher
                        of an `Accept`, and for each token of a `LookAhead`, in order.
"""

from __future__ import annotations

import struct
from typing import Generic, Literal, TypeVar

import msgspec

from common.engine.config import GrammarBackendName
from common.types import Constraint

_LENGTH = struct.Struct("!I")
MatcherState = Literal["following", "lost", "too_slow"]


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """The settings of all grammars of an engine."""

    backend: GrammarBackendName
    directory: str  # of the model's tokenizer
    vocab_size: int
    eos_token_ids: list[int]
    max_whitespace: int  # characters in a row between the tokens of JSON
    compile_s: float  # CPU seconds that a grammar may take to compile
    compile_bytes: int  # memory that this may take
    match_s: float  # CPU seconds that a matcher may take beyond its share of each step
    match_bytes: int  # memory that the matchers of a grammar may take


class Started(msgspec.Struct, frozen=True, tag=True):
    """The fork server has read the vocabulary, or could not."""

    problem: str = ""


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Start a process over the socket that comes with the message."""


class Forked(msgspec.Struct, frozen=True, tag=True):
    """The process was started. Its id stays taken until it is reaped."""

    pid: int
    problem: str = ""  # why it was not


class Reap(msgspec.Struct, frozen=True, tag=True):
    """Wait for a process that has ended or been killed."""

    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """The process has ended."""

    exit_code: int  # negative: the signal that ended it


class Compile(msgspec.Struct, frozen=True, tag=True):
    """Compile this constraint."""

    constraint: Constraint


class Compiled(msgspec.Struct, frozen=True, tag=True):
    """The constraint was compiled, or cannot be. After the former it is tried on some tokens."""

    problem: str = ""


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The grammar can be used, or matching it took too long."""

    problem: str = ""
    num_bytes: int = 0  # memory that is the process's own


class Open(msgspec.Struct, frozen=True, tag=True):
    """Make a matcher that has accepted these tokens, and send its mask."""

    matcher_id: int
    token_ids: list[int]
    share_s: float  # CPU seconds that it may take for each token


class Accept(msgspec.Struct, frozen=True, tag=True):
    """Accept the tokens of a step, and send the masks of the next ones."""

    token_ids: list[tuple[int, list[int]]]  # by matcher
    share_s: float


class LookAhead(msgspec.Struct, frozen=True, tag=True):
    """Send the masks after each of the tokens that may come, and give them up again. Where the grammar does not allow
    one, the states from there on are "lost"; the matcher is not."""

    matcher_id: int
    token_ids: list[int]
    share_s: float


class Close(msgspec.Struct, frozen=True, tag=True):
    """Drop a matcher."""

    matcher_id: int


class Masks(msgspec.Struct, frozen=True, tag=True):
    """The tokens that may come next, of some matchers."""

    states: list[tuple[int, MatcherState]]  # by matcher
    words: bytes  # int32 as `Matcher.fill` writes them, of those that follow the grammar


ToServer = Fork | Reap
FromServer = Started | Forked | Ended
ToGrammar = Compile | Open | Accept | LookAhead | Close
FromGrammar = Compiled | Ready | Masks

_encoder = msgspec.msgpack.Encoder()
_Message = TypeVar("_Message")


def frame(message: msgspec.Struct) -> bytes:
    """Returns the message with its length before it."""
    payload = _encoder.encode(message)
    return _LENGTH.pack(len(payload)) + payload


class Frames(Generic[_Message]):
    """Cuts what arrives into messages. Both ends are of one program, so a length is believed."""

    def __init__(self, kind: object) -> None:
        """`kind`: the type of the messages."""
        self._decoder: msgspec.msgpack.Decoder[_Message] = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[_Message]:
        """Returns the messages that are complete with `data`."""
        self._buffer += data
        messages: list[_Message] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            first = start + _LENGTH.size
            end = first + _LENGTH.unpack_from(self._buffer, start)[0]
            if len(self._buffer) < end:
                break
            messages.append(self._decoder.decode(bytes(self._buffer[first:end])))
            start = end
        del self._buffer[:start]
        return messages

"""The connection between machine 0 and another one, on which neither may be silent."""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from typing import Generic, TypeVar

import msgspec

from common.engine.executor.multiproc.channel import Channel
from common.engine.executor.multiproc.protocol import Alive, Decoder, encode
from common.errors import EngineDeadError

_Message = TypeVar("_Message")
_ALIVE = encode(Alive())
_ALIVES = 4  # within the time after which a silent end is gone


class Link(Generic[_Message]):
    """One end."""

    def __init__(self, channel: Channel, kind: object, peer: str, timeout_s: float) -> None:
        """`kind`: the type of the messages that come. `peer` names the other end in errors."""
        self.peer = peer
        self._channel = channel
        self.own_host = channel.own_host
        self._decode: Decoder[_Message] = Decoder(kind)
        self._timeout_s = timeout_s
        channel.limit_sends(timeout_s)
        channel.limit_receives(timeout_s)

    def send(self, message: msgspec.Struct) -> None:
        """May be called from any thread. Raises OSError if the other end takes nothing."""
        self._channel.send(encode(message))

    def messages(self) -> Iterator[_Message]:
        """Yields messages other than Alive. Says that this end is alive meanwhile. Raises EngineDeadError when the
        other end is gone."""
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        heard = told = time.monotonic()
        try:
            while True:
                is_ready = self._channel.has_buffered or poll.poll(1000 * self._timeout_s / _ALIVES)
                now = time.monotonic()
                if now - told >= self._timeout_s / _ALIVES / 2:
                    self._channel.send(_ALIVE)
                    told = now
                if is_ready:
                    heard = now
                    message = self._decode(self._channel.receive())
                    if not isinstance(message, Alive):
                        yield message
                elif now - heard > self._timeout_s and not poll.poll(0):  # this end may have been held up itself
                    raise TimeoutError
        except TimeoutError as error:
            silence = f"it has been silent for {self._timeout_s:g} s (node_timeout_s)"
            raise EngineDeadError(f"{self.peer} is gone: {silence}") from error
        except (EOFError, OSError) as error:
            raise EngineDeadError(f"{self.peer} is gone: it has closed its connection") from error

    def close(self) -> None:
        """Ends it, at both ends. May be called from any thread."""
        self._channel.shut_down()

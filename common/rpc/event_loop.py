"""Event loops on which gRPC's events do not pile up.

grpc.aio's poller thread writes a byte to a socket pair for each finished operation, blocking, and its reader on the
loop takes one byte in each round. The socket holds some 280 of them: once a round brings more than one operation for a
while, the poller waits for room, and from then on a round gets one operation, however many have finished. Each stream
of the process is then seconds late. Here the reader finds one byte, as all others were taken before.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import Callable
from typing import Any

import uvloop

_MAX_BYTES = 1 << 16  # more than the socket pair holds


class _Drained:
    """Mixed into a loop."""

    def add_reader(self, fd: Any, callback: Callable[..., Any], *args: Any) -> None:
        """Adds a reader, drained first if it is gRPC's."""
        if isinstance(fd, socket.socket) and _is_grpc(callback):
            callback = functools.partial(_call_drained, fd, callback)
        super().add_reader(fd, callback, *args)  # type: ignore[misc]


class AsyncioLoop(_Drained, asyncio.SelectorEventLoop):  # type: ignore[misc]  # a reader may be anything with a descriptor
    """The loop of pods."""


class UvLoop(_Drained, uvloop.Loop):  # type: ignore[misc]  # its annotations differ from their base class
    """The loop of routers, which have many connections."""


def _is_grpc(callback: Callable[..., Any]) -> bool:
    function = callback.func if isinstance(callback, functools.partial) else callback
    return type(getattr(function, "__self__", None)).__module__.startswith("grpc.")


def _call_drained(reader: socket.socket, callback: Callable[..., Any], *args: Any) -> None:
    num_bytes = len(reader.recv(_MAX_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    if num_bytes > 1:
        reader.recv(num_bytes - 1)
    callback(*args)  # takes the last byte, and all operations

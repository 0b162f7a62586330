"""TCP ports for local pods."""

from __future__ import annotations

import atexit
import contextlib
import random
import socket
import sys

from common.errors import ConfigError

# Below the range from which the kernel takes ports of outgoing connections, so that no other process takes a pod's port
# between its choice and its use, nor between a death and the restart.
_FIRST, _LAST = 20000, 32000
_ATTEMPTS = 200
_kept = contextlib.ExitStack()
atexit.register(_kept.close)


def pick_ports(host: str, count: int) -> list[int]:
    """`count` different ports that are free on `host` now. Raises ConfigError if there are none.

    On Linux they stay with this process until it ends: only a server that asks for one by its number gets it, and the
    launcher of another cluster does not pick it. Elsewhere a bound port could not be listened on.
    """
    if problem := bind_problem(host, 0):
        raise ConfigError(f"--host: cannot listen on {host}: {problem}", param="host")
    chosen: list[int] = []
    for port in random.sample(range(_FIRST, _LAST), _ATTEMPTS + count):
        if len(chosen) == count:
            break
        if _keep(host, port):
            chosen.append(port)
    if len(chosen) < count:
        raise ConfigError(f"--host: {count} free ports are not to be had on {host}", param="host")
    return chosen


def _keep(host: str, port: int) -> bool:
    """Binds a socket that never listens. False if another socket has the port, or keeps it likewise."""
    try:
        keeper = _bound(host, port, shared=False)
    except OSError:
        return False
    if sys.platform == "linux":
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # now a server may bind it, too
        _kept.enter_context(keeper)
    else:
        keeper.close()
    return True


def check_free(host: str, port: int, option: str) -> None:
    """Raises ConfigError, naming `option`, if host:port cannot be listened on."""
    problem = bind_problem(host, port)
    if problem is not None:
        raise ConfigError(f"{option}: cannot listen on {host}:{port}: {problem}", param=option)


def bind_problem(host: str, port: int) -> str | None:
    """Why host:port cannot be listened on; None if it can be."""
    try:
        _bound(host, port, shared=True).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _bound(host: str, port: int, *, shared: bool) -> socket.socket:
    """A socket on host:port; `shared` with bound ones that do not listen. Raises OSError."""
    family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, shared)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound

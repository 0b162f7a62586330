"""TCP ports for local pods."""

from __future__ import annotations

import random
import socket

from common.errors import ConfigError

# Below the range from which the kernel takes ports of outgoing connections, so that no other process takes a pod's port
# between its choice and its use, nor between a death and the restart.
_FIRST, _LAST = 20000, 32000
_ATTEMPTS = 200


def pick_ports(host: str, count: int) -> list[int]:
    """`count` different ports that are free on `host` now. Raises ConfigError if there are none."""
    if problem := _bind_problem(host, 0):
        raise ConfigError(f"--host: cannot listen on {host}: {problem}", param="host")
    chosen: list[int] = []
    for port in random.sample(range(_FIRST, _LAST), _ATTEMPTS + count):
        if len(chosen) == count:
            break
        if _bind_problem(host, port) is None:
            chosen.append(port)
    if len(chosen) < count:
        raise ConfigError(f"--host: {count} free ports are not to be had on {host}", param="host")
    return chosen


def check_free(host: str, port: int, option: str) -> None:
    """Raises ConfigError, naming `option`, if host:port cannot be listened on."""
    problem = _bind_problem(host, port)
    if problem is not None:
        raise ConfigError(f"{option}: cannot listen on {host}:{port}: {problem}", param=option)


def _bind_problem(host: str, port: int) -> str | None:
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        return error.strerror or str(error)
    return None

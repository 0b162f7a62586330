"""Ports on which several processes listen."""

from __future__ import annotations

import socket

from common.errors import ConfigError


def reserve_port(host: str, port: int, setting: str) -> socket.socket:
    """A socket that keeps the port for processes of this user that set SO_REUSEPORT, and itself takes no connections.
    Port 0: a free one. Raises ConfigError that names the setting if another process listens there."""
    option = f"--{setting.replace('_', '-')}"
    try:
        if port:
            _bind(host, port, socket.SO_REUSEADDR).close()  # fails if anyone listens, whom the next one would join
        reserved = _bind(host, port, socket.SO_REUSEADDR, socket.SO_REUSEPORT)
    except OSError as error:
        raise ConfigError(f"{option}: cannot listen on {host}:{port}: {error.strerror}", param=setting) from error
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)  # so that another router's first attempt fails, too
    return reserved


def _bind(host: str, port: int, *options: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        for option in options:
            bound.setsockopt(socket.SOL_SOCKET, option, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    return bound

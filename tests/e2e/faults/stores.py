"""Harm that the store between two pods may come to."""

from __future__ import annotations

import contextlib
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import redis

from tests.e2e.faults.fleet import Fleet

DAMAGES = ("spoil", "cut", "exchange")


class Store(Protocol):
    """Where blocks are kept between two pods."""

    def damage(self, rng: random.Random) -> None:
        """Deletes all blocks, or spoils, cuts or exchanges every one."""


class SharedDirectory:
    """The shared-storage connector's."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def damage(self, rng: random.Random) -> None:
        """See Store."""
        kind = rng.choice(["delete", *DAMAGES])
        if kind == "delete":
            for child in self._path.iterdir():
                shutil.rmtree(child, ignore_errors=True)
            return
        files = sorted(path for path in self._path.rglob("*") if path.is_file())
        for path in files:
            with contextlib.suppress(FileNotFoundError):  # renamed or evicted meanwhile
                path.write_bytes(damaged(kind, path.read_bytes(), lambda: rng.choice(files).read_bytes()))


class Redis:
    """The redis connector's."""

    def __init__(self, url: str) -> None:
        self._url = url

    def damage(self, rng: random.Random) -> None:
        """See Store. A server that cannot be reached at the moment has nothing to be damaged."""
        kind = rng.choice(["delete", *DAMAGES])
        client = redis.Redis.from_url(self._url, socket_timeout=1, socket_connect_timeout=1)
        with client, contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
            if kind == "delete":
                client.flushall()
                return
            keys = sorted(client.keys())
            for key in keys:
                value = damaged(kind, client.get(key) or b"", lambda: client.get(rng.choice(keys)) or b"")
                client.set(key, value, keepttl=True)


def damaged(kind: str, block: bytes, another: Callable[[], bytes]) -> bytes:
    """Returns what a broken store would instead of `block`."""
    match kind:
        case "spoil":  # so much that it could not be overlooked in the answer
            middle = len(block) // 2
            return block[:middle] + bytes(value ^ 0xFF for value in block[middle:])
        case "cut":
            return block[: len(block) // 2]
        case _:
            return another()


def store_of(fleet: Fleet) -> Store | None:
    """The store of the fleet's connector; None: its pods write into each other."""
    match fleet.connector:
        case "shared-storage":
            return SharedDirectory(fleet.blocks)
        case "redis":
            return Redis(fleet.redis_url)
        case _:
            return None

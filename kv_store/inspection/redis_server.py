"""Inspects the servers of the redis connector: one string baton:<namespace>:<hash in hex> per block."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import redis

from common.errors import ConfigError
from kv_store.inspection.base import HASH_PATTERN, NAMESPACE_PATTERN, StoredBlock
from kv_store.redis_store import RedisNode, RedisOptions, check_servers, parse_nodes
from kv_store.registry import Options, parse_options

_KEY = re.compile(rf"baton:({NAMESPACE_PATTERN}):({HASH_PATTERN})".encode())
_SCAN_COUNT = 1000  # keys looked at in one round trip
_TIMEOUT_S = 30.0


def open_redis(options: Options, path: str, prefix: str) -> RedisInspector:
    """See `kv_store.registry.ConnectorKind`."""
    return RedisInspector(parse_options("redis", options, RedisOptions, path), prefix)


class RedisInspector:
    """A StoreInspector of one or more Redis servers.

    A block's bytes are the memory that the server takes for it. Its last use is unknown where the server evicts by
    frequency. Reading a block leaves its time to live alone, but counts as a use for the server's eviction.
    """

    def __init__(self, options: RedisOptions, prefix: str = "") -> None:
        """Raises ConfigError that names the option, after `prefix`, if a server cannot be used."""
        self._prefix = prefix
        try:
            check_servers(options)
        except ConfigError as error:
            raise ConfigError(f"{prefix}{error.message}", param=f"{prefix}{error.param}") from error
        self._clients = {node.name: _client(node, options) for node in parse_nodes(options.url)}

    def blocks(self, namespace: str | None = None) -> Iterator[StoredBlock]:
        """See StoreInspector."""
        for name, client in self._clients.items():
            with self._server_errors(name):
                yield from _blocks_on(name, client, namespace)

    def read(self, block: StoredBlock) -> bytes | None:
        """See StoreInspector."""
        with self._server_errors(block.location):
            try:
                frame: bytes | None = self._clients[block.location].get(_key(block))
                return frame
            except redis.ResponseError as error:
                if str(error).startswith("WRONGTYPE"):
                    return b""  # the key exists, but holds no block
                raise

    def remove(self, blocks: Sequence[StoredBlock]) -> int:
        """See StoreInspector."""
        removed = 0
        for name, share in groupby(blocks, key=lambda block: block.location):
            with self._server_errors(name):
                removed += int(self._clients[name].unlink(*map(_key, share)))
        return removed

    def close(self) -> None:
        """See StoreInspector."""
        for client in self._clients.values():
            client.close()

    @contextlib.contextmanager
    def _server_errors(self, name: str) -> Iterator[None]:
        """Turns errors of the server or the connection into ConfigError."""
        try:
            yield
        except (redis.RedisError, OSError) as error:
            setting = f"{self._prefix}url"
            message = f"{setting}: Redis at {name} failed: {error or type(error).__name__}"
            raise ConfigError(message, param=setting) from error


def _client(node: RedisNode, options: RedisOptions) -> Any:
    tls = {"ssl": True, "ssl_ca_certs": options.tls_ca_file or None} if node.tls else {}
    return redis.Redis(
        host=node.host,
        port=node.port,
        db=node.db,
        username=node.username,
        password=node.password,
        socket_timeout=_TIMEOUT_S,
        socket_connect_timeout=_TIMEOUT_S,
        protocol=2,
        **tls,
    )


def _blocks_on(location: str, client: Any, namespace: str | None) -> Iterator[StoredBlock]:
    cursor, seen = 0, set[bytes]()  # a scan may return a key twice
    while True:
        cursor, keys = client.scan(cursor, match=f"baton:{namespace or '*'}:*", count=_SCAN_COUNT)
        fresh = [key for key in dict.fromkeys(keys) if key not in seen]
        seen.update(fresh)
        yield from _describe(location, client, fresh)
        if cursor == 0:
            return


def _describe(location: str, client: Any, keys: Sequence[bytes]) -> Iterator[StoredBlock]:
    """Asks for memory and idle time of each key, which do not count as a use, in one round trip."""
    ours = [match for key in keys if (match := _KEY.fullmatch(key))]
    with client.pipeline(transaction=False) as pipeline:
        for match in ours:
            pipeline.memory_usage(match[0])
            pipeline.object("idletime", match[0])
        answers = pipeline.execute(raise_on_error=False)
    now = time.time()
    for match, num_bytes, idle_s in zip(ours, answers[::2], answers[1::2], strict=True):
        if isinstance(num_bytes, redis.RedisError):
            raise num_bytes
        if num_bytes is None:  # expired meanwhile
            continue
        used_at = now - idle_s if isinstance(idle_s, int) else None
        yield StoredBlock(match[1].decode(), match[2].decode(), num_bytes, used_at, location)


def _key(block: StoredBlock) -> str:
    return f"baton:{block.namespace}:{block.hash_hex}"

"""A connector as someone outside the project would add it: blocks in a SQLite file.

--connector tests.extensions.connector:KIND
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.engine.kv_connector import WorkerConnector
from common.types import BlockHash
from kv_store.base import Buffer, StoreConnectorOptions
from kv_store.inspection import StoredBlock
from kv_store.registry import ConnectorKind, Options, over_store, parse_options

TABLE = "CREATE TABLE IF NOT EXISTS blocks (namespace, hash, frame, PRIMARY KEY (namespace, hash))"


class SqliteOptions(StoreConnectorOptions, frozen=True, kw_only=True):
    path: str = ""


class SqliteStore:
    """A BlockStore, and the StoreInspector of it."""

    def __init__(self, options: SqliteOptions) -> None:
        self._file = Path(options.path) / "blocks.sqlite"
        self._namespace = ""

    def open(self, namespace: str, frame_bytes: int) -> None:
        self._namespace = namespace
        self._execute(TABLE)

    def touch(self, keys: Sequence[BlockHash]) -> list[bool]:
        return [self._find(self._namespace, key.hex()) is not None for key in keys]

    def write(self, keys: Sequence[BlockHash], frames: Sequence[Buffer]) -> None:
        for key, frame in zip(keys, frames, strict=True):
            self._execute("INSERT OR REPLACE INTO blocks VALUES (?, ?, ?)", self._namespace, key.hex(), bytes(frame))

    def read_into(self, keys: Sequence[BlockHash], buffers: Sequence[Buffer]) -> list[int | None]:
        frames = [self._find(self._namespace, key.hex()) for key in keys]
        for frame, buffer in zip(frames, buffers, strict=True):
            if frame is not None:
                buffer[: len(frame)] = frame[: len(buffer)]
        return [None if frame is None else len(frame) for frame in frames]

    def discard(self, key: BlockHash) -> None:
        self._execute("DELETE FROM blocks WHERE namespace = ? AND hash = ?", self._namespace, key.hex())

    def blocks(self, namespace: str | None = None) -> Iterator[StoredBlock]:
        for name, block_hash, size in self._execute("SELECT namespace, hash, length(frame) FROM blocks"):
            if namespace in (None, name):
                yield StoredBlock(name, block_hash, size, None, str(self._file))

    def read(self, block: StoredBlock) -> bytes | None:
        return self._find(block.namespace, block.hash_hex)

    def remove(self, blocks: Sequence[StoredBlock]) -> int:
        return sum(bool(self._execute("DELETE FROM blocks WHERE hash = ? RETURNING 1", b.hash_hex)) for b in blocks)

    def close(self) -> None:
        pass

    def _find(self, namespace: str, block_hash: str) -> bytes | None:
        found = self._execute("SELECT frame FROM blocks WHERE namespace = ? AND hash = ?", namespace, block_hash)
        return found[0][0] if found else None

    def _execute(self, statement: str, *values: object) -> list[tuple[object, ...]]:
        with sqlite3.connect(self._file, timeout=30, isolation_level=None) as connection:
            return connection.execute(statement, values).fetchall()


def create(options: Options, path: str) -> WorkerConnector:
    parsed = parse_options("sqlite", options, SqliteOptions, path)
    return over_store(SqliteStore(parsed), parsed)


def inspect(options: Options, path: str, prefix: str) -> SqliteStore:
    return SqliteStore(parse_options("sqlite", options, SqliteOptions, path))


KIND = ConnectorKind(create, directory_option="path", inspector="tests.extensions.connector:inspect")

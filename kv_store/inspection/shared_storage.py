"""Inspects the directory of the shared-storage connector: path/<namespace>/<first 2 hex digits>/<hash>.kv."""

from __future__ import annotations

import contextlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.errors import ConfigError
from kv_store.inspection.base import HASH_PATTERN, NAMESPACE, StoredBlock
from kv_store.registry import Options, parse_options
from kv_store.shared_storage import SharedStorageOptions

_BLOCK_FILE = re.compile(rf"({HASH_PATTERN})\.kv")
_FAN_OUT = re.compile(r"[0-9a-f]{2}")


def open_directory(options: Options, path: str, prefix: str) -> SharedStorageInspector:
    """See `kv_store.registry.ConnectorKind`."""
    parsed = parse_options("shared-storage", options, SharedStorageOptions, path)
    return SharedStorageInspector(parsed, f"{prefix}path" if prefix else "--connector-path")


class SharedStorageInspector:
    """A StoreInspector of a directory. A file's time of modification is its last use; reading does not change it."""

    def __init__(self, options: SharedStorageOptions, setting: str = "--connector-path") -> None:
        """`setting`: what errors call the directory. Raises ConfigError if there is no such directory."""
        self._setting = setting
        if not options.path:
            raise self._error("required for shared-storage")
        self._root = Path(options.path).expanduser()
        if not self._root.is_dir():
            raise self._error(f"no directory {options.path}")

    def blocks(self, namespace: str | None = None) -> Iterator[StoredBlock]:
        """See StoreInspector."""
        with self._medium_errors():
            for model in _directories(self._root, NAMESPACE):
                if namespace is None or model.name == namespace:
                    for fan_out in _directories(model, _FAN_OUT):
                        yield from self._blocks_in(model.name, fan_out)

    def read(self, block: StoredBlock) -> bytes | None:
        """See StoreInspector."""
        with self._medium_errors():
            try:
                return Path(block.location).read_bytes()
            except FileNotFoundError:
                return None

    def remove(self, blocks: Sequence[StoredBlock]) -> int:
        """See StoreInspector."""
        removed = 0
        with self._medium_errors():
            for block in blocks:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(block.location)
                    removed += 1
        return removed

    def close(self) -> None:
        """See StoreInspector."""

    @contextlib.contextmanager
    def _medium_errors(self) -> Iterator[None]:
        """Turns errors of the operating system into ConfigError."""
        try:
            yield
        except OSError as error:
            raise self._error(f"shared storage failed: {error}") from error

    def _error(self, problem: str) -> ConfigError:
        return ConfigError(f"{self._setting}: {problem}", param=self._setting.removeprefix("--").replace("-", "_"))

    def _blocks_in(self, namespace: str, fan_out: Path) -> Iterator[StoredBlock]:
        for entry in _entries(fan_out):
            match = _BLOCK_FILE.fullmatch(entry.name)
            if match is None or not entry.name.startswith(fan_out.name):
                continue
            with contextlib.suppress(FileNotFoundError):  # evicted meanwhile
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield StoredBlock(namespace, match[1], status.st_size, status.st_mtime, entry.path)


def _directories(path: Path, pattern: re.Pattern[str]) -> list[Path]:
    found = (entry for entry in _entries(path) if pattern.fullmatch(entry.name))
    return sorted(Path(entry.path) for entry in found if entry.is_dir(follow_symlinks=False))


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []

"""Files that commands write: whole, or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from common.errors import ConfigError


@contextmanager
def replacing(path: Path, option: str) -> Iterator[BinaryIO]:
    """Yields a new file, which takes the place of `path` once it is complete and is removed otherwise. What is no
    regular file, such as /dev/stdout, is written to directly. Raises ConfigError, which names the option."""
    try:
        if _is_special(path):
            with path.open("wb") as file:
                yield file
            return
        with _file_beside(path.resolve()) as file:
            yield file
    except OSError as error:
        raise _error_of(path, option, error) from error


def check_writable(path: Path, option: str) -> None:
    """Raises ConfigError before the work, not after it, if the file cannot be written. Leaves it as it is."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if path.exists() and not os.access(path, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        if not _is_special(path):
            fresh = _name_beside(path.resolve())
            fresh.open("xb").close()
            fresh.unlink()
    except OSError as error:
        raise _error_of(path, option, error) from error


@contextmanager
def _file_beside(path: Path) -> Iterator[BinaryIO]:
    fresh = _name_beside(path)
    try:
        with fresh.open("xb") as file:
            yield file
        fresh.replace(path)
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)


def _name_beside(path: Path) -> Path:
    return path.with_name(f"{path.name}.part-{os.getpid()}")


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _error_of(path: Path, option: str, error: OSError) -> ConfigError:
    return ConfigError(f"--{option}: cannot write {path}: {error.strerror or error}", param=option)

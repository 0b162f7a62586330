"""Machine code of kernels that earlier processes have compiled, in the user's cache directory.

A file's name is a digest of everything that its code depends on, so entries never become stale. Whoever can write to
the directory can make this process run code, so it is used only if this user owns it and nobody else can access it.
Without such a directory every process compiles what it needs.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

logger = logging.getLogger(__name__)

_DIGEST_SIZE = 16  # bytes
_MAX_FILES = 1024  # of some kilobytes each; those that were not used for the longest time are removed


def cached_code(parts: Sequence[str], compile_: Callable[[], bytes]) -> bytes:
    """The code that depends on `parts`, from the cache or else from `compile_`."""
    path = _path()
    directory = None if path is None else _open(path)
    if directory is None:
        return compile_()
    name = _digest("\0".join(parts).encode()).hex()
    code = _read(directory, name)
    if code is None:
        code = compile_()
        _write(directory, name, code)
    return code


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_SIZE).digest()


def _path() -> Path | None:
    """None if this user has no home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        home = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return home / "baton" / "kernels" if home.is_absolute() else None


@cache
def _open(path: Path) -> int | None:
    """A descriptor of the directory, which is made if need be: whatever happens to its path, files are those of the
    directory that was checked. None if it cannot be used."""
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        for each in (path.parent, path):
            each.mkdir(mode=0o700, exist_ok=True)
        directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        logger.info("compiled kernels are not kept: %s", error)
        return None
    status = os.fstat(directory)
    if status.st_uid != os.getuid() or status.st_mode & 0o077:
        os.close(directory)
        logger.warning("compiled kernels are not kept: %s must be a directory of this user's with mode 0700", path)
        return None
    return directory


def _read(directory: int, name: str) -> bytes | None:
    try:
        with open(name, "rb", opener=partial(os.open, dir_fd=directory)) as file:
            content = file.read()
    except OSError:
        return None
    with contextlib.suppress(OSError):  # on a file system that is read-only, where nothing is removed either
        os.utime(name, dir_fd=directory)
    digest, code = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
    return code if digest == _digest(code) else None  # a machine may have stopped before all was written


def _write(directory: int, name: str, code: bytes) -> None:
    draft = f"{name}.{os.getpid()}"
    try:
        with open(draft, "wb", opener=partial(os.open, mode=0o600, dir_fd=directory)) as file:
            file.write(_digest(code) + code)
        os.replace(draft, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError as error:
        logger.info("a compiled kernel is not kept: %s", error)
        with contextlib.suppress(OSError):
            os.unlink(draft, dir_fd=directory)
        return
    with contextlib.suppress(OSError):  # another process removes them as well
        _remove_oldest(directory)


def _remove_oldest(directory: int) -> None:
    with os.scandir(directory) as entries:
        files = sorted((entry.stat().st_mtime, entry.name) for entry in entries)
    for _, name in files[:-_MAX_FILES]:
        os.unlink(name, dir_fd=directory)

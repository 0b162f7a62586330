"""Machine code of kernels that earlier processes have compiled, in the user's cache directory.

A file is named after a digest of all that its code depends on, so that none is ever out of date. Whoever can write
there can have this process run code of theirs: a directory that is not this user's alone is not used. Without a
directory every process compiles what it needs.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

_DIGEST_SIZE = 16  # bytes
_MAX_FILES = 1024  # of some kilobytes each; the oldest are removed


def cached_code(parts: Sequence[str], compile_: Callable[[], bytes]) -> bytes:
    """The code that depends on `parts`, from the cache or else from `compile_`."""
    directory = _private_directory()
    if directory is None:
        return compile_()
    path = directory / _digest("\0".join(parts).encode()).hex()
    code = _read(path)
    if code is None:
        code = compile_()
        _write(path, code)
    return code


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_SIZE).digest()


def _private_directory() -> Path | None:
    """Made if need be; None if this user cannot have one."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        home = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
        directory = home / "baton" / "kernels"
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except (OSError, RuntimeError) as error:
        logger.debug("compiled kernels are not kept: %s", error)
        return None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        logger.warning("compiled kernels are not kept: %s must be a directory of this user's with mode 0700", directory)
        return None
    return directory


def _read(path: Path) -> bytes | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    digest, code = content[:_DIGEST_SIZE], content[_DIGEST_SIZE:]
    return code if digest == _digest(code) else None  # a machine may have stopped before all was written


def _write(path: Path, code: bytes) -> None:
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        draft.write_bytes(_digest(code) + code)
        draft.replace(path)
        _remove_oldest(path.parent)
    except OSError as error:
        logger.debug("a compiled kernel is not kept: %s", error)
        with contextlib.suppress(OSError):
            draft.unlink()


def _remove_oldest(directory: Path) -> None:
    files = sorted((entry.stat().st_mtime, entry.path) for entry in os.scandir(directory))
    for _, path in files[:-_MAX_FILES]:
        os.unlink(path)

"""Keeps what processes have made, such as the machine code of kernels, for later ones, in the user's cache directory.

Whoever can write to the directory can make this process run code, so it is used only if this user owns it and nobody
else can access it. Files may have been planted before that was so: a file is used only if it is this user's alone and
begins with a digest of its name and its content, whose key only this user can read. The key is a file beside the
others.

A file's name is a digest of everything that its content depends on, so entries never become stale. Without such a
directory every process makes what it needs.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import logging
import os
import secrets
import stat
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

logger = logging.getLogger(__name__)

_KEY_NAME = "key"
_KEY_SIZE = _DIGEST_SIZE = 32  # bytes
_MAX_FILES = 1024  # of some kilobytes each; those that were not used for the longest time are removed


def cached(kind: str, parts: Sequence[str], make: Callable[[], bytes]) -> bytes:
    """Returns what depends on `parts`, from the directory of this `kind` or else from `make`."""
    path = _path(kind)
    directory = None if path is None else _open_directory(path)
    return make() if directory is None else directory.content(parts, make)


def _path(kind: str) -> Path | None:
    """None if this user has no home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        home = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    except RuntimeError:
        return None
    return home / "baton" / kind if home.is_absolute() else None


@cache
def _open_directory(path: Path) -> _Directory | None:
    """The directory, which is made if need be. None if it cannot be used."""
    try:
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        for each in (path.parent, path):
            each.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        logger.info("nothing is kept for later starts: %s", error)
        return None
    if not _is_private(os.fstat(descriptor)):
        os.close(descriptor)
        logger.warning("nothing is kept for later starts: %s must be a directory of this user's with mode 0700", path)
        return None
    return _Directory(path, descriptor)


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.getuid() and not status.st_mode & 0o077


class _Directory:
    """A directory that was checked: whatever happens to its path, files are those of that directory."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path = path
        self._descriptor = descriptor
        self._reported: set[str] = set()  # names of files that were not used

    def content(self, parts: Sequence[str], make: Callable[[], bytes]) -> bytes:
        """See `cached`."""
        key = self._key()
        if key is None:
            return make()
        name = _digest(key, "\0".join(parts).encode()).hex()
        file = self._read(name)
        if file is not None:
            digest, content = file[:_DIGEST_SIZE], file[_DIGEST_SIZE:]
            if hmac.compare_digest(digest, _digest(key, name.encode() + content)):
                return content
            self._report(name, "another process has changed it, or the machine stopped before all was written")
        content = make()
        self._replace(name, _digest(key, name.encode() + content) + content)
        self._remove_oldest()
        return content

    def _key(self) -> bytes | None:
        """The key of the digests, made if need be. None if it cannot be kept. It is read each time, as another process
        may have made one at the same time, and the later one stays."""
        key = self._read_key()
        if key is None:
            self._replace(_KEY_NAME, secrets.token_bytes(_KEY_SIZE))
            key = self._read_key()
        return key

    def _read_key(self) -> bytes | None:
        key = self._read(_KEY_NAME)
        if key is None or len(key) == _KEY_SIZE:
            return key
        self._report(_KEY_NAME, f"it has {len(key)} bytes instead of {_KEY_SIZE}")
        return None

    def _read(self, name: str) -> bytes | None:
        """The content of a file. None if there is none, or if it may be another user's."""
        try:
            with open(name, "rb", opener=self._open) as file:
                with contextlib.suppress(OSError):  # on a read-only file system, where nothing is removed either
                    os.utime(file.fileno())
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            self._report(name, error.strerror or str(error))
            return None

    def _open(self, name: str, flags: int) -> int:
        """Opens a file of this user's alone, without waiting for the other end of a pipe. Raises OSError."""
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(name, flags, mode=0o600, dir_fd=self._descriptor)
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and _is_private(status) and status.st_nlink == 1:
            return descriptor
        os.close(descriptor)
        raise PermissionError(errno.EPERM, "it must be a regular file of this user's with mode 0600 and one link")

    def _report(self, name: str, problem: str) -> None:
        if name not in self._reported:
            self._reported.add(name)
            logger.warning("%s is ignored and replaced: %s", self._path / name, problem)

    def _replace(self, name: str, content: bytes) -> None:
        draft = f"draft-{secrets.token_hex(8)}"
        try:
            with open(draft, "xb", opener=self._open) as file:
                file.write(content)
            try:
                self._rename(draft, name)
            except IsADirectoryError:
                self._move_away(name)
                self._rename(draft, name)
        except OSError as error:
            logger.info("nothing is kept in %s: %s", self._path, error)
            self._unlink(draft)

    def _rename(self, name: str, to: str) -> None:
        os.replace(name, to, src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)

    def _move_away(self, name: str) -> None:
        """Makes room where a directory is, and removes that if it is empty: what lies in it may be another user's."""
        aside = f"replaced-{secrets.token_hex(8)}"
        self._rename(name, aside)
        with contextlib.suppress(OSError):
            os.rmdir(aside, dir_fd=self._descriptor)

    def _remove_oldest(self) -> None:
        # Another process removes files as well.
        with contextlib.suppress(OSError), os.scandir(self._descriptor) as entries:
            files = [entry for entry in entries if entry.name != _KEY_NAME]
            files.sort(key=lambda entry: entry.stat(follow_symlinks=False).st_mtime)
            for entry in files[:-_MAX_FILES]:
                self._unlink(entry.name)

    def _unlink(self, name: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(name, dir_fd=self._descriptor)


def _digest(key: bytes, content: bytes) -> bytes:
    return hmac.digest(key, content, "sha256")

"""A store in a directory that all pods see: tmpfs on one machine, a network file system on many.

    path/<namespace>/<first 2 hex digits of the hash>/<hash>.kv

A frame is written to a temporary file beside its place and renamed into it, so a file is a whole frame, with no locks,
whichever process dies and when. What dead writers left is deleted an hour later by the next process that lists its
directory. Nothing is synced to disk: a power failure may leave truncated files, which readers notice. On a network file
system a file may be deleted elsewhere at any moment, even while it is open (ESTALE): it then counts as missing.

Use is recorded in a file's modification time, which we set ourselves: access times are off on many mounts.

Any number of processes write to one directory and none of them knows its size. So that no process has to look through
all of a large one at once, the bound holds for each part of it, which is a share of the 256 directories of each model.
As hashes are uniform, so are the parts. A process looks through all at start, and through a part whenever it has itself
written another sixteenth of that part's bound to it. If less than that is left, it deletes the part's least recently
used files, whatever their model and writer, until an eighth is free. So n writers may together exceed the bound by n/16
of it.

Errors that concern the whole medium, such as a full disk or a mount that is gone, open a circuit breaker
(`kv_store.guard`), one for reads and one for writes. A call that never returns, as on a dead hard mount, raises no
error; the connector notices it, since it holds the connector's threads.

Files are read, not mapped. A mapped file that is cut short, or on a network file system deleted elsewhere, kills the
process that touches it (SIGBUS), and its bytes may change between their digest and their use. Measured on tmpfs, one
thread, from open file to verified bytes in the KV cache: blocks of 64 KiB 2.9 GB/s read and 2.1 mapped, of 1 MiB 3.7
and 4.3, where threads bring more.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, NamedTuple

from msgspec import Meta

from common.errors import ConfigError, StoreError, StoreUnavailableError
from common.types import BlockHash
from kv_store.base import Buffer, StoreConnectorOptions
from kv_store.guard import DEFAULT_BACKOFF, READ_ONLY, UNAVAILABLE, Backoff, Guard

logger = logging.getLogger(__name__)

PositiveInt = Annotated[int, Meta(ge=1)]

_SUFFIX = ".kv"
_TEMP_SUFFIX = ".tmp"
_STALE_TEMP_S = 3600.0  # longer than any timeout_s: the writer of such a file has failed or died
_MEMORY = "/dev/shm"  # noqa: S108 - what we use below it is checked for owner and mode
_FULL = (errno.ENOSPC, errno.EDQUOT)
_GONE = (errno.ENOENT, errno.ESTALE)
_MEDIUM_FAILS = (  # for all files; other errors concern one file
    *_FULL,
    errno.EIO,
    errno.EROFS,
    errno.ESTALE,
    errno.ENOTCONN,
    errno.ENODEV,
    errno.ETIMEDOUT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
)
_NUM_DIRECTORIES = 256  # directories that a model's blocks are spread over
_MIN_BLOCKS_PER_PART = 64  # of the bound; with fewer, chance would make parts too uneven


class SharedStorageOptions(StoreConnectorOptions, frozen=True, kw_only=True):
    """Options of the shared-storage connector."""

    path: Annotated[
        str,
        Meta(description="Directory that all pods share; default: a directory of this user, in memory if possible."),
    ] = ""
    max_bytes: Annotated[
        PositiveInt | None,
        Meta(description="Most bytes kept in the directory; default: half of what is free there at start."),
    ] = None


class _StoredFile(NamedTuple):
    """A block file; the order of the fields gives the order of eviction."""

    used_at: float  # mtime, seconds since 1970
    size: int  # bytes
    path: str


class SharedStorageStore:
    """A BlockStore in a directory."""

    def __init__(self, options: SharedStorageOptions, *, backoff: Backoff = DEFAULT_BACKOFF) -> None:
        self._options = options
        medium = f"shared storage in {options.path or 'the default directory'}"
        self._reads = Guard(medium, UNAVAILABLE, self._probe_reads, backoff)
        self._writes = Guard(medium, READ_ONLY, self._probe_writes, backoff)
        self._root = ""
        self._blocks = ""  # this model's part
        self._frame_bytes = 0
        self._num_parts = 1
        self._max_bytes = 0  # bound of one part of the directory; so are the next two
        self._look_after = 0  # bytes written between two scans
        self._keep = 0  # bytes left by an eviction
        self._writer = os.urandom(8).hex()  # makes names of temporary files unique
        self._temp_count = itertools.count()
        self._written = [0]  # bytes since the last scan of each part
        self._written_lock = threading.Lock()

    def open(self, namespace: str, frame_bytes: int) -> None:
        """See BlockStore."""
        try:
            self._root = os.path.expanduser(self._options.path) if self._options.path else _default_path()
            self._blocks = f"{self._root}/{namespace}"
            self._frame_bytes = frame_bytes
            self._try_to_write(1)
            self._set_bound(self._options.max_bytes or self._half_of_available(), frame_bytes)
            for part in range(self._num_parts):
                self._keep_bound(part)
        except OSError as error:
            raise ConfigError(f"connector_path: cannot use it as shared storage: {error}", param="path") from error

    def touch(self, keys: Sequence[BlockHash]) -> list[bool]:
        """See BlockStore."""
        with _guarded(self._reads):
            return [_mark_used(self._file_of(key)) for key in keys]

    def write(self, keys: Sequence[BlockHash], frames: Sequence[Buffer]) -> None:
        """See BlockStore."""
        with _guarded(self._writes):
            for key, frame in zip(keys, frames, strict=True):
                self._write_one(key, frame)

    def read_into(self, keys: Sequence[BlockHash], buffers: Sequence[Buffer]) -> list[int | None]:
        """See BlockStore."""
        with _guarded(self._reads):
            return [_read_file(self._file_of(key), buffer) for key, buffer in zip(keys, buffers, strict=True)]

    def discard(self, key: BlockHash) -> None:
        """See BlockStore."""
        try:
            with _gone_is_fine():
                os.unlink(self._file_of(key))
        except OSError as error:
            logger.warning("cannot delete corrupt block: %s", error)

    def close(self) -> None:
        """See BlockStore."""
        self._reads.stop()
        self._writes.stop()

    def _probe_reads(self) -> None:
        with _probing(), _gone_is_fine(), os.scandir(self._blocks) as entries:
            next(entries, None)

    def _probe_writes(self) -> None:
        """Writes as many bytes as a block has. On a full medium, evicts old blocks before the next probe."""
        with _probing():
            try:
                self._try_to_write(self._frame_bytes)
            except OSError as error:
                if error.errno in _FULL:
                    self._free_an_eighth()
                raise

    def _try_to_write(self, num_bytes: int) -> None:
        for directory in (self._root, self._blocks):
            os.makedirs(directory, mode=0o700, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._blocks) as file:
            file.write(bytes(num_bytes))

    def _file_of(self, key: BlockHash) -> str:
        name = key.hex()
        return f"{self._blocks}/{name[:2]}/{name}{_SUFFIX}"

    def _write_one(self, key: BlockHash, frame: Buffer) -> None:
        part = key[0] % self._num_parts
        if self._time_to_look(part, len(frame)):
            self._keep_bound(part)
        try:
            self._write_file(key, frame)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._free_an_eighth()  # the medium is fuller than the bound assumes
            self._write_file(key, frame)

    def _write_file(self, key: BlockHash, frame: Buffer) -> None:
        target = self._file_of(key)
        temp = f"{target}.{self._writer}-{next(self._temp_count)}{_TEMP_SUFFIX}"
        try:
            file = _create(temp)
            try:
                written = os.write(file, frame)
                while written < len(frame):
                    written += os.write(file, frame[written:])
            finally:
                os.close(file)  # where a network file system may report that it is full
            os.replace(temp, target)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(temp)
            raise

    def _set_bound(self, max_bytes: int, frame_bytes: int) -> None:
        if frame_bytes > max_bytes:
            raise ConfigError(
                f"max_bytes: {max_bytes} bytes in {self._root} cannot hold a block of {frame_bytes}", param="max_bytes"
            )
        wanted_parts = max(1, max_bytes // (_MIN_BLOCKS_PER_PART * frame_bytes))
        self._num_parts = min(_NUM_DIRECTORIES, 1 << (wanted_parts.bit_length() - 1))
        self._max_bytes = max_bytes // self._num_parts
        self._look_after = max(self._max_bytes // 16, frame_bytes)
        self._keep = self._max_bytes - max(self._max_bytes // 8, frame_bytes)
        self._written = [0] * self._num_parts

    def _time_to_look(self, part: int, num_bytes: int) -> bool:
        """Counts bytes about to be written. Returns True, for one thread, each time that a scan is due."""
        with self._written_lock:
            self._written[part] += num_bytes
            if self._written[part] < self._look_after:
                return False
            self._written[part] = 0
            return True

    def _keep_bound(self, part: int) -> None:
        files = self._find_files(range(part, _NUM_DIRECTORIES, self._num_parts))
        used = sum(file.size for file in files)
        if used > self._max_bytes - self._look_after:
            _delete_least_recent(files, used - self._keep)

    def _free_an_eighth(self) -> None:
        files = self._find_files()
        _delete_least_recent(files, sum(file.size for file in files) // 8)

    def _half_of_available(self) -> int:
        """Returns half of the bytes to which the directory could grow, including what it holds."""
        return (shutil.disk_usage(self._root).free + sum(file.size for file in self._find_files())) // 2

    def _find_files(self, first_bytes: Iterable[int] = range(_NUM_DIRECTORIES)) -> list[_StoredFile]:
        """Finds the block files of all models in this part, and deletes temporary files of dead writers."""
        files = []
        stale_before = time.time() - _STALE_TEMP_S
        names = [f"{first_byte:02x}" for first_byte in first_bytes]
        for directory in (f"{namespace}/{name}" for namespace in _directories(self._root) for name in names):
            for entry in _entries(directory):
                with _gone_is_fine():
                    status = entry.stat(follow_symlinks=False)
                    if entry.name.endswith(_SUFFIX):
                        files.append(_StoredFile(status.st_mtime, status.st_size, entry.path))
                    elif entry.name.endswith(_TEMP_SUFFIX) and status.st_mtime < stale_before:
                        os.unlink(entry.path)
        return files


def _default_path() -> str:
    """Returns a private directory of this user, in memory if possible. Raises ConfigError if another user made it."""
    base = _MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()
    path = f"{base}/baton-{os.getuid()}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, mode=0o700)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(
            f"path: {path} is not owned by this user alone; remove it or name another directory", param="path"
        )
    return f"{path}/kv"


def _mark_used(path: str) -> bool:
    """Returns True if the file is there."""
    try:
        os.utime(path)
    except OSError as error:
        if error.errno in _GONE:
            return False
        raise
    return True


def _read_file(path: str, buffer: Buffer) -> int | None:
    """Fills `buffer` from a file and marks it as used. Returns its size in bytes; None: it is not there."""
    try:
        file = os.open(path, os.O_RDONLY)
        try:
            os.utime(file)
            return _fill(buffer, file)
        finally:
            os.close(file)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise


def _fill(buffer: Buffer, file: int) -> int:
    """Reads from the start of a file. Returns its size in bytes."""
    beyond = bytearray(1)
    filled = os.readv(file, [buffer, beyond])
    while filled < len(buffer) and (count := os.readv(file, [buffer[filled:], beyond])):
        filled += count
    return filled if filled <= len(buffer) else os.fstat(file).st_size


def _create(path: str) -> int:
    """Opens a new file, readable by this user alone, and creates its directory if needed."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
        return os.open(path, flags, mode=0o600)
    except OSError as error:
        if error.errno not in _GONE:
            raise
        os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
        return os.open(path, flags, mode=0o600)


def _directories(path: str) -> list[str]:
    return [entry.path for entry in _entries(path) if entry.is_dir(follow_symlinks=False)]


def _entries(path: str) -> list[os.DirEntry[str]]:
    with _gone_is_fine(), os.scandir(path) as entries:
        return list(entries)
    return []


def _delete_least_recent(files: list[_StoredFile], num_bytes: int) -> None:
    """Deletes files until `num_bytes` are freed or none is left."""
    for file in sorted(files):
        if num_bytes <= 0:
            return
        with _gone_is_fine():
            os.unlink(file.path)
        num_bytes -= file.size


@contextlib.contextmanager
def _gone_is_fine() -> Iterator[None]:
    """Ignores that another process has deleted a file first."""
    try:
        yield
    except OSError as error:
        if error.errno not in _GONE:
            raise


@contextlib.contextmanager
def _guarded(guard: Guard) -> Iterator[None]:
    """Turns errors of the operating system into StoreError, and opens `guard` if they concern the whole medium."""
    guard.check()
    try:
        yield
    except OSError as error:
        problem = f"shared storage failed: {error}"
        if error.errno not in _MEDIUM_FAILS:
            raise StoreError(problem) from error
        guard.open(_reason(error))
        raise StoreUnavailableError(problem) from error


@contextlib.contextmanager
def _probing() -> Iterator[None]:
    """Turns errors of the operating system into those that a guard expects."""
    try:
        yield
    except OSError as error:
        raise StoreError(_reason(error)) from error


def _reason(error: OSError) -> str:
    """Returns the error's text without the file's name, which differs each time."""
    return error.strerror or type(error).__name__

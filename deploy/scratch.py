"""The directory through which the pods of a local cluster share KV blocks."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "baton-"
_LOCK = "owner.lock"  # locked as long as the owner lives


@contextlib.contextmanager
def scratch_directory(parent: Path | None = None) -> Iterator[Path]:
    """A new private directory in memory if the machine has tmpfs; removed at the end.

    Also removes what launchers that were killed left behind: their locks are free.
    """
    parent = parent if parent is not None else shared_memory()
    sweep(parent)
    path = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}{os.getuid()}-", dir=parent))  # under a name that is not swept
    try:
        with (path / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path = path.rename(parent / path.name.removeprefix("."))
            yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def sweep(parent: Path) -> None:
    """Removes the directories of this user in `parent` whose owner is gone."""
    for path in parent.glob(f"{_PREFIX}{os.getuid()}-*"):
        with contextlib.suppress(OSError), (path / _LOCK).open("r+") as lock:  # no lock file: just being removed
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)


def shared_memory() -> Path:
    """Directory in memory, or the one for temporary files where there is none."""
    memory = Path("/dev/shm")  # noqa: S108  (private directories, mode 0700, are made in it)
    return memory if memory.is_dir() and os.access(memory, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())

"""Clusters in the background, each a private directory: $XDG_STATE_HOME/baton/clusters/NAME.

    lock          locked by the launcher while it lives; a cluster whose lock is free is gone, whatever its state says
    state.json    what runs, replaced at each change
    cluster.log   output of the launcher and its processes, and cluster.log.1, the part before

1. `baton up --detach` claims the name: it locks the file, and hands the lock over to the launcher.
2. The launcher records what it starts, and what becomes of that.
3. It removes its state when it ends. State that a killed launcher left behind is removed by the next claim.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import socket
import stat
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import msgspec

from common import __version__
from common.errors import ConfigError

DEFAULT_NAME = "default"
NAME_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
LOG_FILE = "cluster.log"
_LOCK_FILE, _STATE_FILE = "lock", "state.json"
_CLAIM_ATTEMPTS, _CLAIM_INTERVAL_S = 50, 0.02  # those who look at a lock hold it for some microseconds

Phase = Literal["starting", "ready", "stopping"]
PodPhase = Literal["starting", "ready", "restarting"]


class PodState(msgspec.Struct):
    """A process of a cluster."""

    name: str
    role: str
    address: str
    metrics_port: int | None = None
    phase: PodPhase = "starting"
    since: float = 0.0  # of the phase, seconds since 1970
    pid: int | None = None
    restarts: int = 0
    model: str = ""  # of several, by name


class StoreState(msgspec.Struct, frozen=True):
    """The settings of the store through which pods share KV blocks. May hold a password."""

    connector: str
    connector_path: str
    connector_options: dict[str, str | int | float | bool]


class ClusterState(msgspec.Struct):
    """A cluster as its launcher last saw it."""

    name: str
    pid: int
    start_time: int  # of the launcher, in the kernel's ticks; tells it from a later process with its pid
    host: str = ""  # of the launcher
    version: str = __version__
    phase: Phase = "starting"
    started_at: float = 0.0  # seconds since 1970
    model: str = ""  # or names of several, separated by commas
    url: str = ""  # of the router, once it is known
    grpc_address: str = ""
    stop_s: float = 30.0  # within which it ends after SIGTERM
    pods: list[PodState] = []
    store: StoreState | None = None


class StateError(ConfigError):
    """The directory of states cannot be used."""


class Claim:
    """The locked name of a cluster."""

    def __init__(self, name: str, lock: int) -> None:
        """`lock` is a descriptor of the locked file; the lock lasts until the last copy of it is closed."""
        self.name = name
        self.lock = lock
        self.directory = state_directory(name)

    def save(self, state: ClusterState) -> None:
        """Replaces the state. Raises StateError."""
        file, fresh = self.directory / _STATE_FILE, self.directory / f"{_STATE_FILE}.new"
        try:
            with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as opened:
                opened.write(msgspec.json.format(msgspec.json.encode(state)))
            fresh.replace(file)
        except OSError as error:
            raise StateError(f"{file} cannot be written: {error.strerror}") from error

    def clear(self) -> None:
        """Removes the state; the log stays."""
        with contextlib.suppress(FileNotFoundError):
            (self.directory / _STATE_FILE).unlink()


def state_root() -> Path:
    """The private directory of what Baton keeps for this user; created if need be. Raises StateError."""
    home = _state_home()
    if home is None:
        raise StateError("XDG_STATE_HOME: not set, and there is no home directory")
    try:
        home.mkdir(parents=True, exist_ok=True)
        return _private(home / "baton")
    except OSError as error:
        raise StateError(f"XDG_STATE_HOME: cannot keep state there: {error}") from error


def log_file(name: str) -> Path | None:
    """The log of the cluster `name`, which may have ended; None if there is none."""
    home = _state_home()
    if home is None or not re.fullmatch(NAME_PATTERN, name):
        return None
    file = _clusters(home) / name / LOG_FILE
    return file if file.is_file() else None


def _state_home() -> Path | None:
    """None if this user has no home."""
    given = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(given):
        return Path(given)
    try:
        return Path.home() / ".local" / "state"
    except RuntimeError:
        return None


def _clusters(home: Path) -> Path:
    return home / "baton" / "clusters"


def state_directory(name: str) -> Path:
    """The directory of the cluster `name`; created if need be."""
    root = state_root()
    try:
        return _private(_private(root / "clusters") / name)
    except OSError as error:
        raise StateError(f"XDG_STATE_HOME: cannot keep state there: {error}") from error


def claim(name: str) -> Claim:
    """Locks the name for a new cluster. Raises ConfigError if one has it."""
    try:
        lock = os.open(state_directory(name) / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise StateError(f"XDG_STATE_HOME: cannot keep state there: {error}") from error
    for attempt in range(_CLAIM_ATTEMPTS):
        if attempt:
            time.sleep(_CLAIM_INTERVAL_S)
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            claimed = Claim(name, lock)
            claimed.clear()
            return claimed
    os.close(lock)
    raise ConfigError(
        f"--name: a cluster named {name} is running; end it with `baton down --name {name}`, or take another name",
        param="name",
    )


def is_claimed(name: str) -> bool:
    """Whether the launcher of the cluster `name` lives. Raises StateError if that cannot be seen."""
    home = _state_home()
    if home is None or not re.fullmatch(NAME_PATTERN, name):
        return False
    file = _clusters(home) / name / _LOCK_FILE
    try:
        lock = os.open(file, os.O_RDWR)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise StateError(f"{file} cannot be opened: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(lock)
    return False


def is_running(state: ClusterState) -> bool:
    """Whether it still runs; False also if another cluster has its name by now."""
    return is_claimed(state.name) and start_time_of(state.pid) == state.start_time


def running_clusters() -> list[ClusterState]:
    """All that run, by name. Raises StateError if a state cannot be read."""
    home = _state_home()
    if home is None:
        return []
    try:
        names = sorted(path.name for path in _clusters(home).iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise StateError(f"{_clusters(home)} cannot be read: {error.strerror}") from error
    return [state for name in names if (state := find_running(name)) is not None]


def find_running(name: str) -> ClusterState | None:
    """The cluster `name`; None if it does not run. Raises StateError if its state cannot be read."""
    home = _state_home()
    if home is None:
        return None
    file = _clusters(home) / name / _STATE_FILE
    for attempt in range(_CLAIM_ATTEMPTS):  # between claim and first record, and between removal and end
        if attempt:
            time.sleep(_CLAIM_INTERVAL_S)
        if not is_claimed(name):
            return None
        try:
            return msgspec.json.decode(file.read_bytes(), type=ClusterState)
        except FileNotFoundError:
            continue
        except (OSError, msgspec.DecodeError) as error:
            raise StateError(f"{file} cannot be read: {error}") from error
    raise StateError(f"the cluster {name} has no state yet: {file} is missing though its lock is held")


def the_cluster(name: str | None = None) -> ClusterState | None:
    """The cluster `name`, by default the only one, or the one of several that is named "default".

    None if none runs. Raises ConfigError if `name` does not, or if it has to be given.
    """
    if name is not None:
        if (found := find_running(name)) is None:
            raise ConfigError(f"--name: no cluster named {name} is running", param="name")
        return found
    clusters = running_clusters()
    if len(clusters) > 1:
        names = [cluster.name for cluster in clusters]
        if DEFAULT_NAME not in names:
            raise ConfigError(f"several clusters are running, name one: {', '.join(names)}", param="name")
        return clusters[names.index(DEFAULT_NAME)]
    return clusters[0] if clusters else None


def signal_launcher(state: ClusterState, number: signal.Signals) -> bool:
    """Sends a signal to the launcher; False if it is gone. Never to another process that has its pid by now.

    Raises ConfigError if it runs on another machine.
    """
    if state.host != socket.gethostname():
        raise ConfigError(f"the cluster {state.name} runs on {state.host}; end it there")
    try:
        with _process(state.pid) as descriptor:
            if not is_running(state):
                return False
            if descriptor is None:
                os.kill(state.pid, number)
            else:
                signal.pidfd_send_signal(descriptor, number)
    except ProcessLookupError:
        return False
    return True


@contextlib.contextmanager
def _process(pid: int) -> Iterator[int | None]:
    """A descriptor that means this process, and no later one; None where the kernel has no such thing."""
    if sys.platform != "linux":
        yield None
        return
    descriptor = os.pidfd_open(pid)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def start_time_of(pid: int) -> int:
    """Returns the start of a process, in ticks since the machine started; 0 if it is gone, or not on Linux."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])  # the name before it may hold spaces and parentheses


def _private(directory: Path) -> Path:
    """`directory`, made or changed to be for this user only. Raises OSError."""
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{directory} is not a directory")
    if stat.S_IMODE(found.st_mode) != 0o700:
        directory.chmod(0o700)
    return directory

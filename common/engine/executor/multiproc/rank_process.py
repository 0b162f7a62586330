"""Starts the processes of a machine's ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from socket import socket

_COMMAND = [sys.executable, "-m", "common.engine.executor.multiproc.worker_process"]


def start_rank(rank: int, num_ranks: int, calls: socket, inherited: tuple[int, ...]) -> subprocess.Popen[bytes]:
    """Starts a process that reads its RankLaunch from `calls`. The `num_ranks` of this machine share the cores, unless
    that is set."""
    num_threads = max(1, len(os.sched_getaffinity(0)) // num_ranks)
    return subprocess.Popen(  # noqa: S603  # our own module
        [*_COMMAND, f"rank {rank}"],  # for the process list
        stdin=calls.fileno(),
        stdout=2,
        pass_fds=inherited,
        env={"OMP_NUM_THREADS": str(num_threads), **os.environ},
    )


def describe_exit(code: int) -> str:
    """Describes the end of a process with this code."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


class LocalProcess:
    """One of this machine."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid = process.pid

    @property
    def is_stopped(self) -> bool:
        """Whether a signal, such as SIGSTOP, has stopped it."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(") ")[2].startswith("T")
        except FileNotFoundError:  # it has just ended
            return False

    def end(self, timeout_s: float) -> None:
        """Waits until it has ended, and kills it after that time."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def describe_end(self, timeout_s: float) -> str:
        """How it ended, if it does so in time."""
        try:
            return describe_exit(self._process.wait(timeout_s))
        except subprocess.TimeoutExpired:
            return "has closed its socket"

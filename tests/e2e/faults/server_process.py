"""A pod or a router as a process that a test kills, stops and starts again at the same address."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil

from deploy.parent_death import PARENT_PID_VARIABLE
from deploy.pod_process import PodSpec

EXIT_DEADLINE_S = 30.0
KILL_EXIT_CODE = -signal.SIGKILL


class ServerProcess:
    """Owns the process; what it starts itself (a pod's engine) has to end by itself when it is killed."""

    def __init__(self, spec: PodSpec, log: Path, *, within: tuple[str, ...], clock: Path) -> None:
        """`within` is a command that runs the rest of its command line somewhere else; it must not fork.

        `clock` is the file that its wall clock follows, see `clock_hook`.
        """
        self.spec = spec
        self.name = spec.name
        self.address = spec.address
        self._log = log
        self._within = within
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def output(self) -> str:
        """All that it said in all its lives."""
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    @property
    def is_running(self) -> bool:
        """False before the start and after the end."""
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """From the main thread: the kernel takes the process along when the thread that started it ends."""
        assert not self.is_running, f"{self.name} runs already"
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._within, *self.spec.command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self.spec.env, PARENT_PID_VARIABLE: str(os.getpid())},
                process_group=0,
            )

    def processes(self) -> list[psutil.Process]:
        """The server and what it has started, while it runs."""
        if self._process is None or not self.is_running:
            return []
        server = psutil.Process(self._process.pid)
        return [server, *server.children(recursive=True)]

    def send(self, number: signal.Signals) -> None:
        """To all of its processes."""
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def set_clock(self, ahead_s: int) -> None:
        """The wall clock of all of its processes jumps to this much ahead of the true time."""
        changed = self._clock.with_suffix(".new")
        changed.write_text(str(ahead_s))
        changed.replace(self._clock)  # at once: it is read all the time

    def kill(self) -> list[psutil.Process]:
        """SIGKILL to the server alone. Returns all of its processes: what it had started must end by itself."""
        assert self._process is not None
        processes = self.processes()
        self._process.kill()
        return processes

    def wait_gone(self, processes: list[psutil.Process]) -> None:
        """Returns when none of `processes` is left of it."""
        assert self._process is not None
        self._process.wait(EXIT_DEADLINE_S)
        _wait_gone(processes)

    def close(self) -> None:
        """Leaves nothing behind, whatever state it is in. Idempotent."""
        processes = self.processes()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if self._process is not None:
            self._process.wait(EXIT_DEADLINE_S)
        _wait_gone(processes)

    def stop(self) -> int:
        """SIGTERM; returns the exit code, when nothing that it had started is left."""
        assert self._process is not None
        processes = self.processes()
        self._process.terminate()
        exit_code = self._process.wait(EXIT_DEADLINE_S)
        _wait_gone(processes)
        return exit_code

    @property
    def pid(self) -> int:
        """Process id of the server's latest life."""
        assert self._process is not None
        return self._process.pid

    def descriptors(self) -> list[str]:
        """What the server itself has open, one entry per file descriptor."""
        opened = []
        for entry in Path(f"/proc/{self.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                opened.append(str(entry.readlink()))
        return opened


def _wait_gone(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + EXIT_DEADLINE_S
    while alive := [process for process in processes if _runs(process)]:
        assert time.monotonic() < deadline, f"left behind: {alive}"
        time.sleep(0.01)


def _runs(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running()) and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

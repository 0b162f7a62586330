"""A real cluster for a test: `baton up` as a person starts it, and what one can see from outside."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import psutil

from common.pb import pods_pb2, pods_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
_CONFIG = Path(__file__).with_name("cluster.yaml")
START_DEADLINE_S = 150.0
STOP_DEADLINE_S = 60.0
SETTLE_DEADLINE_S = 60.0
_POD_LINE = re.compile(r"^  (\S+)\s+(prefill|decode|router)\s+(\S+).* ready in")
_GRPC_PORT = re.compile(r"grpc :(\d+)")


class Cluster:
    """A running `baton up`. Ports are free ones; all output is kept for the message of a failure.

    Unless a --config says otherwise, prompts go to prefill pods wherever predictions would keep them: handoffs are what
    these tests are about.
    """

    def __init__(self, *options: str, env: dict[str, str] | None = None) -> None:
        self.lines: list[str] = []
        self.addresses: dict[str, str] = {}  # of the pods, by name
        self.url = ""
        self.grpc_address = ""
        self.curl_line = ""
        self.tree: list[psutil.Process] = []  # the launcher and all below it, once it is ready
        self._output: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        config = () if "--config" in options else ("--config", str(_CONFIG))
        self.launcher = subprocess.Popen(
            [sys.executable, "-m", "cli.main", "up", "--port", "0", "--grpc-port", "0", *config, *options],
            cwd=ROOT,
            env={**os.environ, "NO_COLOR": "1", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,
        )
        self._reader = threading.Thread(target=self._read, name="cluster-output")
        self._reader.start()

    def wait_ready(self) -> None:
        """Returns when `baton up` says so."""
        self.wait_line(lambda line: line.startswith("Stop with"), START_DEADLINE_S)
        launcher = psutil.Process(self.launcher.pid)
        self.tree = [launcher, *launcher.children(recursive=True)]

    def wait_line(self, wanted: Callable[[str], bool], deadline_s: float) -> str:
        """The first line, of those not waited for before, that is `wanted`."""
        deadline = time.monotonic() + deadline_s
        while (left := deadline - time.monotonic()) > 0:
            try:
                line = self._output.get(timeout=left)
            except queue.Empty:
                break
            if line is None:
                raise AssertionError(f"baton up ended:\n{self.output}")
            if wanted(line):
                return line
        raise AssertionError(f"not said within {deadline_s} s:\n{self.output}")

    @property
    def output(self) -> str:
        """All that was printed so far."""
        return "\n".join(self.lines)

    def pid_of(self, name: str) -> int:
        """Process id of the pod (or router, or "redis") `name`; the newest if it was restarted."""
        children = psutil.Process(self.launcher.pid).children()
        role = name.partition("-")[0]
        for child in sorted(children, key=lambda child: child.create_time(), reverse=True):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
                command = child.cmdline()
                if name == "redis" and "redis-server" in command[0]:
                    return child.pid
                if command[3:5] == ["serve", role] and (role == "router" or name in command):
                    return child.pid
        raise AssertionError(f"no process of {name}:\n{self.output}")

    def check_integrity(self) -> None:
        """Waits until every pod says that it is sound and holds nothing for anybody."""
        for name, address in self.addresses.items():
            deadline = time.monotonic() + SETTLE_DEADLINE_S
            while True:
                with grpc.insecure_channel(address) as channel:
                    report = pods_pb2_grpc.PodStub(channel).CheckIntegrity(
                        pods_pb2.CheckIntegrityRequest(), timeout=30, wait_for_ready=True
                    )
                assert not report.violations, f"{name}: {list(report.violations)}"
                if report.num_requests == report.num_blocks_in_use == report.num_transfers == 0:
                    break
                assert time.monotonic() < deadline, f"{name} still holds:\n{report}\n{self.output}"
                time.sleep(0.05)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signals the launcher and waits for its end; returns its exit code."""
        if self.launcher.poll() is None:
            self.launcher.send_signal(number)
        try:
            return self.launcher.wait(STOP_DEADLINE_S)
        finally:
            self.close()

    def close(self) -> None:
        """Leaves nothing behind, whatever the test did."""
        survivors = [process for process in self.tree if process.is_running()]
        if self.launcher.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                survivors += psutil.Process(self.launcher.pid).children(recursive=True)
            self.launcher.kill()
            self.launcher.wait(STOP_DEADLINE_S)
        for process in survivors:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._reader.join(STOP_DEADLINE_S)
        if self.launcher.stdout is not None:
            self.launcher.stdout.close()

    def _read(self) -> None:
        assert self.launcher.stdout is not None
        for raw in self.launcher.stdout:
            line = raw.rstrip("\n")
            self.lines.append(line)
            if match := _POD_LINE.match(line):
                name, role, address = match.groups()
                if role == "router":
                    self.url = address
                    port = _GRPC_PORT.search(line)
                    assert port is not None
                    self.grpc_address = f"127.0.0.1:{port[1]}"
                else:
                    self.addresses[name] = address
            if line.strip().startswith("curl "):
                self.curl_line = line.strip()
            self._output.put(line)
        self._output.put(None)


@contextlib.contextmanager
def running_cluster(*options: str, env: dict[str, str] | None = None) -> Iterator[Cluster]:
    """A ready cluster; ended afterwards, and checked that it ends well if the test did."""
    cluster = Cluster(*options, env=env)
    try:
        cluster.wait_ready()
        yield cluster
        if cluster.launcher.poll() is None:
            assert cluster.stop() == 0, cluster.output
    finally:
        cluster.close()


def wait_gone(processes: list[psutil.Process]) -> None:
    """Fails if one of `processes` still runs after a generous time; zombies that nobody reaps are gone."""
    deadline = time.monotonic() + STOP_DEADLINE_S
    while alive := [process for process in processes if _runs(process)]:
        assert time.monotonic() < deadline, f"left behind: {alive}"
        time.sleep(0.05)


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False

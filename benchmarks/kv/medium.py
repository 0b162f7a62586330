"""The media of the connectors: a directory in memory, a redis-server, UCX."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from benchmarks.harness.processes import free_port, orphan_proof
from deploy.parent_death import PARENT_PID_VARIABLE
from deploy.redis_server import find_redis_server

CONNECTORS = ("shared-storage", "redis", "nixl", "nixl-tcp")

_START_ATTEMPTS = 5  # another process may take the free port first
_START_TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Medium:
    """One that is ready to be used."""

    connector: str  # as `kv_store.registry` knows it
    options: Mapping[str, str | int | float | bool]  # of the connector
    env: Mapping[str, str]  # more of it, for the processes that use it
    scratch: Path  # directory in memory; all that is stored below it ends in .kv
    redis: redis.Redis | None = None
    server_pid: int | None = None

    @property
    def server_cpu_s(self) -> float:
        """CPU seconds of the medium's own process so far."""
        if self.server_pid is None:
            return 0.0
        return time.clock_gettime((~self.server_pid << 3) | 2)  # the kernel's number of that process's CPU clock

    def clean(self) -> None:
        """Remove what is stored: what a medium evicts on its own is not what is measured."""
        for file in self.scratch.rglob("*.kv"):
            file.unlink()
        if self.redis is not None:
            self.redis.flushall(asynchronous=False)


@contextmanager
def open_medium(connector: str, scratch: Path) -> Iterator[Medium]:
    """The medium of one of CONNECTORS."""
    if connector == "shared-storage":
        yield Medium(connector, {"path": f"{scratch}/kv", "max_bytes": 1 << 50}, {}, scratch)
    elif connector == "redis":
        with _redis_server(scratch) as (port, pid):
            yield Medium(
                connector,
                {"url": f"redis://127.0.0.1:{port}/0"},
                {},
                scratch,
                redis=redis.Redis(port=port),
                server_pid=pid,
            )
    elif connector == "nixl-tcp":
        yield Medium("nixl", {}, {"UCX_TLS": "tcp,self"}, scratch)
    else:
        yield Medium(connector, {}, {}, scratch)


@contextmanager
def _redis_server(scratch: Path) -> Iterator[tuple[int, int]]:
    """Port and process id of a server that keeps everything in memory and evicts nothing."""
    for _ in range(_START_ATTEMPTS):
        port = free_port()
        command = orphan_proof(str(find_redis_server()), "--bind", "127.0.0.1", "--port", str(port), "--save", "")
        env = {**os.environ, PARENT_PID_VARIABLE: str(os.getpid())}
        process = subprocess.Popen([*command, "--dir", str(scratch)], env=env, stdout=subprocess.DEVNULL)
        try:
            if _is_up(port, process):
                yield port, process.pid
                return
        finally:
            process.kill()
            process.wait()
    raise SystemExit("redis-server did not start")


def _is_up(port: int, process: subprocess.Popen[bytes]) -> bool:
    client = redis.Redis(port=port)
    give_up = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < give_up:
        try:
            return bool(client.ping())
        except redis.ConnectionError:
            time.sleep(0.02)
    return False

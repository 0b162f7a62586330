"""deploy/compose as a running project."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import httpx

from tests.compose.engine import Engine, run
from tests.compose.images import ROOT
from tests.compose.traffic import LOCAL, wait

DIRECTORY = ROOT / "deploy/compose"
UP_DEADLINE_S = 600.0


class Project:
    """The project under one profile."""

    def __init__(self, engine: Engine, compose: Sequence[str], profile: str, env: dict[str, str]) -> None:
        self.engine = engine
        self.profile = profile
        self._compose = compose
        self._env = {**engine.env, "COMPOSE_PROFILES": profile, **env}
        suffix = "" if profile == "shared-storage" else f"-{profile}"
        self.prefill, self.decode = f"prefill{suffix}", f"decode{suffix}"

    def compose(self, *arguments: str, timeout_s: float = UP_DEADLINE_S) -> str:
        """Runs a command of Compose in the project's directory."""
        return run([*self._compose, *arguments], env=self._env, cwd=DIRECTORY, timeout_s=timeout_s)

    def containers(self, service: str) -> list[str]:
        """Ids of the running containers of a service."""
        return self.compose("ps", "-q", service).split()

    def inspect(self, container: str, template: str) -> str:
        """One fact of a container."""
        return self.engine.client("inspect", "--format", template, container).strip()

    def pid(self, container: str) -> int:
        """Process id, on this machine, of the container's first process."""
        return int(self.inspect(container, "{{.State.Pid}}"))

    def wait_healthy(self, *services: str) -> None:
        """Returns once all containers of the services are healthy."""
        for service in services:
            wait(lambda name=service: self._are_healthy(name), f"{service} is healthy", self.logs)

    def _are_healthy(self, service: str) -> bool:
        found = self.containers(service)
        return bool(found) and all(self._is_healthy(each) for each in found)

    def _is_healthy(self, container: str) -> bool:
        answer = self.engine.client("inspect", "--format", "{{.State.Health.Status}}", container, check=False)
        return answer.strip() == "healthy"

    def wait_pods(self, role: str, count: int) -> None:
        """Returns once the router has that many ready pods of a role, and no others."""
        wait(lambda: LOCAL.has_ready(role, count), f"{count} {role} pods are ready", self.logs)

    def logs(self) -> str:
        """The last lines of all containers, and what the router says of its pods."""
        with contextlib.suppress(httpx.HTTPError):
            return httpx.get(f"{LOCAL.url}/health", timeout=5).text + self.compose("logs", "--tail", "40")
        return self.compose("logs", "--tail", "40")

    def query(self, expression: str) -> list[float]:
        """Values of a query in Prometheus."""
        answer = httpx.get("http://127.0.0.1:9090/api/v1/query", params={"query": expression}, timeout=10).json()
        return [float(sample["value"][1]) for sample in answer["data"]["result"]]


def write_config(directory: Path) -> dict[str, str]:
    """Copies the project's settings so that every prompt is handed over. Returns the environment that names them."""
    for file in (DIRECTORY / "config").iterdir():
        text = file.read_text(encoding="utf-8")
        if file.name == "router.yaml":
            text += "  remote_prefill: prefer\n"
        (directory / file.name).write_text(text, encoding="utf-8")
        (directory / file.name).chmod(0o644)
    directory.chmod(0o755)
    return {"BATON_CONFIG": str(directory), "BATON_THREADS": "1"}

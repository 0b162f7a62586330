"""The cluster of deploy/compose under each profile: requests, streams through all kinds of trouble, no remains."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.compose.dashboards import expressions, metric_names
from tests.compose.engine import Engine, run
from tests.compose.images import ROOT
from tests.compose.project import DIRECTORY, Project, write_config
from tests.compose.record import Record
from tests.compose.traffic import Prompt, Traffic, check_requests, prompts, wait

pytestmark = [pytest.mark.compose, pytest.mark.timeout(3600)]

V1, V2 = ("docker-compose",), ("docker", "compose")


@pytest.fixture(scope="module")
def known() -> list[Prompt]:
    return prompts()


@contextlib.contextmanager
def project(
    engine: Engine, record: Record, compose: Sequence[str], profile: str, env: dict[str, str]
) -> Iterator[Project]:
    """A project that is up; taken down afterwards, and checked that nothing of it is left."""
    running = Project(engine, compose, profile, env)
    record.program(" ".join(run([*compose, "version"], env={**os.environ, **env}).splitlines()[0].split()))
    try:
        with record.timed(f"`up` until requests are served, with {' '.join(compose)}", profile):
            running.compose("up", "-d", "--no-build")
        running.wait_healthy("router", "prometheus", "grafana", running.prefill, running.decode)
        yield running
    except BaseException:
        print(running.logs())
        raise
    finally:
        with record.timed("`down`", profile):
            running.compose("down", "--volumes", "--remove-orphans")
    for kind in ("container", "volume"):
        assert engine.client(kind, "ls", "--quiet", *(["--all"] if kind == "container" else [])) == ""
    assert set(engine.client("network", "ls", "--format", "{{.Name}}").split()) == {"bridge", "host", "none"}
    record.step(profile, "containers, volumes and networks left", "0")


@pytest.mark.parametrize(("profile", "compose"), [("shared-storage", V1), ("redis", V2), ("nixl", V2)])
def test_streams_survive_under(
    profile: str,
    compose: Sequence[str],
    engine: Engine,
    docker_config: Path,
    record: Record,
    known: list[Prompt],
    tmp_path: Path,
) -> None:
    env = {"DOCKER_CONFIG": str(docker_config), **write_config(tmp_path)}
    with project(engine, record, compose, profile, env) as running:
        check_requests(known)
        scenario = Scenario(running, record, known)
        scenario.kill(running.prefill)
        scenario.cut_off(running.decode)
        if profile == "redis":
            scenario.restart("redis")
        if profile == "shared-storage":  # what follows is the same for all connectors
            scenario.kill(running.decode)
            scenario.stop(running.prefill)
            scenario.roll(running.prefill)
            scenario.roll(running.decode)
            scenario.scale(running.decode, 3)
            scenario.scale(running.decode, 2)
            scenario.restart_front()
        check_requests(known)
        check_handoffs(running, record)
        check_dashboard(running, record)


class Scenario:
    """Troubles, one after the other, each with streams on their way."""

    def __init__(self, running: Project, record: Record, known: Sequence[Prompt]) -> None:
        self._running = running
        self._record = record
        self._known = known

    @contextlib.contextmanager
    def _streams(self, what: str) -> Iterator[Traffic]:
        traffic = Traffic(self._known)
        with traffic.running():
            yield traffic
        self._record.step(self._running.profile, what, f"{traffic.num_exact} streams, all exact")

    def kill(self, service: str) -> None:
        """Kills the first process of a container, which its restart policy brings back."""
        container = self._running.containers(service)[0]
        before = self._running.pid(container)
        with self._streams(f"a {service} container is killed") as traffic:
            os.kill(before, signal.SIGKILL)
            traffic.wait_progress()
            wait(lambda: self._running.pid(container) not in (0, before), "the container is restarted")
            self._running.wait_healthy(service)
        self._settle()

    def cut_off(self, service: str) -> None:
        """Takes a container off its network, and puts it back."""
        container = self._running.containers(service)[0]
        with self._streams(f"a {service} container is cut off its network") as traffic:
            self._running.engine.client("network", "disconnect", "baton_default", container)
            traffic.wait_progress()
            alias = service.partition("-")[0]
            self._running.engine.client("network", "connect", "--alias", alias, "baton_default", container)
            traffic.wait_progress()
        self._settle()

    def stop(self, service: str) -> None:
        """Stops a container, which drains, and starts it again."""
        container = self._running.containers(service)[0]
        with self._streams(f"a {service} container is stopped") as traffic:
            self._running.engine.client("stop", "--time", "45", container)
            assert self._running.inspect(container, "{{.State.ExitCode}}") == "0"
            traffic.wait_progress()
            self._running.engine.client("start", container)
            self._running.wait_healthy(service)
        self._settle()

    def restart(self, service: str) -> None:
        """Restarts a service under the pods."""
        with self._streams(f"{service} is restarted") as traffic:
            self._running.compose("restart", service)
            traffic.wait_progress()
            self._running.wait_healthy(service)

    def roll(self, service: str) -> None:
        """Replaces all containers of a service, one at a time."""
        with self._streams(f"{service} is rolled"):
            for container in self._running.containers(service):
                self._running.engine.client("stop", "--time", "45", container)
                self._running.engine.client("rm", container)
                self._running.compose("up", "-d", "--no-build", "--no-recreate", "--no-deps", service)
                self._running.wait_healthy(service)
                self._settle()

    def scale(self, service: str, count: int) -> None:
        """Changes the number of containers."""
        with self._streams(f"{service} is scaled to {count}"):
            scaled = ["--scale", f"{service}={count}", service]
            self._running.compose("up", "-d", "--no-build", "--no-recreate", "--no-deps", *scaled)
            self._running.wait_pods(service.partition("-")[0], count)

    def restart_front(self) -> None:
        """Replaces the services of which there is one, which ends the clients' connections."""
        front = ["router", "prometheus", "grafana", *(["redis"] if self._running.profile == "redis" else [])]
        for service in front:
            self._running.compose("up", "-d", "--no-build", "--force-recreate", "--no-deps", service)
            self._running.wait_healthy(service)
        self._settle()
        self._record.step(self._running.profile, f"{', '.join(front)} are replaced", "healthy")

    def _settle(self) -> None:
        for role in ("prefill", "decode"):
            self._running.wait_pods(role, 2)


def check_handoffs(running: Project, record: Record) -> None:
    """Prompts went through the connector, not only to decode pods."""
    expression = 'sum(baton_router_dispatch_total{prefill="remote"})'
    wait(lambda: sum(running.query(expression)) > 0, "Prometheus has remote prefills", running.logs)
    delivered = 'sum(baton_pod_handoff_total{job="decode",outcome="delivered"})'
    wait(lambda: sum(running.query(delivered)) > 0, "Prometheus has handoffs", running.logs)
    record.step(
        running.profile, "handoffs delivered since the pods' last restart", f"{sum(running.query(delivered)):.0f}"
    )


def check_dashboard(running: Project, record: Record) -> None:
    """Grafana has the dashboard and reaches Prometheus, which has a metric for each of its queries."""
    grafana = "http://127.0.0.1:3000"
    assert httpx.get(f"{grafana}/api/health", timeout=10).json()["database"] == "ok"
    assert httpx.get(f"{grafana}/dashboards", timeout=10).json() == ["Baton"]
    up = httpx.get(f"{grafana}/query", params={"query": "up"}, timeout=10).json()["data"]["result"]
    assert {sample["metric"]["job"] for sample in up} == {"router", "prefill", "decode"}
    for expression in expressions():
        running.query(expression)  # which fails if Prometheus cannot parse it
    described = httpx.get("http://127.0.0.1:9090/api/v1/metadata", timeout=10).json()["data"]
    scraped = {name.removesuffix("_total") for name in described}
    missing = {
        name for each in expressions() for name in metric_names(each) if name.removesuffix("_total") not in scraped
    }
    assert not missing, f"queries of the dashboard name metrics that Prometheus does not have: {sorted(missing)}"
    record.step(running.profile, "metrics of the dashboard's queries that Prometheus lacks", "0")


def test_the_lines_of_the_readme(engine: Engine, docker_config: Path, record: Record) -> None:
    (lines,) = re.findall(r"```sh\n(cd deploy/compose\n.*?)```", (ROOT / "README.md").read_text("utf-8"), re.DOTALL)
    env = {**engine.env, "DOCKER_CONFIG": str(docker_config), "BATON_THREADS": "1"}
    try:
        with record.timed("the README's lines", "shared-storage"):
            printed = run(["sh", "-exc", lines], env=env, cwd=ROOT, timeout_s=900)
        assert '"text":" Paris."' in printed
    finally:
        run([*V2, "down", "--volumes"], env=env, cwd=DIRECTORY)
    assert engine.client("container", "ls", "--all", "--quiet") == ""


def test_a_decode_pod_of_two_containers(
    engine: Engine, docker_config: Path, record: Record, known: list[Prompt], tmp_path: Path
) -> None:
    profile = "shared-storage"
    certificates = DIRECTORY / "certs"
    run([str(Path(sys.executable).with_name("baton")), "certs", "--dir", str(certificates)])
    for key in certificates.glob("*.key"):
        key.chmod(0o644)
    env = {"DOCKER_CONFIG": str(docker_config), **write_config(tmp_path)}
    compose = (*V2, "-f", "compose.yaml", "-f", "compose.nodes.yaml")
    try:
        with project(engine, record, compose, profile, env) as running:
            check_requests(known)
            record.step(profile, "requests to a decode pod of two containers", "all exact")
            for service in ("decode-node", "decode"):
                (container,) = running.containers(service)
                before = running.pid(container)
                os.kill(before, signal.SIGKILL)
                wait(lambda each=container, old=before: running.pid(each) not in (0, old), "it is restarted")
                running.wait_pods("decode", 1)
                running.wait_healthy("decode")
                check_requests(known)
                record.step(profile, f"requests after its container {service} was killed", "all exact")
            check_handoffs(running, record)
    finally:
        shutil.rmtree(certificates)


@pytest.mark.parametrize("compose", [V1, V2])
@pytest.mark.parametrize("profile", ["shared-storage", "redis", "nixl", "gpu"])
def test_both_composes_accept_the_file(
    compose: Sequence[str], profile: str, engine: Engine, docker_config: Path
) -> None:
    env = {**engine.env, "DOCKER_CONFIG": str(docker_config), "COMPOSE_PROFILES": profile}
    assert run([*compose, "config", "--quiet"], env=env, cwd=DIRECTORY) == ""

"""The chart's manifests in real containers over each connector: requests, streams while pods are lost, no remains."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.compose.engine import Engine
from tests.compose.images import CPU, ROUTER, STAND_INS
from tests.compose.record import Record
from tests.compose.traffic import Prompt, Traffic, check_requests, prompts, wait
from tests.deploy.chart import nested, render
from tests.kube.release import Pod, Release

pytestmark = [pytest.mark.kube, pytest.mark.timeout(3600)]

DELIVERED = re.compile(r'^baton_pod_handoff_total\{.*outcome="delivered".*\} (\S+)$', re.MULTILINE)
VALUES = {
    "router.replicas": 1,  # so that it alone has all streams
    "prefill.replicas": 2,
    "decode.replicas": 2,
    "router.settings": {"remote_prefill": "prefer"},  # every prompt is handed over
    "redis.image": STAND_INS["redis"],
}


@pytest.fixture(scope="module")
def known() -> list[Prompt]:
    return prompts()


@contextlib.contextmanager
def release(engine: Engine, record: Record, connector: str, directory: Path) -> Iterator[Release]:
    """A release that is ready; taken down afterwards, and checked that nothing of it is left."""
    rendered = render(nested({**VALUES, "connector.type": connector, "redis.bundled": connector == "redis"}))
    running = Release(engine, rendered, directory)
    try:
        with record.timed("`podman kube play` until all probes pass", connector):
            running.install()
        yield running
    except BaseException:
        print(running.logs())
        raise
    finally:
        with record.timed("`podman kube down`", connector):
            running.uninstall()
    assert list(running.remains()) == []
    record.step(connector, "pods, containers, volumes, secrets and networks left", "0")


@pytest.mark.parametrize("connector", ["shared-storage", "redis", "nixl"])
def test_streams_survive_lost_pods(
    connector: str, engine: Engine, record: Record, known: list[Prompt], tmp_path: Path
) -> None:
    with release(engine, record, connector, tmp_path) as running:
        settle(running)
        check_requests(known, running.front)
        with streams(running, record, known, connector, "the process of a prefill pod is killed"):
            kill(running, running.of("prefill")[0])
        with streams(running, record, known, connector, "a decode pod is deleted, and another takes its place"):
            replace(running, running.of("decode")[0])
        with streams(running, record, known, connector, "a decode pod is killed, and another takes its place"):
            replace(running, running.of("decode")[0], at_once=True)
        check_requests(known, running.front)
        count = delivered(running)
        assert count > 0
        record.step(connector, "handoffs that the decode pods of the end have had", f"{count:.0f}")


@contextlib.contextmanager
def streams(running: Release, record: Record, known: list[Prompt], connector: str, what: str) -> Iterator[None]:
    """Streams on their way while something happens; afterwards all pods are ready again."""
    traffic = Traffic(known, running.front)
    with traffic.running():
        yield
        traffic.wait_progress()
        settle(running)
    record.step(connector, what, f"{traffic.num_exact} streams, all exact")


def kill(running: Release, pod: Pod) -> None:
    """Kills the process of a pod, which Podman starts again as the kubelet would."""
    before = running.pid(pod)
    os.kill(before, signal.SIGKILL)
    wait(lambda: running.pid(pod) not in (0, before), f"{pod.name} is started again", running.logs)
    running.wait_ready([pod])


def replace(running: Release, pod: Pod, *, at_once: bool = False) -> None:
    """Ends a pod, with SIGKILL or in its grace period; one with another name and address takes its place."""
    (component,) = (name for name in ("prefill", "decode") if pod in running.of(name))
    assert running.delete(pod, at_once=at_once) == (128 + signal.SIGKILL if at_once else 0)
    running.wait_ready([running.start(f"demo-baton-{component}")])


def settle(running: Release) -> None:
    """Returns once the router has the pods that there are, found by the Services' names, and no others."""
    for role in ("prefill", "decode"):
        count = len(running.of(role))
        wait(lambda each=role, n=count: running.front.has_ready(each, n), f"{count} {role} pods", running.logs)


def delivered(running: Release) -> float:
    """Handoffs that decode pods have counted."""
    pages = [httpx.get(f"http://{pod.endpoint('metrics')}/metrics", timeout=10).text for pod in running.of("decode")]
    return sum(float(value) for page in pages for value in DELIVERED.findall(page))


@pytest.mark.parametrize("image", [ROUTER, CPU])
def test_the_image_that_podman_builds_has_its_health_check(engine: Engine, record: Record, image: str) -> None:
    described = json.loads(engine.client("inspect", image))[0]
    record.image(image, described["Size"] / 1e6, f"user {described['Config']['User']}, base included")
    assert described["Config"]["User"] == "10001:10001"
    assert described["Healthcheck"]["Test"] == ["CMD", "baton", "health", "--service", "liveness"]

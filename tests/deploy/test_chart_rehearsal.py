"""What the chart renders, run as processes: requests through it, and a pod that ends while streams run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.deploy.chart import nested, render
from tests.deploy.load import PROMPTS, Load, complete
from tests.deploy.rehearsal import Rehearsal

MAX_TOKENS = 60


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    values = nested({"router.replicas": 1, "decode.replicas": 2, "router.settings.remote_prefill": "prefer"})
    with Rehearsal(tmp_path_factory.mktemp("release")) as rehearsal:
        rehearsal.install(render(values))
        yield rehearsal


def urls(release: Rehearsal) -> list[str]:
    return [f"http://{address}" for address in release.endpoints("demo-baton-router", "http")]


def test_streams_outlive_the_pod_that_drains(release: Rehearsal) -> None:
    (url,) = urls(release)
    expected = {prompt: complete(url, prompt, MAX_TOKENS) for prompt in PROMPTS}
    leaving, staying = release.of("demo-baton-decode")
    with Load(lambda: [url], expected, MAX_TOKENS, threads=4) as load:
        load.wait_answers(4)
        ending = release.terminate(leaving)
        load.wait_answers(8)
        ending.join()
        load.wait_answers(4)
    assert not load.failures
    assert leaving.process.returncode == 0, leaving.said
    assert release.of("demo-baton-decode") == [staying]


def test_a_router_without_pods_is_alive_and_not_ready(release: Rehearsal) -> None:
    (router,) = release.of("demo-baton-router")
    for pod in release.of("demo-baton-decode"):
        release.terminate(pod).join()
    assert not router.passes("readinessProbe")
    assert router.passes("livenessProbe")
    assert release.endpoints("demo-baton-router", "http") == []

"""What the chart renders, run as processes."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import yaml

from common.demo_model import demo_model_path
from tests.deploy.chart import ROOT, nested, render
from tests.deploy.load import PROMPTS, Load, complete
from tests.deploy.promql import queries, selectors_of
from tests.deploy.rehearsal import START_DEADLINE_S, Rehearsal
from tests.deploy.values import EVERYTHING, values_of
from tests.e2e.fake_hub import MODEL, running_hub
from tests.e2e.faults.fleet import eventually

MAX_TOKENS = 40


@pytest.fixture(scope="module")
def release(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rehearsal]:
    values = nested({"router.replicas": 1, "decode.replicas": 2, "router.settings.remote_prefill": "prefer"})
    with Rehearsal(tmp_path_factory.mktemp("release")) as rehearsal:
        rehearsal.install(render(values))
        yield rehearsal


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_line_of_the_readme(release: Rehearsal) -> None:
    (address,) = release.endpoints("demo-baton-router", "http")
    line = re.search(r"curl -s http://127.0.0.1:8000(?:.*\\\n)*.*", (ROOT / "README.md").read_text())
    assert line is not None
    command = line[0].replace("\\\n", " ").replace("127.0.0.1:8000", address)
    answer = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=60, check=True).stdout
    assert json.loads(answer)["choices"][0]["text"].startswith(" Paris")


def test_streams_outlive_the_pod_that_drains(release: Rehearsal) -> None:
    (address,) = release.endpoints("demo-baton-router", "http")
    url = f"http://{address}"
    expected = {prompt: complete(url, prompt, MAX_TOKENS) for prompt in PROMPTS}
    leaving, staying = release.of("demo-baton-decode")
    eventually(lambda: num_ready(url, "decode") == 2, START_DEADLINE_S, lambda: f"{num_ready(url, 'decode')} are ready")
    with Load(lambda: [url], expected, MAX_TOKENS, num_threads=3) as load:
        load.wait_answers(3)
        ending = release.terminate(leaving)
        load.wait_answers(6)
        ending.join()
        load.wait_answers(3)
    assert not load.failures
    assert leaving.process.returncode == 0, leaving.said
    assert release.of("demo-baton-decode") == [staying]


def num_ready(url: str, role: str) -> int:
    """Number of pods of a role to which the router at `url` would send requests."""
    text = httpx.get(f"{url}/metrics").text
    return len(re.findall(rf'^baton_router_pod_ready\{{[^}}]*role="{role}"[^}}]*\}} 1', text, re.MULTILINE))


def test_autoscaling_asks_for_what_a_scrape_has(release: Rehearsal) -> None:
    scraped = {}
    for component, port in (("router", "http"), ("prefill", "metrics"), ("decode", "metrics")):
        pod = release.of(f"demo-baton-{component}")[0]
        text = httpx.get(f"http://{pod.address}:{pod.port(port)}/metrics").text
        scraped[component] = {line.partition(" ")[0].partition("{")[0] for line in text.splitlines()}
    asked = [query for name, query in queries(render(values_of(EVERYTHING))) if name.startswith("demo")]
    assert len(asked) >= 3
    for query in asked:
        for metric in selectors_of(query):
            matchers = {matcher.name: matcher.value for matcher in metric.matchers.matchers}
            assert metric.name in scraped[matchers["app_kubernetes_io_component"]]


def test_a_router_without_pods_is_alive_and_not_ready(release: Rehearsal) -> None:
    (router,) = release.of("demo-baton-router")
    for pod in release.of("demo-baton-decode"):
        release.terminate(pod).join()
    assert not router.passes("readinessProbe")
    assert router.passes("livenessProbe")
    assert release.endpoints("demo-baton-router", "http") == []


def test_a_model_is_downloaded_to_where_pods_look_for_it(tmp_path: Path) -> None:
    values = values_of({"model": "downloaded volume"})
    values["model"]["hub"]["repository"] = MODEL
    rendered = render(values)
    with running_hub(demo_model_path()) as hub, Rehearsal(tmp_path) as rehearsal:
        volume = rehearsal.run_job(rendered, {"HF_ENDPOINT": hub.url})
        assert hub.requests[f"GET /api/models/{MODEL}/revision/{values['model']['hub']['revision']}"]
    for component in ("router", "decode"):
        config = yaml.safe_load(rendered.named("ConfigMap", f"demo-baton-{component}")["data"]["baton.yaml"])
        directory = volume / Path(config[component]["model"]).relative_to("/models")
        assert (directory / "model.safetensors").read_bytes() == (demo_model_path() / "model.safetensors").read_bytes()

"""`baton up` with models of each kind of layers: the texts of colocated serving over each connector, also when the
prefill pod is killed in the middle."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.architectures.models import write_model
from tests.e2e.cluster import Cluster, running_cluster

# States, windows, states, latents, chunks.
MODELS = ("qwen3_next", "gemma3_text", "jamba", "deepseek_v3", "llama4_text")
PROMPTS = ["Once upon a time", "The capital of France is " * 9, "a b c " * 40, "In the beginning " * 20]
NUM_TOKENS = 48
DEADLINE_S = 120.0

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module", params=MODELS)
def colocated(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, list[str]]]:
    """A model, and its texts without a prefill pod."""
    directory = tmp_path_factory.mktemp(request.param)
    write_model(request.param, directory)
    with running_cluster(str(directory), "--prefill", "0") as cluster:
        yield directory, texts(cluster)


def texts(cluster: Cluster, *, is_prefill_killed: bool = False) -> list[str]:
    """Texts of all prompts, at once."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        answers = [pool.submit(text, cluster, prompt) for prompt in PROMPTS]
        if is_prefill_killed:
            os.kill(cluster.pid_of("prefill-0"), signal.SIGKILL)
        return [answer.result() for answer in answers]


def text(cluster: Cluster, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=DEADLINE_S)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


@pytest.mark.parametrize("connector", ["shared-storage", "redis", "nixl"])
def test_texts_are_those_of_colocated_serving(connector: str, colocated: tuple[Path, list[str]]) -> None:
    directory, expected = colocated
    with running_cluster(str(directory), "--connector", connector) as cluster:
        assert texts(cluster) == expected
        assert texts(cluster, is_prefill_killed=True) == expected
        cluster.check_integrity()

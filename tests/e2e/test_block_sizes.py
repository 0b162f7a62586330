"""Prefill and decode pods with blocks of different sizes, as processes: the answers are those of `transformers`."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.e2e.cluster import running_cluster
from tests.e2e.reference import PROMPTS, greedy_completion

LONG = "Once upon a time there was a fox. " * 12
MAX_TOKENS = 24


@pytest.mark.parametrize(("connector", "prefill", "decode"), [("redis", 16, 64), ("shared-storage", 64, 16)])
def test_answers_are_the_same(tmp_path: Path, connector: str, prefill: int, decode: int) -> None:
    config = tmp_path / "baton.yaml"
    config.write_text(
        f"cluster: {{connector: {connector}}}\n"
        f"prefill: {{block_size: {prefill}}}\n"
        f"decode: {{block_size: {decode}}}\n"
        "router: {remote_prefill: always}\n"
    )
    prompts = [*PROMPTS, LONG, LONG + "It was"]
    with running_cluster("--config", str(config)) as cluster:

        def complete(prompt: str) -> str:
            body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0}
            answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120)
            return str(answer.raise_for_status().json()["choices"][0]["text"])

        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(complete, prompts))
        metrics = httpx.get(f"{cluster.url}/metrics", timeout=60).text
        cluster.check_integrity()
    assert answers == [greedy_completion(prompt, MAX_TOKENS) for prompt in prompts]
    assert "baton_recompute_total{" not in metrics  # every prompt came from the prefill pod
    assert "baton_external_tokens_total 0.0" not in metrics

"""Pods of several ranks in a cluster."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from common.demo_model import DEMO_MODEL_NAME
from tests.e2e.cluster import running_cluster
from tests.e2e.metrics import pod_metrics
from tests.e2e.reference import greedy_completion

MAX_TOKENS = 40
PROMPT = "The sun is a star and the sky is blue. " * 12


@pytest.mark.parametrize(
    ("connector", "num_prefill_ranks", "num_decode_ranks"),
    [pytest.param("shared-storage", 2, 1, marks=pytest.mark.slow), ("shared-storage", 1, 2), ("nixl", 2, 1)],
)
def test_a_handoff_to_a_pod_of_other_ranks(
    tmp_path: Path, connector: str, num_prefill_ranks: int, num_decode_ranks: int
) -> None:
    config = tmp_path / "baton.yaml"
    config.write_text(
        "router: {remote_prefill: prefer}\n"
        f"prefill: {{tensor_parallel_size: {num_prefill_ranks}}}\n"
        f"decode: {{tensor_parallel_size: {num_decode_ranks}}}\n"
    )
    request = {"model": DEMO_MODEL_NAME, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
    with running_cluster("--connector", connector, "--config", str(config)) as cluster:
        response = httpx.post(f"{cluster.url}/v1/completions", json=request, timeout=60)
        assert response.json()["choices"][0]["text"] == greedy_completion(PROMPT, MAX_TOKENS)
        assert pod_metrics(cluster, "decode-0")["prompt_tokens"] == 0  # none computed
        cluster.check_integrity()

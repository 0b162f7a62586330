"""Pods of several ranks in a cluster."""

from __future__ import annotations

import httpx
import pytest

from common.demo_model import DEMO_MODEL_NAME
from tests.e2e.cluster import running_cluster
from tests.e2e.metrics import pod_metrics
from tests.e2e.reference import greedy_completion

MAX_TOKENS = 40
PROMPT = "The sun is a star and the sky is blue. " * 12


TWO_TO_TWO, ONE_TO_TWO, TWO_TO_ONE = (pytest.mark.cell(degrees=degrees) for degrees in ("2 to 2", "1 to 2", "2 to 1"))


@pytest.mark.cell(feature="pods of ranks", connector="{connector}")
@pytest.mark.parametrize(
    ("connector", "options"),
    [
        pytest.param("shared-storage", "--tensor-parallel-size 2", marks=[TWO_TO_TWO, pytest.mark.slow]),
        pytest.param("shared-storage", "--decode-tensor-parallel-size 2", marks=[ONE_TO_TWO, pytest.mark.slow]),
        pytest.param("shared-storage", "--prefill-tensor-parallel-size 2", marks=[TWO_TO_ONE, pytest.mark.slow]),
        pytest.param("nixl", "--prefill-tensor-parallel-size 2", marks=TWO_TO_ONE),
    ],
)
def test_pods_of_ranks_answer_with_the_tokens_of_one(connector: str, options: str) -> None:
    request = {"model": DEMO_MODEL_NAME, "prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}
    with running_cluster("--remote-prefill", "prefer", "--connector", connector, *options.split()) as cluster:
        response = httpx.post(f"{cluster.url}/v1/completions", json=request, timeout=60)
        assert response.json()["choices"][0]["text"] == greedy_completion(PROMPT, MAX_TOKENS)
        assert pod_metrics(cluster, "decode-0")["prompt_tokens"] == 0  # none computed
        cluster.check_integrity()

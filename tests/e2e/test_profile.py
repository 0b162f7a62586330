"""`baton profile` of a pod under load."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from common.demo_model import DEMO_MODEL_NAME
from tests.e2e.cluster import ROOT, Cluster
from tests.e2e.reference import PROMPTS, greedy_completion

NUM_TOKENS = 60
TIMEOUT_S = 120.0


def profile(cluster: Cluster, name: str, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cli.main", "profile", "--pod", name, "--url", cluster.url, "--out", str(out)]
    return subprocess.run(
        [*command, *options], cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )


@pytest.mark.slow
def test_a_trace_of_a_pod_under_load(cluster: Cluster, tmp_path: Path) -> None:
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S)

    def stream(prompt: str) -> str:
        chunks = client.completions.create(
            model=DEMO_MODEL_NAME,
            prompt=prompt,
            max_tokens=NUM_TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        return "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)

    out = tmp_path / "trace.json.gz"
    expected = [greedy_completion(prompt, NUM_TOKENS, ignore_eos=True) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS) + 1) as pool:
        taken = pool.submit(profile, cluster, "decode-0", out, "--seconds", "60", "--steps", "20")
        while not taken.done():
            assert list(pool.map(stream, PROMPTS)) == expected
    result = taken.result()
    assert result.returncode == 0, result.stderr
    assert "20 steps" in result.stdout
    events = json.loads(gzip.decompress(out.read_bytes()))["traceEvents"]
    assert sum(event["name"].startswith("step ") for event in events) == 20
    assert {"aten::empty", "baton::fused_decode_attention"} <= {event["name"] for event in events}


@pytest.mark.slow
def test_an_idle_pod(cluster: Cluster, tmp_path: Path) -> None:
    result = profile(cluster, "prefill-0", tmp_path / "trace.json.gz", "--seconds", "0.5")
    assert result.returncode == 0, result.stderr
    assert "No step ran" in result.stdout

"""`baton up --mtls` with API keys: processes that know each other, and clients that must say who they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest
import yaml
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.security.keys import digest_of
from tests.e2e.cluster import ROOT, Cluster
from tests.e2e.reference import greedy_completion

KEY = "the-key-of-this-test-0123456789"
PROMPT = "The capital of Italy is"


def test_only_who_has_a_key_or_a_certificate_gets_an_answer(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    keys.write_text(yaml.safe_dump([{"name": "a", "hash": f"sha256:{digest_of(KEY).hex()}", "operator": True}]))
    config = tmp_path / "baton.yaml"
    config.write_text(f"router: {{api_keys_file: {keys}, remote_prefill: prefer}}\n")
    cluster = Cluster("--mtls", "--config", str(config))
    try:
        cluster.wait_ready()
        complete = [sys.executable, "-m", "cli.main", "complete", PROMPT, "--url", cluster.url]
        options = {"cwd": ROOT, "capture_output": True, "text": True, "timeout": 60, "check": False}
        command = [*complete, "--temperature", "0", "--max-tokens", "24"]
        known = subprocess.run(command, env={**os.environ, "BATON_API_KEY": KEY}, **options)  # type: ignore[call-overload]
        assert known.stdout == greedy_completion(PROMPT, 24).rstrip("\n") + "\n", known.stderr
        unknown = subprocess.run(command, **options)  # type: ignore[call-overload]
        assert unknown.returncode == 1
        assert "an API key is required" in unknown.stderr
        metrics = httpx.get(f"{cluster.url}/metrics", headers={"x-api-key": KEY}).text
        assert 'prefill="remote"' in metrics
        assert "baton_router_recompute_total{" not in metrics
        for address in cluster.addresses.values():
            with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as caught:
                health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert KEY not in cluster.output
        assert cluster.stop() == 0
    finally:
        cluster.close()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("router: {tls_cert: x}", "router.tls_cert: `baton up` decides this for every process; leave it out"),
        ("decode: {cluster_ca: x}", "decode.cluster_ca: `baton up` decides this for every process; use cluster.mtls"),
        ("router: {api_keys_file: /nowhere}", "--api-keys-file: /nowhere: cannot be read"),
    ],
)
def test_settings_that_cannot_work_are_one_line(setting: str, said: str, tmp_path: Path) -> None:
    config = tmp_path / "baton.yaml"
    config.write_text(f"{setting}\n")
    command = [sys.executable, "-m", "cli.main", "up", "--port", "0", "--grpc-port", "0", "--config", str(config)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert result.returncode == 2
    assert said in result.stderr.splitlines()[-1]

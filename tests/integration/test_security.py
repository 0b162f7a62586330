"""A cluster of real engines under API keys and mutual TLS."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import yaml

from common.rpc.tls import ClusterTlsConfig
from deploy.certificates import make_certificates
from router.security.config import SecurityConfig
from router.security.keys import digest_of
from tests.integration.cluster import BLOCK_SIZE, Cluster, running_cluster

KEYS = {"alice": "alice-distinctive-key-1", "bob": "bob-distinctive-key-2", "operator": "operator-distinctive-key-4"}
WRONG_KEY = "nobodys-distinctive-key-3"
SECRET = "the distinctive words of a prompt"  # of a byte per token, four blocks
SECRET_TOKENS = [211, 212, 213, 214] * 8


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    make_certificates(tmp_path / "certs")
    tls = ClusterTlsConfig(
        cluster_ca=str(tmp_path / "certs/ca.pem"),
        cluster_cert=str(tmp_path / "certs/decode.pem"),
        cluster_key=str(tmp_path / "certs/decode.key"),
    )
    keys = tmp_path / "keys.yaml"
    entries = [{"name": name, "hash": f"sha256:{digest_of(key).hex()}"} for name, key in KEYS.items()]
    keys.write_text(yaml.safe_dump([{**entry, "operator": entry["name"] == "operator"} for entry in entries]))
    security = SecurityConfig(api_keys_file=str(keys))
    async with running_cluster(tmp_path, "llama", tls=tls, security=security) as cluster:
        yield cluster


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=cluster.router.http_url, timeout=60) as client:
        yield client


def asked_by(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def complete(client: httpx.AsyncClient, name: str) -> tuple[str, int]:
    """The text, and how many prompt tokens were cached."""
    body = {"prompt": SECRET, "max_tokens": 4, "temperature": 0}
    response = await client.post("/v1/completions", json=body, headers=asked_by(KEYS[name]))
    assert response.status_code == 200, response.text
    answer = response.json()
    return answer["choices"][0]["text"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_a_prefix_is_found_by_its_own_tenant_only(cluster: Cluster, client: httpx.AsyncClient) -> None:
    text, cached = await complete(client, "alice")
    assert cached == 0
    assert await complete(client, "alice") == (text, len(SECRET) // BLOCK_SIZE * BLOCK_SIZE)
    assert await complete(client, "bob") == (text, 0)
    assert (await complete(client, "bob"))[1] > 0
    assert cluster.recomputed() == 0  # every handoff came over the authenticated channels


async def test_nobody_learns_keys_or_prompts_from_logs_errors_or_metrics(
    cluster: Cluster, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    logging.getLogger("grpc._cython.cygrpc").setLevel(logging.INFO)  # as setup_logging has it
    bodies = [
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 4}),
        ("/v1/completions", {"prompt": SECRET_TOKENS, "max_tokens": 4}),
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 4, "stream": True}),
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 4, "n": 2, "stop": [SECRET]}),
        ("/v1/completions", {"prompt": SECRET, "max_tokens": 10**6}),
        ("/v1/completions", {"prompt": SECRET * 10_000}),
        ("/v1/completions", {"prompt": [*SECRET_TOKENS, 10**6]}),
        ("/v1/completions", {"prompt": {"text": SECRET}}),
        ("/v1/completions", {"prompt": SECRET, "n": SECRET}),
        ("/v1/completions", {"prompt": SECRET, "cache_salt": SECRET * 100}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": SECRET}]}),
        ("/v1/chat/completions", {"messages": [{"role": SECRET}]}),
        ("/v1/route/explain", {"prompt": SECRET}),
    ]
    shown: list[str] = []
    for path, body in bodies:
        for key in (KEYS["alice"], WRONG_KEY):
            response = await client.post(path, json=body, headers=asked_by(key))
            if response.status_code != 200:
                shown.append(response.text)
    for key in (KEYS["bob"], WRONG_KEY):
        broken = json.dumps({"prompt": SECRET})[:-2]
        response = await client.post("/v1/completions", content=broken, headers={"x-api-key": key})
        assert response.status_code in (400, 401)
        shown.append(response.text)
    await break_off(client)
    shown.append((await client.get("/metrics", headers=asked_by(KEYS["operator"]))).text)
    shown += [pod_metrics(cluster), caplog.text]
    assert len(shown) > 20
    for secret in (*KEYS.values(), WRONG_KEY, SECRET, "distinctive", "211, 212, 213", digest_of(KEYS["bob"]).hex()):
        for text in shown:
            assert secret not in text


async def break_off(client: httpx.AsyncClient) -> None:
    """A stream whose client goes away."""
    body = {"prompt": SECRET, "max_tokens": 400, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body, headers=asked_by(KEYS["bob"])) as response:
        assert response.status_code == 200
        async with asyncio.timeout(60):
            await anext(response.aiter_lines())


def pod_metrics(cluster: Cluster) -> str:
    return "\n".join(
        str(metric) for pod in (*cluster.prefill, *cluster.decode) for metric in pod.context.metrics.registry.collect()
    )

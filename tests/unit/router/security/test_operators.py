"""What concerns all tenants is for operators; without keys it is for everyone."""

from __future__ import annotations

import msgspec
import pytest

from router.pods.pod import PodState
from tests.unit.router.security.conftest import ALICE, OPERATOR, bearer

BODY = {"prompt": [600], "max_tokens": 2}
EXPLAINED = [
    ("/v1/route/explain", BODY),
    ("/v1/completions", {**BODY, "dry_run": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hi"}], "dry_run": True}),
]


@pytest.fixture
async def cluster(start_cluster, key_file):
    return await start_cluster(security=key_file.security)


def assert_denied(response):
    error = response.json()["error"]
    assert (response.status_code, error["type"], error["code"]) == (403, "permission_error", "permission_denied")
    assert "operator" in error["message"]


async def test_metrics_are_for_operators(cluster):
    assert (await cluster.client.get("/metrics")).status_code == 401
    assert_denied(await cluster.client.get("/metrics", headers=bearer(ALICE)))
    response = await cluster.client.get("/metrics", headers=bearer(OPERATOR))
    assert response.status_code == 200
    assert 'baton_router_request_errors_total{code="permission_denied"} 1.0' in response.text


async def test_metrics_may_be_opened(start_cluster, key_file):
    cluster = await start_cluster(security=msgspec.structs.replace(key_file.security, metrics_need_key=False))
    for headers in ({}, bearer(ALICE), bearer("wrong")):
        assert (await cluster.client.get("/metrics", headers=headers)).status_code == 200


@pytest.mark.parametrize(("path", "body"), EXPLAINED)
async def test_routes_are_for_operators(cluster, path, body):
    assert_denied(await cluster.client.post(path, json=body, headers=bearer(ALICE)))
    response = await cluster.client.post(path, json=body, headers=bearer(OPERATOR))
    assert response.json()["data"][0]["decode"] == cluster.decode[0].address
    assert cluster.decode[0].submits == []


async def test_health_names_pods_to_operators_only(cluster):
    decode = cluster.decode[0]
    for headers in ({}, bearer(ALICE), bearer("wrong")):
        for path in ("/health", "/readyz"):
            response = await cluster.client.get(path, headers=headers)
            assert (response.status_code, response.json()) == (200, {"status": "ok", "reason": ""})
    response = await cluster.client.get("/health", headers=bearer(OPERATOR))
    assert [pod["address"] for pod in response.json()["pods"]] == [decode.address]
    await decode.stop()
    await cluster.until(lambda: cluster.router.cluster.pods[0].state is PodState.DOWN)
    response = await cluster.client.get("/health", headers=bearer(ALICE))
    assert response.status_code == 503
    assert response.json() == {"status": "unavailable", "reason": "no decode pod is ready"}
    response = await cluster.client.get("/health", headers=bearer(OPERATOR))
    assert response.status_code == 503
    assert response.json()["reason"] == "no decode pod is ready: 1 down"
    assert [(pod["address"], pod["state"]) for pod in response.json()["pods"]] == [(decode.address, "down")]
    assert cluster.metric("baton_router_request_errors_total", code="unauthenticated") == 0, "it needs no key"


async def test_a_key_that_is_an_operators_no_longer(cluster, key_file):
    key_file.write(operator={})
    cluster.router.security.check()
    assert_denied(await cluster.client.get("/metrics", headers=bearer(OPERATOR)))
    assert "pods" not in (await cluster.client.get("/health", headers=bearer(OPERATOR))).json()


async def test_without_keys_everything_is_open(start_cluster):
    cluster = await start_cluster()
    assert (await cluster.client.get("/metrics")).status_code == 200
    assert (await cluster.client.get("/health")).json()["pods"]
    for path, body in EXPLAINED:
        assert (await cluster.client.post(path, json=body)).status_code == 200


async def test_the_description_says_who_may_ask(cluster, start_cluster):
    async def statuses(cluster, path, method):
        document = (await cluster.client.get("/openapi.json")).json()
        return {"401", "403"} & set(document["paths"][path][method]["responses"])

    unguarded = await start_cluster()
    for path, method in (("/metrics", "get"), ("/v1/route/explain", "post"), ("/v1/completions", "post")):
        assert await statuses(cluster, path, method) == {"401", "403"}
        assert await statuses(unguarded, path, method) == set()
    assert await statuses(cluster, "/v1/models", "get") == {"401"}
    assert await statuses(cluster, "/health", "get") == set()

"""Pages of allowed origins may read responses; as delivered, those of none may."""

from __future__ import annotations

import msgspec
import pytest

from router.security.config import SecurityConfig
from tests.unit.router.security.conftest import ALICE, bearer

PAGE = "https://chat.example.org"
PREFLIGHT = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-request-id",
}
BODY = {"prompt": [600], "max_tokens": 2}
PATHS = ["/v1/completions", "/v1/models"]


@pytest.fixture
async def cluster(start_cluster, key_file):
    return await start_cluster(security=msgspec.structs.replace(key_file.security, allowed_origins=[PAGE]))


@pytest.mark.parametrize("path", PATHS)
async def test_a_preflight_needs_no_key(cluster, path):
    response = await cluster.client.options(path, headers=PREFLIGHT)
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "POST" in response.headers["access-control-allow-methods"]
    assert response.headers["access-control-allow-headers"] == PREFLIGHT["access-control-request-headers"]
    refused = await cluster.client.options(path, headers={**PREFLIGHT, "origin": "https://evil.example"})
    assert refused.status_code == 400
    assert "access-control-allow-origin" not in refused.headers


async def test_pages_read_answers_streams_and_errors(cluster):
    headers = {**bearer(ALICE), "origin": PAGE}
    for body in (BODY, {**BODY, "stream": True}, {**BODY, "prompt": "", "n": 0}):
        response = await cluster.client.post("/v1/completions", json=body, headers=headers)
        assert response.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in response.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in response.headers
    response = await cluster.client.post("/v1/completions", json=BODY, headers={"origin": PAGE})
    assert (response.status_code, response.headers["access-control-allow-origin"]) == (401, PAGE)
    response = await cluster.client.post(
        "/v1/completions", json=BODY, headers={**headers, "origin": "https://evil.example"}
    )
    assert "access-control-allow-origin" not in response.headers


async def test_as_delivered_no_page_may(start_cluster):
    cluster = await start_cluster()
    for path in PATHS:
        assert (await cluster.client.options(path, headers=PREFLIGHT)).status_code == 405
    response = await cluster.client.post("/v1/completions", json=BODY, headers={"origin": PAGE})
    assert "access-control-allow-origin" not in response.headers


@pytest.mark.parametrize(
    "origin", ["chat.example.org", "https://chat.example.org/", "HTTPS://chat.example.org", "", "https://a b"]
)
def test_what_is_no_origin_is_refused_by_name(origin):
    with pytest.raises(ValueError, match="--allowed-origins"):
        SecurityConfig(allowed_origins=[origin])

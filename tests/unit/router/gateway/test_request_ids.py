"""Ids by which clients, proxies and the log know a request."""

from __future__ import annotations

import asyncio
import json

import pytest

from router.testing import FakeDecodePod

TEXT = "/v1/completions"
CHAT = "/v1/chat/completions"
BODIES = {TEXT: {"prompt": "Hi"}, CHAT: {"messages": [{"role": "user", "content": "Hi"}]}}


async def ask(cluster, named, path=TEXT, **body):
    headers = {} if named is None else {"x-request-id": named}
    return await cluster.client.post(path, json={**BODIES[path], "max_tokens": 2, **body}, headers=headers)


def pod_ids(cluster):
    """Ids of the requests as the decode pod, and so the log, has them."""
    return [submit.request.request_id.rsplit(".", 2)[0] for submit in cluster.decode[0].submits]


@pytest.mark.parametrize("path", BODIES)
async def test_the_header_names_the_request(start_cluster, path):
    cluster = await start_cluster()
    response = await ask(cluster, "from:a-proxy_1.2", path)
    assert response.headers["x-request-id"] == response.json()["id"] == "from:a-proxy_1.2"
    stream = await ask(cluster, "streamed", path, stream=True)
    first = json.loads(stream.text.partition("\n")[0].removeprefix("data: "))
    assert stream.headers["x-request-id"] == first["id"] == "streamed"
    assert pod_ids(cluster) == ["from:a-proxy_1.2", "streamed"]


async def test_the_body_wins_over_the_header(start_cluster):
    cluster = await start_cluster()
    response = await ask(cluster, "header", request_id="body")
    assert response.headers["x-request-id"] == response.json()["id"] == "body"


@pytest.mark.parametrize(("path", "prefix"), [(TEXT, "cmpl-"), (CHAT, "chatcmpl-")])
async def test_a_request_without_a_name_gets_one(start_cluster, path, prefix):
    cluster = await start_cluster()
    response = await ask(cluster, None, path)
    assert response.headers["x-request-id"] == response.json()["id"]
    assert response.json()["id"].startswith(prefix)


@pytest.mark.parametrize("named", ["a b", "a/b", "x" * 129, "\xe9".encode("latin-1")])
async def test_an_invalid_header_is_refused_and_not_repeated(start_cluster, named):
    cluster = await start_cluster()
    response = await ask(cluster, named)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "x-request-id")
    assert response.headers["x-request-id"].startswith("cmpl-")
    assert cluster.decode[0].submits == []


async def test_an_invalid_id_of_a_body_reaches_no_header(start_cluster):
    cluster = await start_cluster()
    response = await ask(cluster, "good", request_id="a\r\nx-odd: 1")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "request_id")
    assert response.headers["x-request-id"] == "good"


@pytest.mark.parametrize("body", [{"max_tokens": 0}, {"prompt": 5}, {"model": "other"}, {"odd": 1}])
async def test_errors_have_the_id(start_cluster, body):
    cluster = await start_cluster()
    response = await ask(cluster, "mine", **body)
    assert response.status_code in (400, 404)
    assert response.headers["x-request-id"] == "mine"


async def test_requests_that_name_the_same_id_at_once_are_all_served(start_cluster):
    decode = FakeDecodePod()
    decode.allowed = 0
    cluster = await start_cluster([], [decode])
    asked = [asyncio.create_task(ask(cluster, "y" * 128)) for _ in range(2)]
    await decode.until(lambda: len(decode.submits) == 2)
    await decode.allow(None)
    responses = await asyncio.gather(*asked)
    assert [response.status_code for response in responses] == [200, 200]
    ids = sorted(response.headers["x-request-id"] for response in responses)
    assert len(set(ids)) == 2
    assert all(len(each) == 128 for each in ids)
    assert sum(each == "y" * 128 for each in ids) == 1
    again = await ask(cluster, "y" * 128)
    assert again.headers["x-request-id"] == "y" * 128


async def test_pods_know_the_request_by_its_id_in_both_legs_and_the_handoff(pair):
    prefill, decode = pair.prefill[0], pair.decode[0]
    decode.allowed = 0
    asked = asyncio.create_task(ask(pair, "mine"))
    await prefill.until(lambda: prefill.prefills)
    await decode.until(lambda: decode.submits)
    await decode.allow(None)
    assert (await asked).status_code == 200
    (sent,), (submit,) = prefill.prefills, decode.submits
    legs = [sent.request.request_id, sent.transfer_id, submit.request.request_id, submit.remote_prefill.transfer_id]
    assert [name.partition(".")[0] for name in legs] == ["mine"] * 4

"""One line in the log for each request."""

from __future__ import annotations

import json
import logging

import grpc
import pytest

from common.observability.logging import JsonFormatter
from common.pb import inference_pb2, inference_pb2_grpc
from router.testing import FakeDecodePod
from tests.unit.router.dispatching.test_two_legs import BODY, Stream
from tests.unit.router.router_cluster import until
from tests.unit.router.security.conftest import ALICE, bearer, key_file  # noqa: F401  (a fixture)


@pytest.fixture
def lines(caplog):
    """Waits for so many lines, and returns all that were logged."""
    caplog.set_level(logging.INFO, "router.access")

    def logged():
        return [record.getMessage() for record in caplog.records if record.name == "router.access"]

    async def wait_for(count):
        await until(lambda: len(logged()) >= count)
        return logged()

    return wait_for


async def test_an_answer_has_one_line_and_probes_have_none(start_cluster, lines, caplog):
    cluster = await start_cluster()
    await cluster.complete(**BODY, request_id="mine")
    for path in ("/health", "/livez", "/metrics", "/v1/cluster", "/v1/requests"):
        await cluster.client.get(path)
    (line,) = await lines(1)
    assert line.startswith("POST /v1/completions 200 request_id=mine client=127.0.0.1 model=")
    assert f" prompt_tokens={len(BODY['prompt'])} output_tokens=8 ttft_ms=" in line
    assert " total_ms=" in line
    assert "error=" not in line
    (record,) = (record for record in caplog.records if record.name == "router.access")
    as_json = json.loads(JsonFormatter("router").format(record))
    assert {"request_id": "mine", "status": 200, "output_tokens": 8, "message": "request"}.items() <= as_json.items()


async def test_refusals_and_other_pages_with_whose_they_were(start_cluster, key_file, lines):  # noqa: F811
    cluster = await start_cluster(security=key_file.security)
    for path in ("/v1/completions", "/v1/chat/completions"):
        await cluster.client.post(path, json=BODY)
    await cluster.client.get("/v1/models", headers=bearer(ALICE))
    await cluster.client.get("/v1/no%0APOST%20/such%20200", headers=bearer(ALICE))
    await cluster.client.post("/v1/completions", json={**BODY, "model": "other"}, headers=bearer(ALICE))
    found = [line.partition(" total_ms")[0] for line in await lines(5)]
    assert "\n" not in "".join(found)
    assert [line.split(" request_id=")[0] for line in found[:2]] == [
        "POST /v1/completions 401",
        "POST /v1/chat/completions 401",
    ]
    assert found[0].endswith(" client=127.0.0.1 error=unauthenticated")
    assert found[2] == "GET /v1/models 200 tenant=alice client=127.0.0.1"
    assert found[3] == "GET '/v1/no\\nPOST /such 200' 404 tenant=alice client=127.0.0.1"
    assert found[4].startswith("POST /v1/completions 404 ")
    assert found[4].endswith(" tenant=alice client=127.0.0.1 error=not_found")


async def test_a_client_that_leaves(start_cluster, lines):
    decode = FakeDecodePod()
    cluster = await start_cluster([], [decode])
    decode.allowed = 1
    async with Stream(cluster) as stream:
        await stream.next()
    await cluster.until_quiet()
    (line,) = await lines(1)
    assert line.startswith("POST /v1/completions 200 ")
    assert " error=cancelled " in line


async def test_calls_of_grpc(start_cluster, lines):
    cluster = await start_cluster()
    message = inference_pb2.GenerateRequest(request_id="called", tokens=inference_pb2.TokenPrompt(token_ids=[600]))
    message.options.max_tokens = 2
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        await inference_pb2_grpc.InferenceStub(channel).Generate(message, timeout=30)
        message.model = "other"
        with pytest.raises(grpc.aio.AioRpcError):
            await inference_pb2_grpc.InferenceStub(channel).Generate(message, timeout=30)
    line, refused = await lines(2)
    assert refused.startswith("gRPC /baton.v1.Inference/Generate NOT_FOUND client=")
    assert " error=not_found " in refused
    assert line.startswith("gRPC /baton.v1.Inference/Generate OK request_id=called client=")
    assert " output_tokens=2 " in line


async def test_it_can_be_switched_off(start_cluster, lines):
    cluster = await start_cluster(access_log=False)
    await cluster.complete(**BODY)
    assert await lines(0) == []

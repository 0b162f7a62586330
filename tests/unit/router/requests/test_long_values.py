"""A value of a client may be as long as a body; what an error repeats of it may not."""

from __future__ import annotations

import json
import logging

import grpc
import pytest
import pytest_asyncio

from common.pb import inference_pb2, inference_pb2_grpc
from router.requests.bounds import MAX_MODEL_CHARS
from router.testing import FakeDecodePod
from tests.unit.router.router_cluster import run_cluster

LONG = "long " * 200_000
WORD = "x" * 1_000_000
TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
MAX_ANSWER_BYTES = 1200

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster():
    async with run_cluster(decode=[FakeDecodePod()]) as cluster:
        await cluster.until_ready()
        yield cluster


@pytest.fixture(autouse=True)
def short_log(caplog):
    caplog.set_level(logging.DEBUG)
    yield
    for record in caplog.records:
        if not record.name.startswith("http"):  # the client's
            assert len(record.getMessage()) < 2000, record.getMessage()[:100]


@pytest.mark.parametrize("value", [LONG, WORD], ids=["words", "word"])
@pytest.mark.parametrize(
    ("path", "make"),
    [
        (TEXT, lambda value: {"prompt": "Hi", "model": value}),
        (TEXT, lambda value: {"prompt": "Hi", value: 1}),
        (TEXT, lambda value: {"prompt": "Hi", "stream_options": {value: 1}}),
        (TEXT, lambda value: {"prompt": "Hi", "kv_failure_policy": value}),
        (TEXT, lambda value: {"prompt": "Hi", "request_id": value}),
        (TEXT, lambda value: {"prompt": "Hi", "n": value}),
        (TEXT, lambda value: {"prompt": "Hi", "session_id": value}),
        (CHAT, lambda value: {"messages": [{"role": value, "content": 5}]}),
        (CHAT, lambda value: {"messages": [{"role": "user", "content": [{"type": value}]}]}),
        (CHAT, lambda value: {"messages": [{"role": "user", "content": "Hi"}], "chat_template_kwargs": value}),
        (TEXT, lambda value: {"prompt": "Hi", "seed": int("9" * 4000)}),
        (TEXT, lambda value: {"prompt": [int("9" * 4000)]}),
    ],
)
async def test_in_a_body(cluster, path, make, value):
    response = await cluster.client.post(path, json=make(value))
    assert 400 <= response.status_code < 500
    assert len(response.content) < MAX_ANSWER_BYTES
    assert response.json()["error"]["message"]


async def test_the_advice_behind_a_long_value_stays(cluster):
    response = await cluster.post(TEXT, prompt="Hi", model="x" * MAX_MODEL_CHARS)
    message = response.json()["error"]["message"]
    assert message.startswith("the model 'xxx")
    assert message.endswith("x' is not served here; use 'baton-demo'")


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/" + "x" * 30_000, {}),
        ("PUT", "/v1/models/" + "x" * 30_000, {}),
        ("GET", "/v1/models/" + "x" * 30_000, {}),
        ("POST", TEXT, {"content-type": "x" * 30_000}),
        ("POST", TEXT, {"x-slo-ttft-ms": "x" * 30_000}),
        ("POST", TEXT, {"last-event-id": "x" * 30_000}),
        ("POST", TEXT, {"x-session-id": "x" * 30_000}),
    ],
)
async def test_in_a_head(cluster, method, path, headers):
    content = json.dumps({"prompt": "Hi", "stream": True}).encode()
    response = await cluster.client.request(method, path, headers=headers, content=content)
    assert 400 <= response.status_code < 500
    assert len(response.content) < MAX_ANSWER_BYTES
    assert all(len(value) < 300 for value in response.headers.values())


@pytest.mark.parametrize(
    "message",
    [
        inference_pb2.GenerateRequest(text="Hi", model=WORD),
        inference_pb2.GenerateRequest(text="Hi", request_id=WORD),
        inference_pb2.GenerateRequest(text="Hi", cache_salt=WORD),
        inference_pb2.GenerateRequest(text="Hi", options=inference_pb2.GenerateOptions(stop=[WORD])),
    ],
)
async def test_on_grpc(cluster, message):
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceStub(channel).Generate(message, timeout=60)
    assert caught.value.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND)
    assert 0 < len(caught.value.details()) < MAX_ANSWER_BYTES
    assert all(len(value) < MAX_ANSWER_BYTES for _, value in caught.value.trailing_metadata())

"""Faults tell nobody what was asked, or with which key: streams that move, pods that fail, handlers that break."""

from __future__ import annotations

import asyncio
import logging

import grpc
import pytest

from common.pb import inference_pb2, inference_pb2_grpc
from router.dispatching.config import SurvivalConfig
from router.testing import FakeDecodePod, FakePrefillPod
from tests.unit.router.security.conftest import ALICE, OPERATOR, bearer

SECRET = "distinctive words of a prompt that nobody may see"
COMPLETIONS = "/v1/completions"


@pytest.fixture(autouse=True)
def everything_logged(caplog):
    caplog.set_level(logging.DEBUG)
    logging.getLogger("grpc._cython.cygrpc").setLevel(logging.INFO)  # as setup_logging has it


async def assert_untold(cluster, caplog, *shown):
    metrics = await cluster.client.get("/metrics", headers=bearer(OPERATOR))
    assert caplog.records
    for text in (metrics.text, caplog.text, *shown):
        assert "distinctive" not in text
        assert ALICE not in text


async def test_a_stream_that_moves_to_another_pod(start_cluster, key_file, caplog):
    decode = [FakeDecodePod(), FakeDecodePod()]
    cluster = await start_cluster([FakePrefillPod()], decode, security=key_file.security)
    for pod in decode:
        pod.allowed = 2
    body = {"prompt": SECRET, "max_tokens": 4, "stream": True, "temperature": 0}
    async with cluster.client.stream("POST", COMPLETIONS, json=body, headers=bearer(ALICE)) as response:
        lines = response.aiter_lines()
        await anext(lines)
        first, second = sorted(decode, key=lambda pod: not pod.submits)
        await first.stop()
        await second.until(lambda: second.submits)
        await second.allow(None)
        rest = [line async for line in lines]
    assert "data: [DONE]" in rest
    await assert_untold(cluster, caplog)


async def test_pods_that_are_all_lost(start_cluster, key_file, caplog):
    cluster = await start_cluster(security=key_file.security, survival=SurvivalConfig(pod_wait_s=0))
    cluster.decode[0].allowed = 0
    body = {"prompt": SECRET, "max_tokens": 4}
    answer = asyncio.ensure_future(cluster.client.post(COMPLETIONS, json=body, headers=bearer(ALICE)))
    await cluster.decode[0].until(lambda: cluster.decode[0].submits)
    await cluster.decode[0].stop()
    response = await answer
    assert response.status_code == 503
    await assert_untold(cluster, caplog, response.text)


async def test_a_handler_that_breaks(start_cluster, key_file, caplog, monkeypatch):
    cluster = await start_cluster(security=key_file.security)

    async def breaks(draft):
        raise RuntimeError("broken")

    monkeypatch.setattr(cluster.router.service.model(""), "prepare", breaks)
    body = {"prompt": SECRET, "max_tokens": 4}
    response = await cluster.client.post(COMPLETIONS, json=body, headers=bearer(ALICE))
    assert response.status_code == 500
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceStub(channel).Generate(
                inference_pb2.GenerateRequest(text=SECRET), metadata=(("x-api-key", ALICE),), timeout=30
            )
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "Traceback" in caplog.text
    await assert_untold(cluster, caplog, response.text, caught.value.details())

"""A client that goes away: both pods are rid of its request at once, whatever its stage and however it was asked for.

Engines are held at their steps, so that nothing ends by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass

import grpc
import httpx
import pytest

from common.pb import inference_pb2, inference_pb2_grpc
from common.rpc.channel import open_channel
from router.config import RouterConfig
from router.placing.config import RoutingConfig
from router.runtime import Router
from router.serving.config import ServingConfig
from tests.pods import CHUNK, RunningPod, Store, decode_pod, prefill_pod, prompt_of, wait_for

PROMPT = prompt_of(2 * CHUNK + 5)  # three chunks
MAX_TOKENS = 100
PREFER = ServingConfig(routing=RoutingConfig(remote_prefill="prefer"))


@dataclass
class Cluster:
    """One pod of each role, a router, and its clients."""

    prefill: RunningPod
    decode: RunningPod
    router: Router
    http: httpx.AsyncClient
    grpc: inference_pb2_grpc.InferenceStub

    def aborted(self) -> list[float]:
        """Requests that each pod has ended because they were not wanted any more."""
        pods = (self.prefill, self.decode)
        return [pod.metric("baton_pod_request_success_total", finished_reason="abort") for pod in pods]


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    store: Store = {}
    async with prefill_pod(store) as prefill, decode_pod(store) as decode:
        config = RouterConfig(
            port=0, grpc_port=0, shutdown_grace_s=0.0, serving=PREFER,
            prefill=[prefill.address], decode=[decode.address],
        )  # fmt: skip
        async with (
            Router(config).running() as router,
            httpx.AsyncClient(base_url=router.http_url, timeout=60) as client,
            open_channel(router.grpc_address) as channel,
        ):
            await wait_for(lambda: router.cluster.ready_prefill() and router.cluster.ready_decode())
            yield Cluster(prefill, decode, router, client, inference_pb2_grpc.InferenceStub(channel))


async def http_whole(cluster):
    await cluster.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": MAX_TOKENS})


async def http_stream(cluster):
    body = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "stream": True}
    async with cluster.http.stream("POST", "/v1/completions", json=body) as response:
        async for _ in response.aiter_lines():
            pass


def _message():
    return inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenPrompt(token_ids=PROMPT), options=inference_pb2.GenerateOptions(max_tokens=MAX_TOKENS)
    )


async def grpc_whole(cluster):
    await cluster.grpc.Generate(_message(), timeout=60)


async def grpc_stream(cluster):
    async for _ in cluster.grpc.GenerateStream(_message(), timeout=60):
        pass


async def queued(cluster, ask):
    """Behind another prompt on the prefill pod; the decode pod has no blocks for it yet."""
    await cluster.prefill.occupy()
    client = asyncio.create_task(ask(cluster))
    await wait_for(lambda: cluster.prefill.context.admission.num_open >= 2)
    await wait_for(lambda: cluster.decode.context.admission.num_open == 1)
    return client


async def prefilling(cluster, ask):
    """In the second of three chunks."""
    cluster.prefill.gate.shut()
    client = asyncio.create_task(ask(cluster))
    await wait_for(lambda: cluster.prefill.gate.is_holding)
    cluster.prefill.gate.allow(1)
    await wait_for(lambda: len(cluster.prefill.executor.steps) >= 1 and cluster.prefill.gate.is_holding)
    await wait_for(lambda: cluster.decode.context.admission.num_open == 1)
    return client


async def decoding(cluster, ask):
    """In its first step on the decode pod; the client has the first token."""
    cluster.decode.gate.shut()
    client = asyncio.create_task(ask(cluster))
    await wait_for(lambda: cluster.decode.gate.is_holding)
    return client


async def mid_stream(cluster, ask):
    """Some tokens later."""
    client = await decoding(cluster, ask)
    cluster.decode.gate.allow(5)
    await wait_for(lambda: any(len(each._output) >= 5 for each in cluster.router.service._running.values()))
    await wait_for(lambda: cluster.decode.gate.is_holding)
    return client


@pytest.mark.parametrize("ask", [http_whole, http_stream, grpc_whole, grpc_stream])
@pytest.mark.parametrize("stage", [queued, prefilling, decoding, mid_stream])
async def test_both_pods_are_rid_of_it_at_once(cluster, stage, ask):
    client = await stage(cluster, ask)
    is_prefilled = stage in (decoding, mid_stream)
    client.cancel()
    with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        await client
    await wait_for(lambda: cluster.aborted() == [0 if is_prefilled else 1, 1])
    await wait_for(lambda: not cluster.router.service._running)
    await wait_for(lambda: cluster.decode.context.admission.num_open == 0)
    cluster.prefill.gate.open()
    cluster.decode.gate.open()
    if stage is queued:
        await cluster.prefill.other_work
    await cluster.prefill.wait_clean()
    await cluster.decode.wait_clean()
    figures = cluster.router.metrics.registry
    await wait_for(lambda: figures.get_sample_value("baton_router_request_errors_total", {"code": "cancelled"}) == 1)

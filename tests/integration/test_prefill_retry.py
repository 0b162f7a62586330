"""Prefill pods that go away before they answer: another one computes the prompt, and every pod is clean afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import httpx
import pytest

from router.config import RouterConfig
from router.placing.config import RoutingConfig
from router.runtime import Router
from router.serving.config import ServingConfig
from tests.pods import CHUNK, RunningPod, StepGate, Store, decode_pod, prefill_pod, prompt_of, wait_for

PROMPT = prompt_of(2 * CHUNK + 5)  # three chunks
MAX_TOKENS = 8
PREFER = ServingConfig(routing=RoutingConfig(remote_prefill="prefer"))
BODY = {"prompt": PROMPT, "max_tokens": MAX_TOKENS, "temperature": 0}


@dataclass
class Cluster:
    """Two prefill pods, which compute nothing before they may, and a decode pod."""

    prefill: list[RunningPod]
    decode: RunningPod
    router: Router
    client: httpx.AsyncClient

    async def ask(self, **options):
        response = await self.client.post("/v1/completions", json={**BODY, **options})
        assert response.status_code == 200, response.text
        return response.json()

    async def chosen(self) -> tuple[RunningPod, RunningPod]:
        """The prefill pod that has got the request, and the other one."""
        await wait_for(lambda: any(pod.gate.is_holding for pod in self.prefill))
        first, second = self.prefill
        return (first, second) if first.gate.is_holding else (second, first)

    def metric(self, name, **labels):
        return self.router.metrics.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture(params=[True, False], ids=["store", "direct"])
async def cluster(request) -> AsyncIterator[Cluster]:
    store: Store | None = {} if request.param else None
    shut = [StepGate(is_open=False), StepGate(is_open=False)]
    async with (
        prefill_pod(store, gate=shut[0], handoff_quarantine_s=0.5) as first,
        prefill_pod(store, gate=shut[1], handoff_quarantine_s=0.5) as second,
        decode_pod(store) as decode,
    ):
        config = RouterConfig(
            port=0, grpc_port=0, shutdown_grace_s=0.0, serving=PREFER,
            prefill=[first.address, second.address], decode=[decode.address],
        )  # fmt: skip
        async with (
            Router(config).running() as router,
            httpx.AsyncClient(base_url=router.http_url, timeout=60) as client,
        ):
            await wait_for(lambda: len(router.cluster.ready_prefill()) == 2 and router.cluster.ready_decode())
            yield Cluster([first, second], decode, router, client)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("num_chunks", [0, 1])
async def test_a_prefill_pod_dies_while_it_computes(cluster, policy, num_chunks):
    answer = asyncio.create_task(cluster.ask(kv_failure_policy=policy))
    dying, other = await cluster.chosen()
    dying.gate.allow(num_chunks)
    await wait_for(lambda: len(dying.executor.steps) >= num_chunks and dying.gate.is_holding)
    other.gate.open()
    await dying.kill()
    got = (await answer)["choices"][0]
    dying.gate.open()
    whole = (await cluster.ask())["choices"][0]  # with nothing in its way
    assert (got["text"], got["finish_reason"]) == (whole["text"], "length")
    assert (
        cluster.metric("baton_router_prefill_retries_total", reason="unavailable")
        + cluster.metric("baton_router_prefill_retries_total", reason="kv_failed")
        == 1
    )
    assert other.context.stats.latest.num_prompt_tokens > 0
    await cluster.decode.wait_clean()
    await other.wait_clean()

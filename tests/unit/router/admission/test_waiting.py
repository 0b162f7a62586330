"""Requests that wait in a running router, over fake pods."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest

from common.pb import pods_pb2
from common.types import FinishReason
from router.admission.config import AdmissionConfig
from router.dispatching.config import SurvivalConfig
from router.fairness.tenant import Tenant
from router.requests.request import Draft, TokenPrompt
from router.requests.terms import Terms
from router.testing import FakeDecodePod
from tests.unit.router.router_cluster import until

BODY = {"prompt": [1, 2, 3, 4], "max_tokens": 4, "temperature": 0}
ONE = AdmissionConfig(max_inflight=1)


def num_waiting(cluster):
    return sum(
        cluster.metric("baton_router_num_requests_queued", priority=label) for label in ("high", "normal", "low")
    )


@pytest.fixture
async def busy(start_cluster):
    """A cluster of one place, and a request that has it until `decode.allow(None)`."""
    cluster = await start_cluster(admission=ONE)
    decode = cluster.decode[0]
    decode.allowed = 0
    running = asyncio.create_task(cluster.complete(**BODY))
    await decode.until(lambda: decode.submits)
    yield cluster
    await decode.allow(None)
    await running
    await cluster.until_quiet()
    assert num_waiting(cluster) == 0
    assert cluster.router.service.model(None).gate._admission.num_active == 0


async def queued(cluster, **fields):
    """One more request, which waits."""
    before = num_waiting(cluster)
    task = asyncio.create_task(cluster.post("/v1/completions", **{**BODY, **fields}))
    await until(lambda: num_waiting(cluster) > before or task.done())
    assert not task.done(), task.result().text
    return task


def submitted(cluster):
    return [submit.request.request_id.partition(".")[0] for submit in cluster.decode[0].submits[1:]]


async def test_by_priority_then_in_order(busy):
    waiting = [
        await queued(busy, request_id="low", priority=1),
        await queued(busy, request_id="first"),
        await queued(busy, request_id="second"),
        await queued(busy, request_id="high", priority=-1),
    ]
    assert busy.metric("baton_router_num_requests_queued", priority="normal") == 2
    assert busy.decode[0].submits[1:] == []
    await busy.decode[0].allow(None)
    answers = await asyncio.gather(*waiting)
    assert {answer.status_code for answer in answers} == {200}
    assert all(int(answer.headers["x-baton-queue-ms"]) >= 0 for answer in answers)
    assert submitted(busy) == ["high", "first", "second", "low"]
    assert busy.metric("baton_router_request_queue_seconds_count", priority="normal") == 3


async def test_a_client_that_goes_leaves_the_queue(busy):
    gone, stays = await queued(busy, request_id="gone"), await queued(busy, request_id="stays")
    gone.cancel()
    await until(lambda: num_waiting(busy) == 1)
    await busy.decode[0].allow(None)
    assert (await stays).status_code == 200
    assert submitted(busy) == ["stays"]
    assert busy.metric("baton_router_request_errors_total", code="cancelled") == 1


async def test_the_deadline_passes_in_the_queue(busy):
    waiting = await queued(busy, request_id="late")
    late = await busy.client.post("/v1/completions", json=BODY, headers={"x-request-timeout-ms": "50"})
    assert late.status_code == 504
    assert busy.metric("baton_router_request_limits_total", limit="deadline", outcome="missed") == 1
    assert num_waiting(busy) == 1
    await busy.decode[0].allow(None)
    assert (await waiting).status_code == 200
    assert submitted(busy) == ["late"]


async def test_abort_of_one_that_waits(busy):
    waiting = await queued(busy, request_id="unwanted")
    assert busy.router.service.abort("unwanted", Tenant())
    answer = (await waiting).json()
    assert answer["usage"]["completion_tokens"] == 0
    assert num_waiting(busy) == 0
    assert submitted(busy) == []


async def test_what_waits_is_served_while_the_router_drains(busy):
    waiting = await queued(busy, request_id="waits")
    draining = asyncio.create_task(busy.router.service.drain(60))
    await until(lambda: busy.router.service._draining)
    assert (await busy.post("/v1/completions", **BODY)).status_code == 503
    await busy.decode[0].allow(None)
    assert (await waiting).status_code == 200
    await draining


async def test_what_still_waits_after_the_grace_ends_with_an_error(start_cluster):
    cluster = await start_cluster(admission=ONE)
    cluster.decode[0].allowed = 0
    running = asyncio.create_task(cluster.post("/v1/completions", **BODY))
    await cluster.decode[0].until(lambda: cluster.decode[0].submits)
    waiting = await queued(cluster)
    await cluster.router.service.drain(0)
    assert [(await each).status_code for each in (running, waiting)] == [503, 503]
    await cluster.until_quiet()


async def test_when_the_last_pod_goes_what_waits_ends_after_a_while(start_cluster, caplog):
    caplog.set_level(logging.INFO)
    cluster = await start_cluster(admission=ONE, survival=SurvivalConfig(pod_wait_s=0.05))
    cluster.decode[0].allowed = 0
    running = asyncio.create_task(cluster.post("/v1/completions", **BODY))
    await cluster.decode[0].until(lambda: cluster.decode[0].submits)
    waiting = await queued(cluster)
    await cluster.decode[0].stop()
    response = await waiting
    assert response.status_code == 503
    assert "no decode pod is ready: 1 " in response.json()["error"]["message"]
    lost = await running
    assert lost.status_code == 503
    assert lost.json()["error"]["message"].startswith("the decode pod was lost; no decode pod is ready: 1 ")
    for answer in (response, lost):
        assert cluster.decode[0].address not in answer.text
    assert f"decode pod {cluster.decode[0].address}: the decode pod was lost: " in caplog.text


async def test_choices_wait_together(start_cluster):
    cluster = await start_cluster(admission=AdmissionConfig(max_inflight=3))
    decode = cluster.decode[0]
    decode.allowed = 0
    running = [asyncio.create_task(cluster.complete(**BODY)) for _ in range(2)]
    await decode.until(lambda: len(decode.submits) == 2)
    both = await queued(cluster, n=2)
    assert num_waiting(cluster) == 2
    assert len(decode.submits) == 2, "there is a place for one of them"
    await decode.allow(None)
    assert len((await both).json()["choices"]) == 2
    await asyncio.gather(*running)
    refused = await cluster.post("/v1/completions", **BODY, n=4)
    assert refused.status_code == 400
    assert "max_inflight" in refused.json()["error"]["message"]


async def test_full_pods_get_no_more(start_cluster):
    full = pods_pb2.PodStats(num_running=512, num_free_blocks=100, num_blocks=100)
    decode = FakeDecodePod()
    cluster = await start_cluster([], [decode])
    await decode.set_stats(full)
    await until(lambda: cluster.router.cluster.decode_pods[0].engines[0].load.current().num_requests == 512)
    waiting = await queued(cluster)
    assert decode.submits == []
    await decode.set_stats(pods_pb2.PodStats(num_running=511, num_free_blocks=100, num_blocks=100))
    assert (await waiting).status_code == 200


async def test_what_the_pods_cannot_keep_is_refused_at_once(start_cluster):
    """Steps take a second; then there is a queue of prompts as well."""
    decode = FakeDecodePod()
    cluster = await start_cluster([], [decode])
    for _ in range(20):
        cluster.router.cluster.models[0].decode_table.step_times.observe(1.0, 100.0)

    async def ask(**headers):
        headers = {f"x-slo-{name}-ms": str(value) for name, value in headers.items()}
        return await cluster.client.post("/v1/completions", json=BODY, headers=headers)

    never = await ask(ttft=10)
    assert never.status_code == 503
    assert never.json()["error"]["param"] == "x-slo-ttft-ms"
    assert "retry-after" not in never.headers
    assert never.headers["x-should-retry"] == "false"
    assert cluster.metric("baton_router_request_refusals_total", reason="ttft") == 1
    assert (await ask(ttft=60_000, itl=60_000)).status_code == 200
    assert cluster.metric("baton_router_request_limits_total", limit="ttft", outcome="met") == 1
    assert cluster.metric("baton_router_request_limits_total", limit="itl", outcome="met") == 1
    await decode.set_stats(
        pods_pb2.PodStats(num_queued_tokens=2000, num_running=1, num_free_blocks=100, num_blocks=100)
    )
    await until(lambda: cluster.router.cluster.decode_pods[0].engines[0].load.current().queued_tokens == 2000)
    later = await ask(ttft=3_000)
    assert later.status_code == 429, later.text
    assert int(later.headers["retry-after"]) > 1
    assert "x-should-retry" not in later.headers
    assert len(decode.submits) == 1


async def test_a_request_that_is_admitted_at_once_goes_where_its_admission_foresaw(start_cluster, monkeypatch):
    """It is planned once, with limits and without; one that waited is planned again at its turn."""
    cluster = await start_cluster(admission=ONE)
    planner, planned = cluster.router.service.model(None).dispatcher.planner, []
    plan = planner.plan
    monkeypatch.setattr(planner, "plan", lambda query, now: planned.append(query) or plan(query, now))
    for headers in ({}, {"x-slo-ttft-ms": "60000"}):
        planned.clear()
        assert (await cluster.client.post("/v1/completions", json=BODY, headers=headers)).status_code == 200
        assert len(planned) == 1
    decode = cluster.decode[0]
    decode.allowed = 0
    running = asyncio.create_task(cluster.complete(**BODY))
    await decode.until(lambda: len(decode.submits) == 3)
    waiting = await queued(cluster)
    planned.clear()
    await decode.allow(None)
    await asyncio.gather(running, waiting)
    assert len(planned) == 1


@pytest.mark.parametrize("value", ["", "0", "-5", "nan", "inf", "soon", "1e999", "1_000", "0x10"])
@pytest.mark.parametrize("header", ["x-request-timeout-ms", "x-slo-ttft-ms", "x-slo-itl-ms"])
async def test_a_limit_that_is_none_is_named(pair, header, value):
    response = await pair.client.post("/v1/completions", json=BODY, headers={header: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == header


async def test_tenants_share(busy):
    """Requests of one tenant that came before do not all go before another's."""
    service = busy.router.service
    served = []

    async def serve(name, number):
        draft = Draft(
            request_id=f"{name}-{number}", model=None, prompt=TokenPrompt([1, 2, 3]), prompt_param="prompt",
            sampling={}, max_tokens=2, default_max_tokens=None, seed=1,
            terms=Terms(tenant=Tenant(name)), arrived_at=asyncio.get_running_loop().time(),
        )  # fmt: skip
        request = await service.model("").prepare(draft)
        async with service.run([request]) as run:
            served.append(name)
            async for delta in run.generations[0]:
                assert delta.finish_reason is not FinishReason.ERROR

    tasks = []
    for name, number in [*(("flood", number) for number in range(6)), ("late", 0), ("late", 1)]:
        tasks.append(asyncio.create_task(serve(name, number)))
        await until(lambda: num_waiting(busy) == len(tasks))
    await busy.decode[0].allow(None)
    await asyncio.gather(*tasks)
    assert served.index("late") <= 1
    assert served[:4].count("late") == 2


async def test_nobody_waits_for_nothing(start_cluster):
    """Fifty at once through one place: each is served, one after the other."""
    cluster = await start_cluster(admission=AdmissionConfig(max_inflight=1))
    async with httpx.AsyncClient(base_url=cluster.router.http_url, timeout=60) as client:
        answers = await asyncio.gather(*(client.post("/v1/completions", json=BODY) for _ in range(50)))
    assert {answer.status_code for answer in answers} == {200}
    await cluster.until_quiet()

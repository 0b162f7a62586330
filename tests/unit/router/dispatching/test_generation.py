"""One request under way: its figures, where it goes when a pod fails it, and how its iteration ends."""

from __future__ import annotations

import asyncio
import logging
import time
from unittest.mock import ANY

import pytest

from common.errors import InvalidRequestError, OverloadedError, UnavailableError
from common.pb import pods_pb2, pods_pb2_grpc
from common.types import FinishReason
from router.dispatching.config import SurvivalConfig
from router.dispatching.generation import Generation
from router.fairness.tenant import Tenant
from router.pods.config import HealthConfig
from router.testing import FakeDecodePod, FakePrefillPod, _PrefillServicer
from tests.fuzz.lying_pods import LyingDecodePod, LyingPrefillPod
from tests.unit.router.dispatching.test_survival import on_a_draining_pod, started
from tests.unit.router.dispatching.test_two_legs import BODY, PROMPT, TOKENS, Stream, _draft, text  # noqa: F401  (a fixture)
from tests.unit.router.router_cluster import until


async def test_each_figure_of_an_answer_is_counted_once(start_cluster):
    prefill, decode = LyingPrefillPod(), LyingDecodePod()
    report = pods_pb2.DecodeReport(
        num_cached_tokens=1, num_external_tokens=2, recompute_reason="block_missing", queue_s=0.25, handoff_s=0.5
    )

    def report_always(delta):
        delta.report.CopyFrom(report)

    def say_what_it_took(response):
        response.num_cached_tokens = 1
        response.timing.queue_s, response.timing.compute_s = 1.0, 2.0

    decode.lie, decode.lies_at, prefill.lie = report_always, ANY, say_what_it_took
    cluster = await start_cluster([prefill], [decode])
    before = time.monotonic()
    decode.allowed = 0  # the first token is prefill's, so that each of its figures is there
    async with Stream(cluster) as stream:
        await stream.next()
        await decode.allow(None)
        await stream.rest()
    elapsed = time.monotonic() - before

    def phase(name):
        return tuple(
            cluster.metric(f"baton_router_first_token_phase_seconds_{of}", phase=name) for of in ("count", "sum")
        )

    assert {name: phase(name) for name in ("queue", "prefill", "handoff", "decode_queue")} == {
        "queue": (1, 1.0),
        "prefill": (1, 2.0),
        "handoff": (1, 0.5),
        "decode_queue": (1, 0.25),
    }
    assert cluster.metric("baton_router_prefix_cached_tokens_total") == 2  # one on each pod
    assert cluster.metric("baton_router_external_tokens_total") == 2
    assert cluster.metric("baton_router_recompute_total", reason="block_missing") == 1
    assert cluster.metric("baton_router_request_success_total", finished_reason="length") == 1
    assert cluster.metric("baton_router_generation_tokens_total") == 8
    assert cluster.metric("baton_router_request_generation_tokens_sum") == 8
    assert cluster.metric("baton_router_inter_token_latency_seconds_count") == 7
    assert 0 < cluster.metric("baton_router_time_to_first_token_seconds_sum") < elapsed
    assert 0 < cluster.metric("baton_router_e2e_request_latency_seconds_sum") < elapsed
    gaps = cluster.metric("baton_router_inter_token_latency_seconds_sum")
    assert 0 < gaps < elapsed
    assert cluster.metric("baton_router_time_per_output_token_seconds_sum") * 7 == pytest.approx(gaps)


async def test_two_tokens_have_one_gap(start_cluster):
    cluster = await start_cluster()
    usage = (await cluster.complete(**{**BODY, "max_tokens": 2}))["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    assert cluster.metric("baton_router_time_per_output_token_seconds_count") == 1


async def test_the_prefill_call_has_the_deadline_of_the_request(start_cluster):
    remaining = []

    class Servicer(_PrefillServicer):
        async def Prefill(self, request, context):  # noqa: N802
            remaining.append(context.time_remaining())
            return await super().Prefill(request, context)

    class Pod(FakePrefillPod):
        def add_service(self, server):
            pods_pb2_grpc.add_PrefillServicer_to_server(Servicer(self), server)

    cluster = await start_cluster([Pod()], request_timeout_s=50)
    await cluster.complete(**BODY)
    assert 0 < remaining[0] <= 50


async def test_the_pod_that_failed_a_request_is_avoided(start_cluster, text):  # noqa: F811
    """Although it promises to be faster."""
    failing, busy = FakeDecodePod(), FakeDecodePod()
    failing.failure = UnavailableError("the engine is restarting")
    cluster = await start_cluster([], [failing, busy], decode_policy="least_loaded")
    await busy.set_stats(pods_pb2.PodStats(num_running=50, num_waiting=50, num_queued_tokens=50_000, num_blocks=100))
    pod = cluster.router.cluster.by_address[busy.address]
    await until(lambda: pod.engines[0].load.current().num_requests == 100)
    assert (await cluster.complete(**BODY))["choices"][0]["text"] == text()
    assert [len(failing.submits), len(busy.submits)] == [1, 1]


def beyond_the_vocabulary(delta):
    delta.token_ids[0] = 2048


def after_a_gap(delta):
    delta.start_index += 1


def more_right_drafts_than_tokens(delta):
    delta.num_verified_drafts = delta.num_accepted_drafts = 2


@pytest.mark.parametrize("lie", [beyond_the_vocabulary, after_a_gap, more_right_drafts_than_tokens])
async def test_a_decode_pod_with_two_invalid_answers_is_ejected(start_cluster, text, lie):  # noqa: F811
    bad, good = LyingDecodePod(), FakeDecodePod()
    bad.lie = lie
    health = HealthConfig(canary_interval_s=0, eject_base_s=3600)
    cluster = await start_cluster([], [bad, good], pod_health=health, decode_policy="round_robin")
    for number in range(4):
        body = await cluster.complete(prompt=[number, *PROMPT[1:]], max_tokens=8)
        assert body["choices"][0]["text"] == text()
    labels = {"role": "decode", "address": bad.address}
    assert cluster.metric("baton_router_pod_ejections_total", reason="invalid", **labels) == 1


async def test_the_only_pod_is_asked_once_if_it_is_full(start_cluster):
    cluster = await start_cluster()
    (decode,) = cluster.decode
    decode.failure = OverloadedError("queue is full")
    assert (await cluster.post("/v1/completions", **BODY)).status_code == 429
    assert len(decode.submits) == 1


async def test_only_streams_of_the_pod_that_drains_leave_it(start_cluster):
    """And of those only what has begun."""
    cluster, stream, draining, other = await on_a_draining_pod(start_cluster, SurvivalConfig())
    generations = cluster.router.service._running
    (moving,) = generations.values()
    staying = (await started(cluster, other, 1))[0]
    pods = cluster.router.cluster.by_address
    for generation in list(generations.values()):
        generation.leave(pods[draining.address])
    await until(lambda: moving._legs.decode.pod is pods[other.address])
    await other.allow(None)
    await asyncio.gather(staying, stream.rest())
    await stream.__aexit__(None, None, None)
    assert len(other.submits) == 2
    assert other.aborts == []


async def test_what_has_no_token_stays_on_a_pod_that_drains(start_cluster):
    cluster = await start_cluster([], [FakeDecodePod(), FakeDecodePod()])
    for decode in cluster.decode:
        decode.allowed = 0
    answer = asyncio.create_task(cluster.complete(**BODY))
    await until(lambda: any(decode.submits for decode in cluster.decode))
    (generation,) = cluster.router.service._running.values()
    generation.leave(generation._legs.decode.pod)
    assert generation._recovery is None
    for decode in cluster.decode:
        await decode.allow(None)
    await answer


async def test_a_moved_stream_holds_its_place_in_line_until_it_has_a_token(start_cluster, text):  # noqa: F811
    cluster, stream, _, other = await on_a_draining_pod(start_cluster, SurvivalConfig(migrate_on_drain_s=0))
    await other.until(lambda: other.submits)
    assert cluster.metric("baton_router_num_migrations_running") == 1
    await other.allow(4)
    while stream.text != text(4):
        await stream.next()
    assert cluster.metric("baton_router_num_migrations_running") == 0
    await other.allow(None)
    await stream.rest()
    await stream.__aexit__(None, None, None)


async def test_a_moved_stream_that_finds_no_room_stands_in_line_again(start_cluster, text):  # noqa: F811
    cluster = await start_cluster([], [FakeDecodePod(), FakeDecodePod()])
    for decode in cluster.decode:
        decode.allowed = 3
    async with Stream(cluster) as stream:
        while stream.text != text(3):  # then the pod that it moves to has no token for it
            await stream.next()
        origin, other = cluster.decode if cluster.decode[0].submits else reversed(cluster.decode)
        other.failure = OverloadedError("full")
        await other.allow(4)
        (generation,) = cluster.router.service._running.values()
        generation.leave(cluster.router.cluster.by_address[origin.address])
        await until(lambda: len(origin.submits) + len(other.submits) == 3)  # refused by the other one
        assert cluster.metric("baton_router_num_migrations_running") == 1
        other.failure = None
        for decode in cluster.decode:
            await decode.allow(None)
        await stream.rest()


@pytest.mark.parametrize("how", ["served", "aborted", "failed"])
async def test_iteration_ends_after_the_end(start_cluster, how):
    cluster = await start_cluster()
    (decode,) = cluster.decode
    decode.allowed = None if how == "served" else 0
    service = cluster.router.service
    request = await service.model("").prepare(_draft("a"))
    async with service.run([request]) as run:
        generation = run.generations[0].generation
        if how == "failed":
            generation.fail(UnavailableError("no"))
            with pytest.raises(UnavailableError):
                await anext(generation)
        else:
            if how == "aborted":
                assert service.abort("a", Tenant())
            async with asyncio.timeout(30):
                deltas = [delta async for delta in generation]
            assert [token for delta in deltas for token in delta.token_ids] == (TOKENS if how == "served" else [])
            reason = FinishReason.LENGTH if how == "served" else FinishReason.ABORT
            assert [delta.finish_reason for delta in deltas if delta.finish_reason is not None] == [reason]
        timing = generation.timing
    assert (timing.is_served, timing.is_failed) == (how == "served", how == "failed")
    assert timing.num_tokens == (8 if how == "served" else 0)
    if how == "served":
        assert request.arrived_at < timing.first_token_at < timing.last_token_at
    else:
        assert timing.first_token_at == timing.last_token_at == 0


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (InvalidRequestError("no"), logging.INFO),
        (OverloadedError("no"), logging.INFO),
        (UnavailableError("no"), logging.WARNING),
    ],
)
async def test_what_the_client_did_wrong_is_no_warning(start_cluster, caplog, error, level):
    caplog.set_level(logging.INFO, "router.dispatching")
    cluster = await start_cluster()
    cluster.decode[0].allowed = 0
    service = cluster.router.service
    async with service.run([await service.model("").prepare(_draft("a"))]) as run:
        run.generations[0].generation.fail(error)
    (record,) = (record for record in caplog.records if ": failed: " in record.message)
    assert record.levelno == level


async def test_a_constraint_that_a_pod_refuses_is_no_warning(pair, caplog):
    caplog.set_level(logging.INFO, "router.dispatching")
    pair.decode[0].recomputes_only = True
    pair.prefill[0].failure = InvalidRequestError("no", param="structured_outputs")
    response = await pair.post("/v1/completions", prompt="x", max_tokens=1, structured_outputs={"regex": "a"})
    assert response.status_code == 400
    assert [record.levelno for record in caplog.records if ": prefill pod " in record.message] == [logging.INFO]


async def test_a_fault_of_ours_ends_the_request_and_is_logged(pair, caplog, monkeypatch):
    monkeypatch.setattr(Generation, "_on_prefill_response", lambda *_: 1 / 0)
    pair.decode[0].allowed = 0
    response = await pair.post("/v1/completions", **BODY)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "internal error; the router's log has the details"
    assert "ZeroDivisionError" in caplog.text
    await pair.until_quiet()

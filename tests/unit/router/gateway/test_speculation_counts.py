"""Drafts that pods verified for an answer: in its usage and its timeline, over all pods, choices and connections."""

from __future__ import annotations

from unittest.mock import ANY

from baton import AsyncClient
from common.pb import pods_pb2
from tests.fuzz.lying_pods import LyingDecodePod
from tests.unit.router.dispatching.test_two_legs import BODY
from tests.unit.router.gateway.test_resume_http import COMPLETIONS, Connection, ask, read_to
from tests.unit.router.router_cluster import until

DETAILS = "completion_tokens_details"
STREAMED = {**BODY, "stream_options": {"include_usage": True}}


class DraftingPod(LyingDecodePod):
    """Verifies three drafts at each step, of which one is right."""

    lies_at = ANY

    def lie(self, delta: pods_pb2.TokenDelta) -> None:
        delta.num_verified_drafts, delta.num_accepted_drafts = 3, 1


async def drafts_of_newest(cluster):
    request = (await cluster.client.get("/v1/requests?limit=1")).json()["data"][0]
    return request["num_verified_drafts"], request["num_accepted_drafts"]


async def test_an_answer_has_those_of_all_choices(start_cluster):
    cluster = await start_cluster([], [DraftingPod()])
    body = await cluster.complete(**BODY, n=2)
    assert body["usage"][DETAILS] == {"accepted_prediction_tokens": 16, "rejected_prediction_tokens": 32}
    assert body["usage"]["completion_tokens"] == 16, "wrong drafts are none"
    assert await drafts_of_newest(cluster) == (24, 8), "of one choice"
    reports = {"include_usage": True, "continuous_usage_stats": True}
    *_, choice, last, _ = await ask(cluster.client, COMPLETIONS, {**BODY, "n": 2, "stream_options": reports})
    assert last.json["usage"] == body["usage"]
    assert choice.json["usage"][DETAILS]["accepted_prediction_tokens"] == 8, "of one choice"
    async with AsyncClient(cluster.router.grpc_address) as client:
        usage = (await client.generate(BODY["prompt"], n=2, max_tokens=8)).usage
    assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (16, 32)


async def test_without_drafts_nothing_is_said(start_cluster):
    cluster = await start_cluster()
    assert DETAILS not in (await cluster.complete(**BODY))["usage"]
    assert await drafts_of_newest(cluster) == (0, 0)
    async with AsyncClient(cluster.router.grpc_address) as client:
        usage = (await client.generate(BODY["prompt"], max_tokens=8)).usage
    assert (usage.accepted_prediction_tokens, usage.rejected_prediction_tokens) == (None, None)


async def test_those_of_a_pod_that_died_count(start_cluster):
    pods = [DraftingPod(), DraftingPod()]
    for pod in pods:
        pod.allowed = 3
    cluster = await start_cluster([], pods)
    async with Connection(cluster.client, COMPLETIONS, STREAMED) as connection:
        await read_to(connection, 3)
        first, second = sorted(pods, key=lambda pod: not pod.submits)
        await first.stop()
        await second.allow(None)
        *_, last, _ = await connection.rest()
    assert second.submits, "the answer went on there"
    assert last.json["usage"][DETAILS] == {"accepted_prediction_tokens": 8, "rejected_prediction_tokens": 16}
    assert await drafts_of_newest(cluster) == (24, 8)


async def test_those_before_a_stream_was_resumed_count(start_cluster):
    pod = DraftingPod()
    cluster = await start_cluster([], [pod])
    pod.allowed = 1
    async with Connection(cluster.client, COMPLETIONS, STREAMED) as connection:
        (event,) = await read_to(connection, 1)
        await pod.allow(5)
        (generation,) = cluster.router.service._running.values()
        await until(lambda: generation.speculation == (15, 5))
    await until(lambda: cluster.metric("baton_router_num_streams_kept") == 1)
    await pod.allow(None)
    *_, last, _ = await ask(cluster.client, COMPLETIONS, STREAMED, event.id)
    assert last.json["usage"][DETAILS] == {"accepted_prediction_tokens": 8, "rejected_prediction_tokens": 16}
    assert await drafts_of_newest(cluster) == (9, 3), "of this connection"

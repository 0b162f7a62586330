"""Requests that outlive their pods: another prefill pod, the line of migrations, pods without room."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from common.errors import BatonError, OverloadedError, UnavailableError
from common.pb import pods_pb2
from router.dispatching.config import SurvivalConfig
from router.dispatching.migrations import MAX_CONCURRENT_MIGRATIONS
from router.fairness.tenant import Tenant
from router.pods.pod import PodState
from router.pods.session import DecodeSession
from router.testing import FakeDecodePod, FakePrefillPod
from tests.unit.router.dispatching.test_two_legs import BODY, TOKENS, Stream, text  # noqa: F401  (a fixture)
from tests.unit.router.router_cluster import until


def busy(prefill):
    """The prefill pods by whether they got a request: first those that did."""
    return sorted(prefill, key=lambda pod: not pod.prefills)


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("failure", [UnavailableError("draining"), OverloadedError("full")])
async def test_another_prefill_pod_takes_over(start_cluster, text, failure, policy):  # noqa: F811
    first, second = FakePrefillPod(), FakePrefillPod()
    cluster = await start_cluster([first, second], [FakeDecodePod(), FakeDecodePod()], kv_failure_policy=policy)
    for prefill in cluster.prefill:
        prefill.may_answer.clear()
    for decode in cluster.decode:
        decode.allowed = 0
    answer = asyncio.create_task(cluster.complete(**BODY))
    await until(lambda: first.prefills or second.prefills)
    failing, other = busy(cluster.prefill)
    failing.failure = failure
    other.may_answer.set()
    failing.may_answer.set()
    await other.until(lambda: other.prefills)
    for decode in cluster.decode:
        await decode.allow(None)
    assert (await answer)["choices"][0]["text"] == text()

    assert (failing.prefills[0].epoch, other.prefills[0].epoch) == (1, 2)
    (decode,) = (decode for decode in cluster.decode if decode.submits)
    assert [submit.remote_prefill.epoch for submit in decode.submits] == [1, 2]
    assert [submit.remote_prefill.prefill_address for submit in decode.submits] == [failing.address, other.address]
    assert decode.aborts[0] == decode.submits[0].request.request_id != decode.submits[1].request.request_id
    assert not decode.prefill_failures
    assert cluster.metric("baton_router_prefill_retries_total", reason=failure.code.label) == 1
    await cluster.until_quiet()


async def test_each_prefill_pod_is_asked_once_then_decode_computes(start_cluster, text):  # noqa: F811
    cluster = await start_cluster([FakePrefillPod(), FakePrefillPod()], [FakeDecodePod()])
    cluster.decode[0].recomputes_only = True
    for prefill in cluster.prefill:
        prefill.failure = UnavailableError("draining")
    assert (await cluster.complete(**BODY))["choices"][0]["text"] == text()
    assert [len(prefill.prefills) for prefill in cluster.prefill] == [1, 1]
    assert [failed.epoch for failed in cluster.decode[0].prefill_failures] == [2]
    await cluster.until_quiet()


async def test_prefill_is_retried_within_the_attempts(start_cluster, text):  # noqa: F811
    cluster = await start_cluster(
        [FakePrefillPod() for _ in range(3)], [FakeDecodePod()], survival=SurvivalConfig(max_attempts=2)
    )
    cluster.decode[0].recomputes_only = True
    for prefill in cluster.prefill:
        prefill.failure = UnavailableError("draining")
    assert (await cluster.complete(**BODY))["choices"][0]["text"] == text()
    assert sum(len(prefill.prefills) for prefill in cluster.prefill) == 2


async def test_a_fault_of_ours_is_not_tried_on_another_prefill_pod(start_cluster, text):  # noqa: F811
    cluster = await start_cluster([FakePrefillPod(), FakePrefillPod()], [FakeDecodePod()])
    cluster.decode[0].recomputes_only = True
    for prefill in cluster.prefill:
        prefill.failure = BatonError("bug")
    assert (await cluster.complete(**BODY))["choices"][0]["text"] == text()
    assert sum(len(prefill.prefills) for prefill in cluster.prefill) == 1


async def test_a_prefill_that_fails_after_the_first_token_changes_nothing(start_cluster, text):  # noqa: F811
    """Decode was first: to begin anew would throw its work away."""
    cluster = await start_cluster([FakePrefillPod(), FakePrefillPod()], [FakeDecodePod()])
    for prefill in cluster.prefill:
        prefill.may_answer.clear()
        prefill.failure = UnavailableError("died")
    cluster.decode[0].allowed = 2
    async with Stream(cluster) as stream:
        while stream.text != text(2):
            await stream.next()
        await until(lambda: any(prefill.prefills for prefill in cluster.prefill))
        busy(cluster.prefill)[0].may_answer.set()
        await cluster.decode[0].until(lambda: cluster.decode[0].prefill_failures)
        await cluster.decode[0].allow(None)
        await stream.rest()
    assert stream.text == text()
    assert len(cluster.decode[0].submits) == 1


async def test_kv_that_must_not_be_recomputed_comes_from_another_prefill_pod(start_cluster, text):  # noqa: F811
    """The decode pod notices first, and gives up."""
    cluster = await start_cluster([FakePrefillPod(), FakePrefillPod()], [FakeDecodePod()], kv_failure_policy="fail")
    decode = cluster.decode[0]
    for prefill in cluster.prefill:
        prefill.may_answer.clear()
    decode.failure = UnavailableError("the KV did not come", param="kv_failure_policy")
    decode.allowed = 0
    answer = asyncio.create_task(cluster.complete(**BODY))
    await decode.until(lambda: decode.submits)
    await until(lambda: any(prefill.prefills for prefill in cluster.prefill))
    failing, other = busy(cluster.prefill)
    await decode.allow(1)
    await decode.until(lambda: len(decode.submits) == 2)
    decode.failure = None
    other.may_answer.set()
    await decode.allow(None)
    assert (await answer)["choices"][0]["text"] == text()
    await failing.until(lambda: failing.num_cancelled == 1)
    assert cluster.metric("baton_router_prefill_retries_total", reason="kv_failed") == 1
    await cluster.until_quiet()


async def started(cluster, decode, num_streams, num_tokens=3):
    """Completions, all of which have got `num_tokens` tokens from `decode`, their pod."""
    decode.allowed = num_tokens
    answers = [asyncio.create_task(cluster.complete(**BODY)) for _ in range(num_streams)]
    running = cluster.router.service._running
    await until(lambda: sum(len(each._output) == num_tokens for each in running.values()) == num_streams)
    return answers


async def test_a_lost_pod_floods_nobody(start_cluster, text):  # noqa: F811
    decode = FakeDecodePod()
    cluster = await start_cluster([], [decode], survival=SurvivalConfig(pod_wait_s=60))
    answers = await started(cluster, decode, MAX_CONCURRENT_MIGRATIONS + 5)
    await decode.stop()
    decode.submits.clear()
    await decode.start()  # those that come back get no token yet
    await until(
        lambda: (
            len(decode.submits) == cluster.metric("baton_router_num_migrations_running") == MAX_CONCURRENT_MIGRATIONS
        )
    )
    assert cluster.metric("baton_router_num_migrations_waiting") == 5
    await decode.allow(None)
    assert {body["choices"][0]["text"] for body in await asyncio.gather(*answers)} == {text()}
    assert (
        cluster.metric("baton_router_num_migrations_running")
        == cluster.metric("baton_router_num_migrations_waiting")
        == 0
    )
    assert Counter(tuple(submit.request.output_token_ids) for submit in decode.submits) == {
        tuple(TOKENS[:3]): MAX_CONCURRENT_MIGRATIONS + 5
    }
    await cluster.until_quiet()


async def test_a_client_that_goes_leaves_the_line(start_cluster, text):  # noqa: F811
    decode = FakeDecodePod()
    cluster = await start_cluster([], [decode], survival=SurvivalConfig(pod_wait_s=60))
    answers = await started(cluster, decode, MAX_CONCURRENT_MIGRATIONS + 2)
    await decode.stop()
    decode.submits.clear()
    await decode.start()
    await until(lambda: len(decode.submits) == MAX_CONCURRENT_MIGRATIONS)
    assert cluster.metric("baton_router_num_migrations_waiting") == 2
    moving = {submit.request.request_id for submit in decode.submits}
    waiting = [each for each in cluster.router.service._running.values() if each._transfer_id + ".2" not in moving]
    assert cluster.router.service.abort(waiting[0].request.request_id, Tenant())
    await until(lambda: cluster.metric("baton_router_num_migrations_waiting") == 1)
    await decode.allow(None)
    texts = [body["choices"][0]["text"] for body in await asyncio.gather(*answers)]
    assert Counter(texts) == {text(3): 1, text(): MAX_CONCURRENT_MIGRATIONS + 1}
    assert len(decode.submits) == MAX_CONCURRENT_MIGRATIONS + 1
    assert cluster.metric("baton_router_num_migrations_running") == 0
    await cluster.until_quiet()


async def test_pods_without_room_do_not_end_a_stream_that_lost_its_pod(start_cluster, text):  # noqa: F811
    decode = FakeDecodePod()
    cluster = await start_cluster([], [decode], survival=SurvivalConfig(max_attempts=2, pod_wait_s=60))
    (answer,) = await started(cluster, decode, 1)
    await decode.stop()
    decode.submits.clear()
    decode.failure = OverloadedError("full")
    await decode.allow(None)
    await decode.start()
    await decode.until(lambda: len(decode.submits) >= 4)  # more often than a failing pod would be asked
    decode.failure = None
    assert (await answer)["choices"][0]["text"] == text()
    await cluster.until_quiet()


async def test_a_stream_that_waits_for_room_keeps_its_deadline(start_cluster):
    decode = FakeDecodePod()
    cluster = await start_cluster([], [decode], request_timeout_s=3.0)
    decode.allowed = 3
    async with Stream(cluster) as stream:
        await stream.next()
        decode.failure = OverloadedError("full")
        await decode.allow(None)
        events = await stream.rest()
    assert events[-1]["error"]["code"] == "deadline_exceeded"
    await cluster.until_quiet()


async def test_a_long_stream_survives_more_restarts_than_attempts(start_cluster, text):  # noqa: F811
    decode = FakeDecodePod()
    cluster = await start_cluster([], [decode], survival=SurvivalConfig(max_attempts=2, pod_wait_s=60))
    decode.allowed = 1
    async with Stream(cluster) as stream:
        for num_tokens in range(1, 6):
            while stream.text != text(num_tokens):
                await stream.next()
            await decode.stop()
            await decode.allow(num_tokens + 1)
            await decode.start()
        await decode.allow(None)
        await stream.rest()
    assert stream.text == text()
    assert len(decode.submits) == 6
    await cluster.until_quiet()


async def test_every_pod_dies_once_under_many_streams(start_cluster, text):  # noqa: F811
    pods = [FakeDecodePod(step_s=0.002) for _ in range(3)]
    cluster = await start_cluster([], pods, survival=SurvivalConfig(pod_wait_s=60))
    for decode in pods:
        decode.allowed = 1
    answers = [asyncio.create_task(cluster.complete(**BODY)) for _ in range(90)]
    await until(lambda: sum(len(each._output) for each in cluster.router.service._running.values()) == 90)
    for number, decode in enumerate(pods):
        await decode.stop()
        await until(lambda decode=decode: cluster.router.cluster.by_address[decode.address].state is not PodState.READY)
        for each in pods:
            await each.allow(number + 2)
        await decode.start()
        await cluster.until_ready()
    for decode in pods:
        await decode.allow(None)
    assert {body["choices"][0]["text"] for body in await asyncio.gather(*answers)} == {text()}
    assert cluster.metric("baton_router_redispatch_total", reason="pod_lost") >= 90
    await cluster.until_quiet()


async def on_a_draining_pod(start_cluster, survival, *, free_blocks=100):
    """A stream that has got three tokens from a pod that drains, that pod, and another one."""
    cluster = await start_cluster([], [FakeDecodePod(), FakeDecodePod()], survival=survival)
    for decode in cluster.decode:
        decode.allowed = 3
    stream = Stream(cluster)
    await stream.__aenter__()
    await stream.next()
    draining, other = cluster.decode if cluster.decode[0].submits else reversed(cluster.decode)
    await draining.until(lambda: not any(each.runnable for each in draining.live.values()))
    await other.set_stats(pods_pb2.PodStats(num_free_blocks=free_blocks, num_blocks=100))
    pods = cluster.router.cluster.by_address
    await until(lambda: pods[other.address].engines[0].load.current().free_blocks == free_blocks)
    await draining.set_serving(False)  # as real pods do
    await draining.set_stats(pods_pb2.PodStats(draining=True))
    await until(lambda: pods[draining.address].state is PodState.DRAINING)
    return cluster, stream, draining, other


async def test_streams_leave_a_pod_that_drains_if_they_are_to(start_cluster, text):  # noqa: F811
    cluster, stream, draining, other = await on_a_draining_pod(start_cluster, SurvivalConfig(migrate_on_drain_s=0))
    await other.allow(None)
    await stream.rest()
    await stream.__aexit__(None, None, None)
    assert stream.text == text()
    assert draining.aborts == [draining.submits[0].request.request_id]
    assert cluster.metric("baton_router_redispatch_total", reason="drain") == 1
    assert cluster.metric("baton_router_num_migrations_running") == 0
    await cluster.until_quiet()


@pytest.mark.parametrize(
    ("survival", "free_blocks"), [(SurvivalConfig(), 100), (SurvivalConfig(migrate_on_drain_s=0), 0)]
)
async def test_streams_stay_on_a_pod_that_drains(start_cluster, text, survival, free_blocks):  # noqa: F811
    """As it is set, or since no other pod has room."""
    cluster, stream, draining, other = await on_a_draining_pod(start_cluster, survival, free_blocks=free_blocks)
    await draining.allow(None)
    await stream.rest()
    await stream.__aexit__(None, None, None)
    assert stream.text == text()
    assert (other.submits, draining.aborts) == ([], [])
    assert cluster.metric("baton_router_num_migrations_running") == 0
    await cluster.until_quiet()


async def test_a_stream_whose_draining_pod_dies_is_in_line_once(start_cluster, text, monkeypatch):  # noqa: F811
    survival = SurvivalConfig(migrate_on_drain_s=3600)
    cluster, stream, draining, other = await on_a_draining_pod(start_cluster, survival)
    service = cluster.router.service
    line, num_entered = service.model(None).dispatcher.migrations, 0
    slots = [await line.enter() for _ in range(MAX_CONCURRENT_MIGRATIONS)]  # of other streams
    enter = line.enter

    async def count_and_enter():
        nonlocal num_entered
        num_entered += 1
        return await enter()

    monkeypatch.setattr(line, "enter", count_and_enter)
    (generation,) = service._running.values()
    generation.leave(cluster.router.cluster.by_address[draining.address])
    await until(lambda: cluster.metric("baton_router_num_migrations_waiting") == 1)
    await draining.stop()
    await until(lambda: num_entered == 2)
    assert cluster.metric("baton_router_num_migrations_waiting") == 1
    for slot in slots:
        slot.release()
    await other.allow(None)
    await stream.rest()
    await stream.__aexit__(None, None, None)
    assert stream.text == text()
    assert len(other.submits) == 1
    assert cluster.metric("baton_router_redispatch_total", reason="drain") == 0
    assert cluster.metric("baton_router_num_migrations_running") == 0
    await cluster.until_quiet()


async def test_a_prefill_retry_that_meets_a_broken_session_recovers(start_cluster, text, monkeypatch):  # noqa: F811
    cluster = await start_cluster([FakePrefillPod(), FakePrefillPod()], [FakeDecodePod()])
    for prefill in cluster.prefill:
        prefill.may_answer.clear()
    cluster.decode[0].allowed = 0
    answer = asyncio.create_task(cluster.complete(**BODY))
    await until(lambda: any(prefill.prefills for prefill in cluster.prefill))
    failing, other = busy(cluster.prefill)
    failing.failure = UnavailableError("draining")
    submit, failures = DecodeSession.submit, iter([UnavailableError("the session broke")])

    def submit_once_it_works(session, message, sink):
        if (failure := next(failures, None)) is not None:
            raise failure
        submit(session, message, sink)

    monkeypatch.setattr(DecodeSession, "submit", submit_once_it_works)
    other.may_answer.set()
    failing.may_answer.set()
    await cluster.decode[0].until(lambda: len(cluster.decode[0].submits) == 2)
    await cluster.decode[0].allow(None)
    assert (await answer)["choices"][0]["text"] == text()
    await cluster.until_quiet()

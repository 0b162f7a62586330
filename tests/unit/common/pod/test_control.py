from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub

from common import __version__
from common.pb import common_pb2, pods_pb2
from common.pb.pods_pb2_grpc import PodStub
from common.pod.control import PodServicer
from common.types import HASH_BYTES, split_hashes
from tests.pods import (
    DEADLINE_S,
    SLOW,
    FakeRouter,
    RunningPod,
    decode_pod,
    engine_request,
    prefill_pod,
    prompt_of,
    wait_for,
)


@pytest.fixture
async def pod() -> AsyncIterator[RunningPod]:
    async with decode_pod({}, pod_id="decode-7", served_model_name="demo", executor=SLOW) as running:
        yield running


async def test_facts_of_the_pod(pod: RunningPod) -> None:
    facts = await PodStub(pod.channel).GetInfo(pods_pb2.GetInfoRequest(), timeout=DEADLINE_S)
    assert (facts.pod_id, facts.role, facts.model_name) == ("decode-7", pods_pb2.POD_ROLE_DECODE, "demo")
    assert (facts.block_size, facts.connector, facts.version) == (16, "shared-storage", __version__)
    assert facts.fingerprint == pod.context.spec.fingerprint
    assert facts.target_itl_ms == 50.0
    async with prefill_pod({}) as other:
        theirs = await PodStub(other.channel).GetInfo(pods_pb2.GetInfoRequest(), timeout=DEADLINE_S)
    assert theirs.role == pods_pb2.POD_ROLE_PREFILL
    assert theirs.incarnation != facts.incarnation


async def test_stats_come_at_once_and_on_change(pod: RunningPod) -> None:
    watch = PodStub(pod.channel).WatchStats(pods_pb2.WatchStatsRequest(min_interval_ms=1), timeout=DEADLINE_S)
    first = await watch.read()
    assert (first.num_running, first.num_preemptions, first.draining) == (0, 0, False)
    assert first.num_free_blocks == first.num_blocks > 0
    async with FakeRouter(pod) as router:
        answer = await router.submit(engine_request("a", prompt_of(40), max_tokens=3000))
        while (await watch.read()).num_running == 0:
            pass
        await router.abort("a")
        await answer.wait_finished()
        while (await watch.read()).num_running:
            pass
    pod.context.admission.drain()
    while not (await watch.read()).draining:
        pass
    watch.cancel()


async def test_kv_events_begin_with_a_snapshot_and_come_with_no_other_news(pod: RunningPod) -> None:
    async with FakeRouter(pod) as router:
        await (await router.submit(engine_request("a", prompt_of(40), max_tokens=1))).wait_finished()
        request = pods_pb2.WatchStatsRequest(min_interval_ms=1, with_kv_events=True)
        watch = PodStub(pod.channel).WatchStats(request, timeout=DEADLINE_S)
        snapshot = (await watch.read()).kv_events
        assert snapshot.is_snapshot
        assert len(snapshot.stored) == 2 * HASH_BYTES
        await pod.context.engine.reset_prefix_cache()  # the engine is idle
        while not (events := (await watch.read()).kv_events).removed:
            pass
        assert set(split_hashes(events.removed)) == set(split_hashes(snapshot.stored))
        assert (events.sequence, events.is_snapshot, events.stored) == (snapshot.sequence + 1, False, b"")
        watch.cancel()
    plain = PodStub(pod.channel).WatchStats(pods_pb2.WatchStatsRequest(), timeout=DEADLINE_S)
    assert not (await plain.read()).HasField("kv_events"), "nobody asked"
    plain.cancel()
    await wait_for(lambda: not pod.context.caches[0]._watches)


async def test_drain_says_what_is_left_before_its_deadline(pod: RunningPod) -> None:
    pod.gate.shut()
    async with FakeRouter(pod) as router:
        await router.submit(engine_request("a", prompt_of(5)))
        await wait_for(lambda: len(pod.context.requests) == 1)
        context: Any = SimpleNamespace(time_remaining=lambda: 0.1)  # of a call
        response = await PodServicer(pod.context, pod.front, Mock()).Drain(pods_pb2.DrainRequest(), context)
        assert response.num_unfinished == 1


async def test_an_undrained_pod_takes_work_again_unless_it_shuts_down(pod: RunningPod) -> None:
    stub, health = PodStub(pod.channel), HealthStub(pod.channel)
    pod.gate.shut()
    async with FakeRouter(pod) as router:
        running = await router.submit(engine_request("a", prompt_of(5), max_tokens=3))
        await wait_for(lambda: len(pod.context.requests) == 1)
        drained = await stub.Drain(pods_pb2.DrainRequest(returns_at_once=True), timeout=DEADLINE_S)
        assert drained.num_unfinished == 1
        refused = await router.submit(engine_request("b", prompt_of(5)))
        assert (await refused.wait_finished()).error.code == common_pb2.ERROR_CODE_UNAVAILABLE
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=DEADLINE_S)
        while (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING:
            pass
        await stub.Undrain(pods_pb2.UndrainRequest(), timeout=DEADLINE_S)
        while (await watch.read()).status != health_pb2.HealthCheckResponse.SERVING:
            pass
        watch.cancel()
        pod.gate.open()
        after = await router.submit(engine_request("c", prompt_of(5), max_tokens=3))
        for answer in (running, after):
            assert (await answer.wait_finished()).finish_reason == common_pb2.FINISH_REASON_LENGTH
    pod.context.admission.end()
    with pytest.raises(grpc.aio.AioRpcError, match="shutting down"):
        await stub.Undrain(pods_pb2.UndrainRequest(), timeout=DEADLINE_S)
    assert pod.context.admission.draining


async def test_the_prefix_cache_is_reset(pod: RunningPod) -> None:
    async with FakeRouter(pod) as router:
        for name, num_cached in (("a", 0), ("b", 32), ("c", 0)):
            answer = await router.submit(engine_request(name, prompt_of(40), max_tokens=1))
            await answer.wait_finished()
            assert answer.report.num_cached_tokens == num_cached
            if name == "b":
                await PodStub(pod.channel).ResetPrefixCache(pods_pb2.ResetPrefixCacheRequest(), timeout=DEADLINE_S)


async def test_integrity_counts_what_is_open(pod: RunningPod) -> None:
    async with FakeRouter(pod) as router:
        answer = await router.submit(engine_request("a", prompt_of(5), max_tokens=4000))
        await answer.wait_tokens(1)
        report = await pod.integrity()
        assert (list(report.violations), report.num_requests) == ([], 1)
        assert report.num_blocks_in_use > 0


async def test_integrity_tells_of_work_that_nobody_owns(pod: RunningPod) -> None:
    pod.context.admission.hold()
    assert (await pod.integrity()).violations == ["1 requests are open, sessions have 0"]
    pod.context.admission.release()

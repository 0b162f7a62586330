"""Pods that say they are healthy and are not, behind a router."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import NonFiniteError, OverloadedError, UnavailableError
from common.pb import pods_pb2
from router.pods.config import HealthConfig
from router.pods.pod import PodState
from router.testing import FakeDecodePod, FakePrefillPod
from tests.unit.router.pods.test_pod_health import Request

NEVER = HealthConfig(canary_interval_s=0, eject_base_s=3600)
SOON = HealthConfig(canary_interval_s=0.2, eject_base_s=0.05)


def state_of(cluster, fake):
    return cluster.router.cluster.by_address[fake.address].state


async def health_of(cluster, fake):
    pods = (await cluster.client.get("/health")).json()["pods"]
    return next(pod for pod in pods if pod["address"] == fake.address)


async def test_a_decode_pod_that_fails_its_requests_is_ejected_and_said_so(start_cluster, caplog):
    bad, good = FakeDecodePod(), FakeDecodePod()
    cluster = await start_cluster([], [bad, good], pod_health=NEVER, decode_policy="round_robin")
    bad.failure = UnavailableError("the disk is on fire")
    while state_of(cluster, bad) is PodState.READY:
        await cluster.complete(prompt=f"Hello {len(bad.submits)}", max_tokens=2)
    assert len(bad.submits) == 5
    for _ in range(3):
        await cluster.complete(prompt="Hello", max_tokens=2)
    assert len(bad.submits) == 5
    said = await health_of(cluster, bad)
    assert said["state"] == "ejected"
    assert "the disk is on fire" in said["detail"]
    assert "tried again in 3600 s" in said["detail"]
    labels = {"role": "decode", "address": bad.address}
    assert cluster.metric("baton_router_pod_ejections_total", reason="decode", **labels) == 1
    assert cluster.metric("baton_router_pod_ready", **labels) == 0
    assert f"decode pod {bad.address} is ejected" in caplog.text


async def test_a_prefill_pod_is_ejected_and_comes_back_by_a_canary(start_cluster):
    bad, good = FakePrefillPod(), FakePrefillPod()
    soon = HealthConfig(canary_interval_s=0, eject_base_s=0.01, eject_after_failures=3)
    cluster = await start_cluster([bad, good], pod_health=soon)
    bad.failure = UnavailableError("out of order")
    pod = cluster.router.cluster.by_address[bad.address]
    request = pods_pb2.PrefillRequest(
        request={"request_id": "a", "prompt_token_ids": [5], "sampling": {"max_tokens": 2}}
    )
    for number in range(3):
        assert pod.state is PodState.READY
        with pytest.raises(UnavailableError, match="out of order"):
            await pod.prefill(request, 30, Request(number))
    assert pod.state is PodState.EJECTED
    labels = {"role": "prefill", "address": bad.address}
    assert cluster.metric("baton_router_pod_ejections_total", reason="prefill", **labels) == 1
    bad.failure = None
    await cluster.until(lambda: pod.state is PodState.READY)
    canary = bad.prefills[-1]
    assert canary.request.request_id.startswith("canary-")
    assert canary.transfer_id == ""
    assert canary.request.cache_salt
    assert cluster.metric("baton_router_canary_requests_total", outcome="ok", **labels) == 1


async def test_the_only_pod_and_too_large_a_share_are_never_ejected(start_cluster):
    pods = [FakeDecodePod() for _ in range(3)]
    cluster = await start_cluster([], pods, pod_health=NEVER, decode_policy="round_robin")
    for pod in pods:
        pod.failure = UnavailableError("all the same")
    for number in range(12):
        assert (await cluster.post("/v1/completions", prompt=f"Hello {number}", max_tokens=2)).status_code == 503
    states = [state_of(cluster, pod) for pod in pods]
    assert states.count(PodState.EJECTED) == 1
    assert states.count(PodState.READY) == 2


async def test_the_only_prefill_pod_is_ejected_when_it_hangs_since_decode_pods_compute_prompts_too(start_cluster):
    hung, decode = FakePrefillPod(), FakeDecodePod()
    decode.recomputes_only = True
    cluster = await start_cluster([hung], [decode], pod_health=SOON, remote_prefill="prefer")
    hung.may_answer.clear()  # its front answers, its engine does not
    answer = await cluster.complete(prompt="Hello", max_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3
    assert len(hung.prefills) >= 1
    assert len(decode.prefill_failures) == 1
    labels = {"role": "prefill", "address": hung.address}
    assert cluster.metric("baton_router_pod_ejections_total", reason="canary", **labels) >= 1
    hung.may_answer.set()
    await cluster.until(lambda: state_of(cluster, hung) is PodState.READY)


async def test_the_only_prefill_pod_stays_where_decode_pods_may_not_compute_prompts(start_cluster):
    hung = FakePrefillPod()
    cluster = await start_cluster([hung], pod_health=SOON, remote_prefill="always")
    hung.may_answer.clear()
    labels = {"role": "prefill", "address": hung.address}
    while cluster.metric("baton_router_canary_requests_total", outcome="failed", **labels) < 3:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert state_of(cluster, hung) is PodState.READY


async def test_overload_is_no_failure(start_cluster):
    full, free = FakeDecodePod(), FakeDecodePod()
    cluster = await start_cluster([], [full, free], pod_health=NEVER, decode_policy="round_robin")
    full.failure = OverloadedError("full")
    for _ in range(14):
        await cluster.complete(prompt="Hello", max_tokens=2)
    assert len(full.submits) > 5
    assert state_of(cluster, full) is PodState.READY


async def test_streams_of_a_pod_whose_engine_hangs_move_on(start_cluster):
    hung, good = FakeDecodePod(), FakeDecodePod()
    cluster = await start_cluster([], [hung, good], pod_health=SOON, decode_policy="round_robin")
    for pod in (hung, good):
        await pod.allow(2)
    streams = [asyncio.create_task(cluster.complete(prompt="Hello", max_tokens=6)) for _ in range(2)]
    await hung.until(lambda: len(hung.live) == 1 and not any(each.runnable for each in hung.live.values()))
    await hung.allow(0)  # its front answers, its engine does not
    await good.allow(None)
    answers = [await stream for stream in streams]
    assert [answer["usage"]["completion_tokens"] for answer in answers] == [6, 6]
    labels = {"role": "decode", "address": hung.address}
    assert cluster.metric("baton_router_pod_ejections_total", reason="canary", **labels) >= 1
    assert cluster.metric("baton_router_request_success_total", finished_reason="length") == 2, (
        "canaries are not counted"
    )
    await hung.allow(None)
    await cluster.until(lambda: state_of(cluster, hung) is PodState.READY)


async def test_an_idle_pod_gets_a_canary_that_is_not_counted(start_cluster):
    idle = FakeDecodePod()
    cluster = await start_cluster([], [idle], pod_health=HealthConfig(canary_interval_s=0.05))
    await idle.until(lambda: idle.submits)
    assert idle.submits[0].request.request_id.startswith("canary-")
    assert cluster.metric("baton_router_request_success_total", finished_reason="length") == 0


async def test_a_step_that_a_pod_reports_is_a_sign_of_work(start_cluster, monkeypatch):
    """Which puts the next canary off, see test_pod_health."""
    pod = FakeDecodePod()
    cluster = await start_cluster([], [pod], pod_health=HealthConfig(canary_interval_s=600.0))
    has_worked = asyncio.Event()
    monkeypatch.setattr(cluster.router.cluster.decode_pods[0].health, "worked", has_worked.set)
    await pod.set_stats(pods_pb2.PodStats(num_blocks=100, num_free_blocks=100, last_step_s=0.1))
    async with asyncio.timeout(30):
        await has_worked.wait()


async def test_a_pod_that_skips_tokens_of_two_requests_is_ejected(start_cluster):
    liar, honest = FakeDecodePod(), FakeDecodePod()
    cluster = await start_cluster([], [liar, honest], pod_health=NEVER, decode_policy="round_robin")
    for pod in (liar, honest):
        await pod.allow(1)
    streams = [asyncio.create_task(cluster.complete(prompt=f"Hello {i // 2}", max_tokens=6)) for i in range(4)]
    await liar.until(lambda: sum(request._next == 1 for request in liar.live.values()) == 2)
    for request in liar.live.values():
        request._next = 3
    await liar.allow(None)
    await cluster.until(lambda: state_of(cluster, liar) is PodState.EJECTED)
    await honest.allow(None)
    assert [(await stream)["usage"]["completion_tokens"] for stream in streams] == [6] * 4
    said = await health_of(cluster, liar)
    assert "it skipped from index 1 to 3" in said["detail"]


async def test_no_request_of_one_client_takes_a_pod_from_the_others(start_cluster):
    """However often it fails by itself, and whatever seed and id it has."""
    cluster = await start_cluster([FakePrefillPod()], [FakeDecodePod(), FakeDecodePod()], pod_health=NEVER)
    for pod in (*cluster.prefill, *cluster.decode):
        pod.failure = NonFiniteError("no finite logit")
    for seed in range(8):
        response = await cluster.post("/v1/completions", prompt="Hello", max_tokens=2, seed=seed)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "non_finite")
    assert all(pod.state is PodState.READY for pod in cluster.router.cluster.pods)


@pytest.mark.parametrize("fact", ["block_size", "num_blocks", "vocab_size", "max_model_len", "max_num_seqs"])
async def test_a_pod_whose_facts_cannot_be_true_is_refused(start_cluster, fact):
    liar = FakePrefillPod()
    setattr(liar.info, fact, 0)
    cluster = await start_cluster([liar], [FakeDecodePod()], wait=False)
    await cluster.until(lambda: state_of(cluster, liar) is PodState.REFUSED)
    assert (await health_of(cluster, liar))["detail"] == f"it reports an invalid {fact}: 0"

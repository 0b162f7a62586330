"""Which pods take part, and what the router says about it."""

from __future__ import annotations

import asyncio

import pytest

from common.errors import UnavailableError
from common.pb import common_pb2, pods_pb2
from router.config import RouterConfig
from router.placing.config import RoutingConfig
from router.pods.pod import Pod, PodState
from router.serving.config import ServingConfig
from router.testing import FakeDecodePod, FakePrefillPod


async def health(cluster):
    response = await cluster.client.get("/health")
    body = response.json()
    assert (response.status_code == 200) == (body["status"] == "ok")
    return response.status_code, {pod["address"]: pod for pod in body["pods"]}


async def test_nothing_is_served_without_a_decode_pod(start_cluster):
    decode = FakeDecodePod()
    cluster = await start_cluster([FakePrefillPod()], [decode])
    assert (await health(cluster))[0] == 200
    await decode.stop()
    await cluster.until(lambda: PodState.DOWN in {pod.state for pod in cluster.router.cluster.pods})
    status, _ = await health(cluster)
    assert status == 503
    response = await cluster.post("/v1/completions", prompt="Hello")
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "no decode pod is ready: 1 down"
    assert response.headers["retry-after"]
    await decode.start()
    await cluster.until(lambda: cluster.router.cluster.can_serve)
    assert (await health(cluster))[0] == 200
    await cluster.complete(prompt="Hello", max_tokens=2)


async def test_nothing_is_served_without_the_prefill_pod_that_is_a_must(start_cluster):
    prefill = FakePrefillPod()
    cluster = await start_cluster([prefill], remote_prefill="always")
    assert (await health(cluster))[0] == 200
    await prefill.stop()
    await cluster.until(lambda: not cluster.router.cluster.ready_prefill())
    assert (await health(cluster))[0] == 503
    assert (await cluster.post("/v1/completions", prompt="Hello")).status_code == 503
    await prefill.start()
    await cluster.until(lambda: cluster.router.cluster.ready_prefill())
    assert (await health(cluster))[0] == 200
    with pytest.raises(ValueError, match="--prefill"):
        RouterConfig(decode=["a:1"], serving=ServingConfig(routing=RoutingConfig(remote_prefill="always")))


async def test_a_fault_of_ours_does_not_lose_a_pod_for_good(start_cluster, monkeypatch):
    open_pod, faults = Pod._open, iter([ValueError("first"), TypeError("second")])

    async def fail_twice(pod, channel):
        if (fault := next(faults, None)) is not None:
            raise fault
        await open_pod(pod, channel)

    monkeypatch.setattr(Pod, "_open", fail_twice)
    cluster = await start_cluster()
    await cluster.complete(prompt="Hello", max_tokens=2)


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({"fingerprint": b"x" * 32}, "fingerprint"),
        ({"block_size": 32}, "block_size is 32, the cluster's is 16"),
        ({"vocab_size": 9}, "vocab_size"),
        (
            {"fingerprint": b"x" * 32, "kv_dtype": "int8"},
            "its KV is of int8, the cluster's of float32: see kv_cache_dtype",
        ),
    ],
)
async def test_pods_of_another_model_are_refused(start_cluster, facts, said):
    fit = [FakeDecodePod(), FakeDecodePod()]
    odd = FakePrefillPod(**facts)
    cluster = await start_cluster([odd], fit, wait=False)
    states = {pod.address: pod for pod in cluster.router.cluster.pods}
    await cluster.until(
        lambda: states[odd.address].state is PodState.REFUSED and states[fit[0].address].state is PodState.READY
    )
    status, pods = await health(cluster)
    assert status == 200
    assert pods[odd.address]["state"] == "refused"
    assert said in pods[odd.address]["detail"]
    await cluster.complete(prompt="Hello", max_tokens=2)
    assert odd.prefills == []


async def test_a_pod_in_the_wrong_list_is_refused(start_cluster):
    prefill, decode = FakePrefillPod(), FakeDecodePod()
    cluster = await start_cluster([decode], [prefill], wait=False)
    pods = cluster.router.cluster.pods
    await cluster.until(lambda: all(pod.state is PodState.REFUSED for pod in pods))
    assert [pod.detail for pod in pods] == ["it is not a decode pod", "it is not a prefill pod"]
    status, _ = await health(cluster)
    assert status == 503


async def test_a_new_model_takes_over_when_the_old_one_is_gone(start_cluster):
    cluster = await start_cluster([], [FakeDecodePod(), FakeDecodePod()])
    for pod in cluster.decode:
        await pod.stop()
    await cluster.until(lambda: not cluster.router.cluster.can_serve)
    for pod in cluster.decode:
        pod.info.fingerprint = b"n" * 32
        await pod.start()
    await cluster.until_ready()
    await cluster.complete(prompt="Hello", max_tokens=2)


async def test_draining_and_unhealthy_pods_get_nothing_new(start_cluster):
    cluster = await start_cluster([], [FakeDecodePod(), FakeDecodePod(), FakeDecodePod()])
    draining, sick, fit = cluster.decode
    await draining.set_serving(False)  # as real pods do
    await draining.set_stats(pods_pb2.PodStats(num_blocks=1, draining=True))
    await sick.set_serving(False)
    pods = cluster.router.cluster.decode_pods
    await cluster.until(lambda: pods[0].state is PodState.DRAINING and pods[1].state is PodState.NOT_SERVING)
    for _ in range(4):
        await cluster.complete(prompt="Hello", max_tokens=2)
    assert [len(pod.submits) for pod in (draining, sick, fit)] == [0, 0, 4]


async def test_an_idle_cluster_is_used_evenly_and_a_busy_pod_is_spared(start_cluster):
    cluster = await start_cluster([], [FakeDecodePod(), FakeDecodePod()])
    for _ in range(4):
        await cluster.complete(prompt="Hello", max_tokens=2)
    assert [len(pod.submits) for pod in cluster.decode] == [2, 2]
    busy, free = cluster.decode
    await busy.set_stats(pods_pb2.PodStats(num_running=50, num_free_blocks=10, num_blocks=100))
    async with asyncio.timeout(30):
        while cluster.router.cluster.decode_pods[0].engines[0].load.current().num_requests != 50:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    for _ in range(4):
        await cluster.complete(prompt="Hello", max_tokens=2)
    assert [len(pod.submits) for pod in cluster.decode] == [2, 6]
    assert free.submits


async def test_a_pod_whose_session_broke_is_unfit_at_once(start_cluster):
    """Those who lost their request on it choose the next pod in the same breath."""
    cluster = await start_cluster()
    (pod,) = cluster.router.cluster.decode_pods
    states = []

    class Sink:
        cause = None

        def on_delta(self, delta, now):
            pass

        def on_lost(self, error):
            states.append(pod.state)

    request = common_pb2.EngineRequest(request_id="a", prompt_token_ids=[5], sampling={"max_tokens": 2})
    pod.session.submit(pods_pb2.Submit(request=request), Sink())
    assert pod.state is PodState.READY
    pod.session._break(UnavailableError("connection reset"))
    assert states == [PodState.NOT_SERVING]
    with pytest.raises(UnavailableError, match="connection reset"):
        pod.session.submit(pods_pb2.Submit(request=request), Sink())

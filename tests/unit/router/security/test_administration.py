"""Operators drain pods, take them back and reset prefix caches, over HTTP and gRPC; others are refused."""

from __future__ import annotations

import grpc
import pytest

from common.errors import PermissionDeniedError
from common.pb import admin_pb2, admin_pb2_grpc, pods_pb2
from common.rpc.errors import from_rpc_error
from router.pods.pod import PodState
from router.testing import FakeDecodePod, FakePrefillPod
from tests.pods import wait_for
from tests.unit.router.security.conftest import ALICE, OPERATOR, bearer

BODY = {"prompt": [600], "max_tokens": 2}


@pytest.fixture
async def cluster(start_cluster, key_file):
    return await start_cluster([FakePrefillPod()], [FakeDecodePod(), FakeDecodePod()], security=key_file.security)


def pod_of(cluster, fake):
    return cluster.router.cluster.by_address[fake.address]


async def act(cluster, path, key=OPERATOR):
    return await cluster.client.post(path, headers=bearer(key))


async def test_a_drained_pod_gets_no_requests_until_it_is_undrained(cluster):
    drained, other = cluster.decode
    response = await act(cluster, f"/admin/pods/{drained.address}/drain")
    assert (response.status_code, response.json()) == (200, {"address": drained.address, "num_unfinished": 0})
    await cluster.until(lambda: pod_of(cluster, drained).state is PodState.DRAINING)
    for _ in range(4):
        answer = await cluster.client.post("/v1/completions", json=BODY, headers=bearer(ALICE))
        assert answer.status_code == 200
    assert (len(drained.submits), len(other.submits)) == (0, 4)
    response = await act(cluster, f"/admin/pods/{drained.address}/undrain")
    assert (response.status_code, response.json()) == (200, {"address": drained.address})
    await cluster.until(lambda: pod_of(cluster, drained).state is PodState.READY)


async def test_prefix_caches_of_all_pods_are_reset_or_the_answer_names_the_others(cluster):
    response = await act(cluster, "/reset_prefix_cache")
    pods = [*cluster.decode, *cluster.prefill]
    assert (response.status_code, response.json()) == (200, {"pods": [pod.address for pod in pods]})
    assert [pod.num_cache_resets for pod in pods] == [1, 1, 1]
    await cluster.decode[0].stop()
    await cluster.until(lambda: pod_of(cluster, cluster.decode[0]).state is PodState.DOWN)
    response = await act(cluster, "/reset_prefix_cache")
    assert response.status_code == 503
    assert cluster.decode[0].address in response.json()["error"]["message"]
    assert [pod.num_cache_resets for pod in pods] == [1, 2, 2]


async def test_learned_step_times_are_for_operators(cluster):
    assert (await cluster.client.get("/admin/step_times", headers=bearer(ALICE))).status_code == 403
    response = await cluster.client.get("/admin/step_times", headers=bearer(OPERATOR))
    (model,) = response.json()["models"]
    assert (model["prefill"]["num_pods"], model["decode"]["num_pods"]) == (1, 2)
    assert not model["decode"]["is_known"]
    assert model["decode"]["token_s"] > 0
    assert model["num_verified_drafts"] == 0
    assert (await cluster.client.post("/admin/step_times", headers=bearer(OPERATOR))).status_code == 405


async def test_learned_step_times_tell_of_the_drafts_of_all_decode_pods(cluster):
    for fake in cluster.decode:
        drafts = pods_pb2.DraftStats(num_verified=8, num_accepted=6, num_verifications=2)
        await fake.set_stats(pods_pb2.PodStats(num_free_blocks=100, num_blocks=100, drafts=drafts))
    pods = [pod_of(cluster, fake) for fake in cluster.decode]
    await wait_for(lambda: all(pod.stats is not None and pod.stats.drafts.num_verified for pod in pods))
    (model,) = (await cluster.client.get("/admin/step_times", headers=bearer(OPERATOR))).json()["models"]
    figures = ("num_verified_drafts", "num_accepted_drafts", "num_draft_verifications")
    assert [model[name] for name in figures] == [16, 12, 4]


async def test_grpc_does_the_same(cluster):
    drained = cluster.decode[0]
    metadata = (("authorization", f"Bearer {OPERATOR}"),)
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        admin = admin_pb2_grpc.AdminStub(channel)
        request = admin_pb2.DrainPodRequest(address=drained.address)
        assert (await admin.DrainPod(request, metadata=metadata, timeout=30)).num_unfinished == 0
        await cluster.until(lambda: pod_of(cluster, drained).state is PodState.DRAINING)
        await admin.UndrainPod(admin_pb2.UndrainPodRequest(address=drained.address), metadata=metadata, timeout=30)
        await cluster.until(lambda: pod_of(cluster, drained).state is PodState.READY)
        reset = admin_pb2.ResetPrefixCacheOfPodsRequest()
        assert len((await admin.ResetPrefixCache(reset, metadata=metadata, timeout=30)).addresses) == 3
        unknown = admin_pb2.DrainPodRequest(address="10.0.0.9:7001")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await admin.DrainPod(unknown, metadata=metadata, timeout=30)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND
        for call, message in ((admin.DrainPod, request), (admin.ResetPrefixCache, reset)):
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await call(message, metadata=(("x-api-key", ALICE),), timeout=30)
            assert isinstance(from_rpc_error(raised.value), PermissionDeniedError)
    assert [pod.num_cache_resets for pod in cluster.decode] == [1, 1]


async def test_only_operators_may(cluster):
    path = f"/admin/pods/{cluster.decode[0].address}"
    for each in (f"{path}/drain", f"{path}/undrain", "/reset_prefix_cache"):
        assert (await cluster.client.post(each)).status_code == 401
        assert (await act(cluster, each, ALICE)).status_code == 403
    for each in ("/load", "/v1/load"):
        assert (await cluster.client.get(each, headers=bearer(ALICE))).status_code == 403
    assert not cluster.decode[0].stats.draining
    assert cluster.decode[0].num_cache_resets == 0
    response = await act(cluster, "/admin/pods/10.0.0.9:7001/drain")
    assert (response.status_code, response.json()["error"]["param"]) == (404, "address")
    await cluster.decode[0].stop()
    await cluster.until(lambda: pod_of(cluster, cluster.decode[0]).state is PodState.DOWN)
    assert (await act(cluster, f"{path}/drain")).status_code == 503


async def test_without_keys_programs_may_and_web_pages_may_not(start_cluster):
    cluster = await start_cluster()
    page = {"origin": "https://evil.example"}
    assert (await cluster.client.post("/reset_prefix_cache", headers=page)).status_code == 403
    assert (await cluster.client.post("/reset_prefix_cache")).status_code == 200
    assert cluster.decode[0].num_cache_resets == 1


async def test_load_counts_generations_under_way(start_cluster):
    decode = FakeDecodePod()
    cluster = await start_cluster([], [decode])
    await decode.allow(1)
    async with cluster.client.stream("POST", "/v1/completions", json={**BODY, "n": 2, "stream": True}) as response:
        assert response.status_code == 200
        for path in ("/load", "/v1/load"):
            assert (await cluster.client.get(path)).json() == {"server_load": 2}
        await decode.allow(None)
        await response.aread()
    await cluster.until_quiet()
    assert (await cluster.client.get("/load")).json() == {"server_load": 0}

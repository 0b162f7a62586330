"""Pods join and leave while the router runs."""

from __future__ import annotations

import asyncio
import gc
import time
from contextlib import asynccontextmanager

import psutil

from common.errors import UnavailableError
from router.discovery import Endpoint
from router.metrics import RouterMetrics
from router.placing.index import PrefixIndex
from router.pods.cluster import Cluster
from router.pods.load import PodClaim, Share
from router.pods.pod import PodState
from router.pods.stall import StallWatch
from router.testing import FakeDecodePod, FakePrefillPod

DEADLINE_S = 60.0


class Announced:
    """A Discovery by hand."""

    def __init__(self, *initial):
        self.initial = initial
        self.publish = None
        self.following = asyncio.Event()

    async def follow(self, publish):
        self.publish = publish
        self.following.set()
        await asyncio.Event().wait()


@asynccontextmanager
async def cluster_of(*initial):
    discovery = Announced(*initial)
    metrics = RouterMetrics()
    async with Cluster(discovery, metrics, PrefixIndex(1000)) as cluster:
        await discovery.following.wait()
        cluster.metrics, cluster.publish = metrics, discovery.publish
        yield cluster


async def until(cluster, condition):
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await cluster._changed.wait()


def ready_metric(cluster, endpoint):
    labels = {"role": endpoint.role, "address": endpoint.address}
    return cluster.metrics.registry.get_sample_value("baton_router_pod_ready", labels)


def decode_at(pod):
    return Endpoint("decode", pod.address)


async def until_no_tasks_but(cluster, num_tasks):
    async with asyncio.timeout(DEADLINE_S):
        while len(cluster._tasks) != num_tasks:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_a_pod_that_is_named_later_takes_part():
    async with FakeDecodePod() as first, FakeDecodePod() as second, cluster_of(decode_at(first)) as cluster:
        await until(cluster, lambda: len(cluster.ready_decode()) == 1)
        cluster.publish((decode_at(first), decode_at(second)))
        await until(cluster, lambda: len(cluster.ready_decode()) == 2)
        assert len(cluster.models[0].decode_table) == 2


async def test_a_pod_with_two_addresses_counts_once():
    async with FakeDecodePod() as fake, cluster_of(decode_at(fake)) as cluster:
        await until(cluster, lambda: cluster.can_serve)
        other = Endpoint("decode", fake.address.replace("127.0.0.1", "localhost"))
        cluster.publish((decode_at(fake), other))
        await until(cluster, lambda: cluster.by_address[other.address].state is PodState.REFUSED)
        assert cluster.by_address[other.address].detail == f"it is the pod at {fake.address}"
        cluster.publish((other,))
        await until(cluster, lambda: cluster.by_address[other.address].state is PodState.READY)
        assert len(cluster.pods) == 1


async def test_a_pod_that_leaves_finishes_what_it_has_and_is_forgotten():
    async with FakeDecodePod() as fake, cluster_of(decode_at(fake)) as cluster:
        await until(cluster, lambda: cluster.can_serve)
        (pod,) = cluster.decode_pods
        claim = PodClaim(pod.engines[0].load, Share(tokens=5), None)
        cluster.publish(())
        assert pod.state is PodState.LEAVING
        assert "1 requests" in pod.detail
        assert not cluster.can_serve
        assert len(cluster.models[0].decode_table) == 0
        assert ready_metric(cluster, decode_at(fake)) == 0
        assert pod.session is not None
        assert not pod.session.broken
        cluster.note_ejection(pod, "invalid")
        cluster.note_canary(pod, "ok")
        claim.release(time.monotonic())
        assert cluster.pods == []
        assert cluster.by_address == {}
        assert ready_metric(cluster, decode_at(fake)) is None
        assert not [
            sample
            for metric in cluster.metrics.registry.collect()
            for sample in metric.samples
            if sample.labels.get("address") == fake.address
        ]
        await until_no_tasks_but(cluster, 1)
        assert "none is known" in cluster.models[0].explain()


async def test_a_pod_that_comes_back_meanwhile_is_kept():
    async with FakeDecodePod() as fake, cluster_of(decode_at(fake)) as cluster:
        await until(cluster, lambda: cluster.can_serve)
        (pod,) = cluster.decode_pods
        session = pod.session
        claim = PodClaim(pod.engines[0].load, Share(tokens=5), None)
        cluster.publish(())
        cluster.publish((decode_at(fake),))
        assert cluster.ready_decode() == [pod]
        claim.release(time.monotonic())
        assert cluster.decode_pods == [pod]
        assert pod.session is session


async def test_an_address_that_changes_its_role_is_another_pod():
    async with FakeDecodePod() as other, FakeDecodePod() as fake, cluster_of() as cluster:
        cluster.publish((decode_at(other), decode_at(fake)))
        await until(cluster, lambda: len(cluster.ready_decode()) == 2)
        old = cluster.by_address[fake.address]
        claim = PodClaim(old.engines[0].load, Share(tokens=5), None)
        await fake.stop()
        async with FakePrefillPod(port=int(fake.address.rpartition(":")[2])) as successor:
            assert successor.address == fake.address
            cluster.publish((decode_at(other), Endpoint("prefill", fake.address)))
            await until(cluster, lambda: len(cluster.ready_prefill()) == 1)
            assert cluster.by_address[fake.address] is cluster.prefill_pods[0]
            assert old.state is PodState.LEAVING
            claim.release(time.monotonic())
            assert cluster.by_address[fake.address] is cluster.prefill_pods[0]
            assert len(cluster.pods) == 2


async def test_a_hundred_joins_and_leaves_leave_nothing_behind():
    async with (
        FakeDecodePod() as stays,
        FakePrefillPod() as prefill,
        FakeDecodePod() as decode,
        cluster_of(decode_at(stays)) as cluster,
    ):
        await until(cluster, lambda: cluster.can_serve)
        samples, num_tasks, num_slots = _num_samples(cluster), len(cluster._tasks), cluster.index.num_slots
        come_and_go = (Endpoint("prefill", prefill.address), decode_at(decode))
        for _ in range(100):
            cluster.publish((decode_at(stays), *come_and_go))
            await until(cluster, lambda: len(cluster.ready_decode()) == 2 and cluster.ready_prefill())
            cluster.publish((decode_at(stays),))
            assert len(cluster.pods) == len(cluster.by_address) == 1
        await until_no_tasks_but(cluster, num_tasks)
        assert _num_samples(cluster) == samples
        assert cluster.index.num_slots <= num_slots + 4, "slots are used again"
        assert len(cluster.index._holders) == 1
        assert not cluster.index.check_integrity()
        assert (len(cluster.models[0].decode_table), len(cluster.models[0].prefill_table)) == (1, 0)


def _num_samples(cluster):
    return sum(len(metric.samples) for metric in cluster.metrics.registry.collect() if metric.name.startswith("baton_"))


async def test_a_lost_connection_is_closed_without_a_garbage_collection(monkeypatch):
    lost = asyncio.Event()

    async def run_until_lost(stalls):
        await lost.wait()
        raise UnavailableError("lost")

    monkeypatch.setattr(StallWatch, "run", run_until_lost)
    async with FakeDecodePod() as fake, cluster_of(decode_at(fake)) as cluster:
        gc.disable()
        try:
            most = 0
            for _ in range(4):
                await until(cluster, lambda: cluster.can_serve)
                most = most or num_connections()
                async with asyncio.timeout(DEADLINE_S):
                    while num_connections() > most:  # noqa: ASYNC110  gRPC's own threads close the one before
                        await asyncio.sleep(0.01)
                lost.set()
                await until(cluster, lambda: not cluster.can_serve)
                lost.clear()
        finally:
            gc.enable()


def num_connections():
    return sum(connection.status == psutil.CONN_ESTABLISHED for connection in psutil.Process().net_connections())

"""A router that starts with nobody, over fake pods that are announced in a real registry."""

from __future__ import annotations

import pytest

from common.errors import ConfigError
from common.registry import PodRecord, RedisRegistry
from router.config import RouterConfig
from router.discovery.config import DiscoveryConfig
from router.placing.config import RoutingConfig
from router.runtime import Router
from router.serving.config import ServingConfig
from router.testing import FakeDecodePod, FakePrefillPod
from tests.redis_server import running_redis
from tests.unit.router.router_cluster import run_cluster


def record_of(pod, role):
    return PodRecord(
        role=role,
        address=pod.address,
        pod_id=pod.info.pod_id,
        incarnation=pod.info.incarnation,
        fingerprint=pod.info.fingerprint.hex(),
        num_blocks=100,
        max_num_seqs=8,
        max_model_len=4096,
        lease_s=60.0,
    )


async def test_pods_join_serve_and_leave_without_a_restart():
    with running_redis() as server:
        registry = RedisRegistry(server.url, "default")
        settings = DiscoveryConfig(registry=server.url)
        async with (
            FakeDecodePod() as first,
            FakeDecodePod() as second,
            FakePrefillPod() as prefill,
            run_cluster(discovery=settings) as cluster,
        ):
            router = cluster.router.cluster
            assert (await cluster.post("/v1/completions", prompt="Hello")).status_code == 503
            await registry.announce(record_of(first, "decode"))
            await cluster.until(lambda: router.can_serve)
            await cluster.complete(prompt="Hello", max_tokens=2)
            await registry.announce(record_of(prefill, "prefill"))
            await cluster.until(lambda: router.ready_prefill())
            await cluster.complete(prompt="Hello", max_tokens=2)
            assert cluster.metric("baton_router_dispatch_total", prefill="remote", reason="planned") == 1
            await registry.announce(record_of(second, "decode"))
            await cluster.until(lambda: len(router.ready_decode()) == 2)
            await registry.withdraw(record_of(prefill, "prefill"))
            await cluster.until(lambda: not router.prefill_pods)
            await registry.withdraw(record_of(first, "decode"))
            await cluster.until(lambda: [pod.address for pod in router.decode_pods] == [second.address])
            await cluster.complete(prompt="Hello", max_tokens=2)
            assert (len(first.submits), len(second.submits)) == (2, 1)
        await registry.close()


async def test_a_router_needs_somebody_or_a_place_to_look():
    with pytest.raises(ConfigError, match=r"--decode.*--registry"):
        Router(RouterConfig())
    Router(RouterConfig(decode=["dns:decode.svc:8000"]))
    with pytest.raises(ConfigError, match="--registry"):
        Router(RouterConfig(discovery=DiscoveryConfig(registry="http://nowhere")))
    always = ServingConfig(routing=RoutingConfig(remote_prefill="always"))
    assert RouterConfig(serving=always, discovery=DiscoveryConfig(registry="redis://a")).may_have_prefill_pods
    assert not RouterConfig(decode=["a:1"]).may_have_prefill_pods

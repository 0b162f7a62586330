"""Probes of load balancers and orchestrators, while pods come and go."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.testing import FakeDecodePod


async def statuses(cluster):
    calls = [("GET", "/livez"), ("GET", "/readyz"), ("GET", "/ping"), ("POST", "/ping")]
    return [(await cluster.client.request(method, path)).status_code for method, path in calls]


async def test_a_router_without_pods_is_alive_but_not_ready(start_cluster):
    decode = FakeDecodePod()
    cluster = await start_cluster([], [decode])
    assert await statuses(cluster) == [200, 200, 200, 200]
    await decode.stop()
    await cluster.until(lambda: not cluster.router.cluster.can_serve)
    assert await statuses(cluster) == [200, 503, 503, 503]
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        request = health_pb2.HealthCheckRequest(service="liveness")
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=30)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_readyz_is_health_and_a_ping_has_no_body(pair):
    assert (await pair.client.get("/readyz")).json() == (await pair.client.get("/health")).json()
    for method in ("GET", "POST"):
        response = await pair.client.request(method, "/ping")
        assert (response.content, response.headers["content-length"]) == (b"", "0")

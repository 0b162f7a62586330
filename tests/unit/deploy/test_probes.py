"""Readiness of pods and router."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from common.errors import ConfigError
from deploy.ports import pick_ports
from deploy.probes import RouterProbe, first_model, grpc_probe


class FakeRouter:
    """Answers every request with `status` and `body`."""

    status = 200
    body: object = {}
    asked = b""

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked = await reader.readuntil(b"\r\n\r\n")
        content = json.dumps(self.body).encode()
        head = f"HTTP/1.1 {self.status} X\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + content)
        await writer.drain()
        writer.close()
        await writer.wait_closed()


@asynccontextmanager
async def fake_router() -> AsyncIterator[tuple[FakeRouter, int]]:
    fake = FakeRouter()
    async with await asyncio.start_server(fake.answer, "127.0.0.1", 0) as server:
        yield fake, server.sockets[0].getsockname()[1]


def pods(**states: str) -> dict[str, object]:
    return {"pods": [{"address": a, "state": s, "detail": "its block_size is 8"} for a, s in states.items()]}


async def test_the_router_is_ready_when_it_reaches_every_pod() -> None:
    async with fake_router() as (router, port):
        probe = RouterProbe("127.0.0.1", port, {"a": "prefill-0"})
        router.status, router.body = 503, pods(a="connecting", b="ready")
        assert not await probe()
        router.status, router.body = 200, pods(a="down", b="ready")
        assert not await probe()
        router.status, router.body = 200, pods(a="ready", b="ready")
        assert await probe()
        router.status, router.body = 200, pods(a="down", b="ready")  # later, a restarted router need only serve
        assert await probe()
        router.status, router.body = 503, pods(a="ready", b="down")
        assert not await probe()


async def test_a_router_with_api_keys_is_asked_with_one_of_an_operator() -> None:
    async with fake_router() as (router, port):
        router.body = pods(a="ready")
        assert await RouterProbe("127.0.0.1", port, {"a": "prefill-0"}, "the-key")()
        assert b"\r\nx-api-key: the-key\r\n" in router.asked


async def test_a_pod_that_does_not_fit_is_a_config_error() -> None:
    async with fake_router() as (router, port):
        router.status, router.body = 200, pods(a="refused")
        with pytest.raises(ConfigError, match="prefill-0: its block_size is 8"):
            await RouterProbe("127.0.0.1", port, {"a": "prefill-0"})()


async def test_nobody_there_is_not_ready() -> None:
    (port,) = pick_ports("127.0.0.1", 1)
    assert not await RouterProbe("127.0.0.1", port, {})()
    assert not await grpc_probe(f"127.0.0.1:{port}")()
    assert await first_model("127.0.0.1", port) == ""


async def test_the_first_model_is_named() -> None:
    async with fake_router() as (router, port):
        router.body = {"data": [{"id": "demo"}, {"id": "other"}]}
        assert await first_model("127.0.0.1", port) == "demo"


async def test_a_router_with_api_keys_names_no_model() -> None:
    async with fake_router() as (router, port):
        router.status, router.body = 401, {"error": {}}
        assert await first_model("127.0.0.1", port) is None


async def test_a_pod_is_ready_when_its_health_says_so() -> None:
    server = grpc.aio.server()
    servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        probe = grpc_probe(f"127.0.0.1:{port}")
        await servicer.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
        assert not await probe()
        await servicer.set("", health_pb2.HealthCheckResponse.SERVING)
        assert await probe()
    finally:
        await server.stop(None)

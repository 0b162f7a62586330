"""Whether a process serves already."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Awaitable, Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

PROBE_TIMEOUT_S = 2.0


def grpc_probe(address: str) -> Callable[[], Awaitable[bool]]:
    """A probe that is True once the server at `address` reports SERVING for itself as a whole."""

    async def probe() -> bool:
        async with grpc.aio.insecure_channel(address) as channel:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S
                )
            except grpc.aio.AioRpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    return probe


def http_probe(host: str, port: int, path: str = "/health") -> Callable[[], Awaitable[bool]]:
    """A probe that is True once GET `path` answers 200."""

    async def probe() -> bool:
        status, _ = await asyncio.to_thread(_get, host, port, path)
        return status == 200

    return probe


async def first_model(host: str, port: int) -> str:
    """Name of the first model that the router at host:port serves; empty if it does not say."""
    status, body = await asyncio.to_thread(_get, host, port, "/v1/models")
    if status != 200:
        return ""
    models = json.loads(body).get("data", [])
    return str(models[0]["id"]) if models else ""


def _get(host: str, port: int, path: str) -> tuple[int, bytes]:
    """Status and body; status 0 if nobody answers."""
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()

"""Whether a process serves already."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Awaitable, Callable, Mapping

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import ConfigError
from common.rpc.channel import ChannelOpener
from common.rpc.tls import ClusterTls

PROBE_TIMEOUT_S = 2.0
_NO_HEADERS: Mapping[str, str] = {}


def grpc_probe(address: str, tls: ClusterTls | None = None) -> Callable[[], Awaitable[bool]]:
    """A probe that is True once the server at `address` reports SERVING for itself as a whole."""
    opener: ChannelOpener = grpc.aio.insecure_channel if tls is None else tls.open_channel

    async def probe() -> bool:
        async with opener(address) as channel:
            try:
                answer = await health_pb2_grpc.HealthStub(channel).Check(
                    health_pb2.HealthCheckRequest(), timeout=PROBE_TIMEOUT_S
                )
            except grpc.aio.AioRpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    return probe


class RouterProbe:
    """A probe that is True once the router at host:port reaches every pod; later, while it can serve at all.

    Raises ConfigError if the router refuses a pod because it does not fit the others.
    """

    def __init__(self, host: str, port: int, pod_names: Mapping[str, str], operator_key: str = "") -> None:
        """`pod_names` are the names of the pods by address. A router with API keys tells operators only of its pods."""
        self._host = host
        self._port = port
        self._pod_names = pod_names
        self._headers = {"x-api-key": operator_key} if operator_key else {}
        self._was_complete = False

    async def __call__(self) -> bool:
        """Asks once."""
        status, body = await asyncio.to_thread(_get, self._host, self._port, "/health", self._headers)
        if self._was_complete or not body:
            return status == 200
        pods = json.loads(body)["pods"]
        for pod in pods:
            if pod["state"] == "refused":
                raise ConfigError(f"{self._pod_names.get(pod['address'], pod['address'])}: {pod['detail']}")
        self._was_complete = status == 200 and all(pod["state"] == "ready" for pod in pods)
        return self._was_complete


async def first_model(host: str, port: int) -> str | None:
    """Name of the first model that the router at host:port serves; empty if it does not say, None if it says so to
    those who have an API key only."""
    status, body = await asyncio.to_thread(_get, host, port, "/v1/models")
    if status == 401:
        return None
    if status != 200:
        return ""
    models = json.loads(body).get("data", [])
    return str(models[0]["id"]) if models else ""


def _get(host: str, port: int, path: str, headers: Mapping[str, str] = _NO_HEADERS) -> tuple[int, bytes]:
    """Status and body; status 0 if nothing answers."""
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path, headers=dict(headers))
        response = connection.getresponse()
        return response.status, response.read()
    except (OSError, http.client.HTTPException):
        return 0, b""
    finally:
        connection.close()

"""The gRPC server of every Baton process: health, reflection, keepalive, and a port that is not shared."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from common.errors import ConfigError
from common.rpc.options import KEEPALIVE_INTERVAL_MS, SHARED_OPTIONS, Options
from common.rpc.parsing import ParsingInterceptor

logger = logging.getLogger(__name__)

LIVENESS = "liveness"  # name of a health service that says only that the process runs

_SERVER_OPTIONS: Options = [
    *SHARED_OPTIONS,
    ("grpc.so_reuseport", 0),  # two pods on one port is an error, not a load balancer
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_INTERVAL_MS // 2),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
]


class RpcServer:
    """One listening server. The caller adds its servicers to `grpc_server`, then starts it:

        server = RpcServer("127.0.0.1", 0, ["baton.v1.Decode"])
        add_DecodeServicer_to_server(servicer, server.grpc_server)
        async with server:
            await server.set_serving(True)
            ...

    Health answers NOT_SERVING for "" and each service until `set_serving(True)`, and SERVING for LIVENESS until the
    server stops. Leaving the context ends all calls.
    """

    def __init__(
        self,
        host: str,
        port: int,
        service_names: Sequence[str],
        *,
        interceptors: Sequence[grpc.aio.ServerInterceptor[Any, Any]] = (),
        credentials: grpc.ServerCredentials | None = None,
        limits: Options | None = None,
    ) -> None:
        """`service_names` are full names for health and reflection. Port 0: a free one. `credentials` turn on TLS.
        `limits` are channel arguments that override those of all servers."""
        self.host = host
        self.port = port
        self.grpc_server = grpc.aio.server(
            interceptors=(ParsingInterceptor(), *interceptors),
            options=list(dict([*_SERVER_OPTIONS, *(limits or [])]).items()),
        )
        self._credentials = credentials
        self._service_names = tuple(service_names)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # missing in the type stubs
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc_server)
        reflection.enable_server_reflection(
            (*self._service_names, health.SERVICE_NAME, reflection.SERVICE_NAME), self.grpc_server
        )

    @property
    def address(self) -> str:
        """host:port it listens on; the port is known once it has started."""
        return join_address(self.host, self.port)

    async def start(self) -> None:
        """Binds and listens. Raises ConfigError that names `port` if the address is not available."""
        await self.set_serving(False)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)
        try:
            if self._credentials is None:
                bound = self.grpc_server.add_insecure_port(self.address)
            else:
                bound = self.grpc_server.add_secure_port(self.address, self._credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"--port: cannot listen on {self.address}: address in use or not available", param="port"
            ) from error
        if bound == 0:
            raise ConfigError(f"--port: cannot listen on {self.address}: address in use or not available", param="port")
        self.port = bound
        await self.grpc_server.start()

    async def set_serving(self, serving: bool) -> None:
        """Sets the health of the server and each of its services."""
        response = health_pb2.HealthCheckResponse
        for name in ("", *self._service_names):
            await self._health.set(name, response.SERVING if serving else response.NOT_SERVING)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Rejects new calls, gives running ones `grace_s` seconds, then cancels them. Idempotent."""
        await self._health.enter_graceful_shutdown()
        await self.grpc_server.stop(grace_s or None)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()


def join_address(host: str, port: int) -> str:
    """Returns host:port, with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"

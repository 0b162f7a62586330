"""The running router: everything put together, started, and ended in order."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import socket
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from msgspec.structs import replace

from common.errors import ConfigError
from common.observability.loop_figures import LoopFigures
from common.pb import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc
from common.registry import RedisRegistry
from common.rpc.channel import open_channel
from common.rpc.options import Options
from common.rpc.server import RpcServer
from common.rpc.tls import cluster_tls
from router.config import RouterConfig
from router.discovery.factory import create_discovery
from router.gateway.app import create_app
from router.gateway.grpc.administration import AdminServicer
from router.gateway.grpc.servicer import InferenceServicer
from router.metrics import RouterMetrics
from router.placing.index import PrefixIndex
from router.pods.cluster import Cluster
from router.security.access import AccessControl
from router.security.bodies import BodyBudget
from router.security.grpc_guard import ApiKeyInterceptor
from router.security.grpc_messages import MessageInterceptor, ReadSlots
from router.security.http_connection import bounded_connections
from router.security.refusals import Refusals
from router.security.runtime import Security
from router.security.usage import LocalUsage, Usage
from router.serving.config import ServingConfig
from router.serving.model_roster import ModelRoster
from router.serving.model_sources import read_models
from router.serving.peers import NoPeers, Peers
from router.serving.service import InferenceService

logger = logging.getLogger(__name__)

_INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name
_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name
_AFTER_GRACE_S = 5  # for error events to reach their clients
_PODS_WAIT_S = 10.0
_GC_THRESHOLD = 10_000  # objects; a collection of as many takes less than a millisecond


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """Objects that a router shares with other workers of the same parent."""

    peers: Peers
    usage: Usage  # counts what tenants use of their quotas
    shares_ports: bool  # other processes listen on the same ones, and get the connections until this one can serve


def standalone() -> WorkerContext:
    """Returns the context of a router that is the only one of its process group."""
    return WorkerContext(NoPeers(), LocalUsage(), shares_ports=False)


class Router:
    """One router in this process. `start`, then `stop`; `running` does both."""

    def __init__(self, config: RouterConfig, context: WorkerContext | None = None) -> None:
        """Reads the tokenizer and the model's sampling defaults. Raises ConfigError."""
        self._context = context = context or standalone()
        if not (config.decode or config.prefill or config.discovery.registry):
            raise ConfigError("--decode: at least one pod is required, or a --registry", param="decode")
        models = config.serving.served_models
        sources = read_models(models)
        self.config = config
        self.metrics = RouterMetrics()
        tls = cluster_tls(config.tls)
        opener = tls.open_channel if tls is not None else open_channel
        discovery = config.discovery
        self._registry = RedisRegistry(discovery.registry, discovery.registry_namespace) if discovery.registry else None
        self.cluster = Cluster(
            create_discovery(config.prefill, config.decode, self._registry, self.metrics.discovery),
            self.metrics,
            PrefixIndex(config.serving.routing.max_index_blocks),
            opener,
            config.pod_health,
            models=[source.names for source in sources],
            models_change=bool(models.models_file),
            needs_prefill_pods=config.serving.routing.remote_prefill == "always",
        )
        self.service = InferenceService(_serving_settings(config), sources, self.cluster, self.metrics, context.peers)
        self.security = Security(config.security, config.host, self.metrics.security, context.usage)
        interceptors = [
            _message_bounds(config, self.service, self.security.access),
            ApiKeyInterceptor(self.security.access, self.service.count_error),
        ]
        self._grpc = RpcServer(
            config.host,
            config.grpc_port,
            [_INFERENCE, _ADMIN],
            interceptors=interceptors,
            credentials=self.security.grpc_tls,
            limits=_grpc_limits(config, shares_port=context.shares_ports),
        )
        self._stack = AsyncExitStack()
        self._serving: asyncio.Task[None] | None = None
        self._publishing: asyncio.Task[None] | None = None
        self._securing: asyncio.Task[None] | None = None
        self._roster = ModelRoster(self.service, models) if models.models_file else None
        self._following: asyncio.Task[None] | None = None
        self._adapting: asyncio.Task[None] | None = None
        self._health_changed = asyncio.Event()
        self._http: uvicorn.Server | None = None
        self.port = config.port

    @property
    def http_url(self) -> str:
        """The URL at which HTTP is served."""
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        return f"http{'' if self.security.http_tls is None else 's'}://{host}:{self.port}"

    @property
    def grpc_address(self) -> str:
        """host:port of the gRPC front."""
        return self._grpc.address

    async def start(self) -> None:
        """Listen. Raises ConfigError if a port cannot be had. `stop` undoes a partial start, too."""
        loop_figures = LoopFigures("baton_router", asyncio.get_running_loop())
        self.metrics.registry.register(loop_figures)
        loop_figures.start()
        self._stack.callback(loop_figures.stop)
        self._stack.push_async_callback(self.service.tracing.close)
        self._stack.callback(self.service.close)
        if self._registry is not None:
            self._stack.push_async_callback(self._registry.close)
        inference_pb2_grpc.add_InferenceServicer_to_server(
            InferenceServicer(self.service, self.security.access, has_access_log=self.config.gateway.access_log),
            self._grpc.grpc_server,
        )
        admin_pb2_grpc.add_AdminServicer_to_server(
            AdminServicer(self.service, self.security.access), self._grpc.grpc_server
        )
        self.cluster.on_change(self._health_changed.set)
        await self._stack.enter_async_context(self.cluster)
        self._adapting = _spawn(self.service.adapters.run(), "adapters")
        if self._context.shares_ports:
            await self._wait_for_pods()
        listener = _listen(self.config.host, self.config.port, shares_port=self._context.shares_ports)
        self._stack.callback(listener.close)
        self.port = listener.getsockname()[1]
        await self._stack.enter_async_context(self._grpc)
        self._http = _http_server(self.config, self.service, self.security, self._grpc.port)
        self._serving = _spawn(self._http.serve(sockets=[listener]), "http")
        self._publishing = _spawn(self._publish_health(), "health")
        self._securing = _spawn(self.security.run(), "security")
        if self._roster is not None:
            self._following = _spawn(self._roster.run(), "models")

    def reload(self) -> None:
        """Read all files again that may change: keys, certificates, models."""
        self.security.reload()
        if self._roster is not None:
            self._roster.reload()

    async def stop(self) -> None:
        """Stop accepting, let running requests finish within the grace period, end the rest with an error."""
        grace_s = self.config.shutdown_grace_s
        self.service.stop_accepting()
        self._health_changed.set()
        if self._http is not None:
            self._http.should_exit = True
        await self.service.drain(grace_s)
        await self._grpc.stop(_AFTER_GRACE_S)
        if self._serving is not None:
            await asyncio.gather(self._serving, return_exceptions=True)  # uvicorn ends by itself
        for task in (self._publishing, self._securing, self._following, self._adapting):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self._stack.aclose()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Router]:
        """Started on entry, stopped on exit."""
        try:
            await self.start()
            yield self
        finally:
            await self.stop()

    async def _wait_for_pods(self) -> None:
        """Waits until a request can be served, or for a while: then clients hear why not."""
        changed = self._health_changed
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_PODS_WAIT_S):
                while self.service.unavailable_reason:
                    await changed.wait()
                    changed.clear()
        changed.set()  # wakes _publish_health

    async def _publish_health(self) -> None:
        """grpc.health.v1 says what /health says."""
        while True:
            await self._health_changed.wait()
            self._health_changed.clear()
            await self._grpc.set_serving(not self.service.unavailable_reason)


def settle_garbage_collection() -> None:
    """To be called once the process has started. A full collection would go through all modules, and hold up every
    request meanwhile. Those of young objects take 3 % of the time of requests if each request brings one about."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_GC_THRESHOLD)


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handling: the process decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone."""
        yield


def _grpc_limits(config: RouterConfig, *, shares_port: bool) -> Options:
    return [
        ("grpc.so_reuseport", int(shares_port)),
        ("grpc.max_receive_message_length", config.serving.max_body_bytes),
        ("grpc.max_concurrent_streams", config.limits.max_grpc_streams),
        ("grpc.http2.bdp_probe", 0),  # would let clients send megabytes that no call reads yet
    ]


def _serving_settings(config: RouterConfig) -> ServingConfig:
    """Without prefill pods, now and later, no decision is spent on them."""
    serving = config.serving
    if config.may_have_prefill_pods:
        return serving
    return replace(serving, routing=replace(serving.routing, remote_prefill="never"))


def _message_bounds(config: RouterConfig, service: InferenceService, access: AccessControl) -> MessageInterceptor:
    """Each message that is being read may grow to max_body_bytes."""
    limits, max_body_bytes = config.limits, config.serving.max_body_bytes
    slots = ReadSlots(
        max(1, limits.max_unfinished_body_bytes // max_body_bytes),
        max(1, config.max_client_body_bytes // max_body_bytes),
    )
    bodies = BodyBudget(
        max(limits.max_unfinished_body_bytes, max_body_bytes), max(config.max_client_body_bytes, max_body_bytes)
    )
    return MessageInterceptor(
        slots, bodies, limits.body_timeout_s, lambda: service.max_body_values, service.count_error, access
    )


def _http_server(config: RouterConfig, service: InferenceService, security: Security, grpc_port: int) -> uvicorn.Server:
    limits, metrics = config.limits, security.metrics
    bodies = BodyBudget(limits.max_unfinished_body_bytes, config.max_client_body_bytes)
    metrics.unfinished_body_bytes.set_function(lambda: bodies.num_bytes)
    app = create_app(
        service,
        security.access,
        config.gateway,
        security.open_paths,
        grpc_port=grpc_port,
        allowed_origins=config.security.allowed_origins,
    )
    server = uvicorn.Config(
        app,
        http=bounded_connections(limits, bodies, Refusals(metrics)),
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=round(config.shutdown_grace_s) + _AFTER_GRACE_S,
    )
    server.load()
    server.ssl = security.http_tls  # one of our own, so that its certificate can be renewed
    return _HttpServer(server)


def _listen(host: str, port: int, *, shares_port: bool) -> socket.socket:
    """A listening socket, so that a busy port is a ConfigError and port 0 is known at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shares_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        listener.listen()  # now: who reads the `ready` line may connect before uvicorn is up
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise ConfigError(f"--port: cannot listen on {host}:{port}: {error.strerror}", param="port") from error
    return listener


def _spawn(work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
    task = asyncio.create_task(work, name=name)
    task.add_done_callback(_log_failure)
    return task


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("%s failed", task.get_name(), exc_info=error)

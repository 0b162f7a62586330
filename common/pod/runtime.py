"""The life of a pod:

1. The engine starts: the model is loaded, and the adapters of the settings. A ConfigError ends the process with code 2.
2. The role's front is built on it; the server listens; health answers SERVING; the pod announces itself in the
   registry, if there is one; the `ready` line is printed.
3. It serves until SIGTERM or SIGINT (code 0), or until its engine dies or hangs (code 1).
4. It drains: health answers NOT_SERVING, new work is refused, running work gets `drain_timeout_s`.
5. It withdraws from the registry; the front ends what is left, then server, outputs and engine close, in that order.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from types import TracebackType
from typing import Protocol, Self

import grpc
from prometheus_client import Counter

from common.config import report_config_error
from common.engine.client.base import EngineClient
from common.errors import ConfigError, DeadlineExceededError, EngineDeadError
from common.observability.captured_output import captured_output
from common.observability.logging import setup_logging
from common.observability.loop_figures import LoopFigures
from common.observability.metrics_server import MetricsServer
from common.observability.tracing.tracer import Tracer, create_tracer, trace_span_counter
from common.pb.pods_pb2_grpc import add_PodServicer_to_server
from common.pod.adapters import PodAdapters
from common.pod.admission import Admission
from common.pod.announce import Announcer, open_registry
from common.pod.cache_view import CacheView
from common.pod.config import PodConfig
from common.pod.context import PodContext, Role
from common.pod.control import OpenWork, PodServicer
from common.pod.metrics import PREFIX as METRICS_PREFIX
from common.pod.metrics import PodMetrics
from common.pod.outputs import EngineRequests
from common.pod.profiles import PodProfiles
from common.pod.stats import StatsBoard
from common.pod.tasks import TaskSet
from common.registry import PodRecord, RedisRegistry
from common.rpc.channel import open_channel
from common.rpc.event_loop import AsyncioLoop
from common.rpc.server import RpcServer
from common.rpc.tls import cluster_tls

logger = logging.getLogger(__name__)

POD_SERVICE = "baton.v1.Pod"
EXIT_OK = 0
EXIT_ENGINE_DIED = 1
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
# An engine answers between two steps. No step takes minutes, so an engine that is silent for so long has hung; routers
# notice much earlier, this ends the process.
_ENGINE_TIMEOUT_S = 300.0


class Front(OpenWork, Protocol):
    """The servicers of one role. Built once the engine has started; owns the requests that they open."""

    @property
    def service_names(self) -> tuple[str, ...]:
        """Full names of its gRPC services."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the servicers."""

    async def close(self) -> None:
        """Ends all open work and waits for it. Idempotent."""


FrontFactory = Callable[[PodContext], Front]


class PodRuntime:
    """Composes one pod out of an engine and a front. An async context manager: inside, it serves."""

    def __init__(
        self,
        role: Role,
        config: PodConfig,
        engine: EngineClient,
        make_front: FrontFactory,
        *,
        engine_timeout_s: float = _ENGINE_TIMEOUT_S,
    ) -> None:
        """Takes ownership of `engine`. Raises ConfigError if the pod's certificate cannot be used."""
        self._engine_timeout_s = engine_timeout_s
        self._role = role
        self._tls = cluster_tls(config.tls)
        self.config = config.named(role)
        self._engine = engine
        self._make_front = make_front
        self._stack = AsyncExitStack()
        self._tasks = TaskSet()
        self.metrics_port: int | None = None

    async def start(self) -> None:
        """Steps 1 and 2. Raises ConfigError or EngineDeadError; no resource is left open then."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._engine.close)
            registry = open_registry(self.config.announcing)  # before the model is loaded, so that errors come early
            if registry is not None:
                stack.push_async_callback(registry.close)
            trace_spans = trace_span_counter(METRICS_PREFIX)
            tracer = self._create_tracer(trace_spans)
            if tracer is not None:
                stack.push_async_callback(asyncio.to_thread, tracer.close)
            self.context = context = await self._start_engine(tracer, trace_spans)
            self._outputs = asyncio.create_task(context.requests.run(), name="engine outputs")
            stack.push_async_callback(self._end_outputs)
            stack.push_async_callback(self._tasks.close)
            stack.push_async_callback(context.adapters.close)
            await context.adapters.load_permanent(self.config.lora_modules)
            front = self._make_front(context)
            self.server = RpcServer(
                self.config.host,
                self.config.port,
                (POD_SERVICE, *front.service_names),
                credentials=self._tls.server_credentials() if self._tls is not None else None,
            )
            front.add_to(self.server.grpc_server)
            profiles = PodProfiles(self._engine)
            add_PodServicer_to_server(PodServicer(context, front, profiles), self.server.grpc_server)
            stack.push_async_callback(self.server.stop)
            stack.push_async_callback(front.close)
            stack.push_async_callback(profiles.close)
            if self.config.metrics_port is not None:
                loop_figures = LoopFigures(METRICS_PREFIX, asyncio.get_running_loop())
                context.metrics.registry.register(loop_figures)
                loop_figures.start()
                stack.callback(loop_figures.stop)
                metrics = MetricsServer(self.config.host, self.config.metrics_port, context.metrics.registry)
                self.metrics_port = stack.enter_context(metrics).port
            await self.server.start()
            context.admission.on_change(self._publish_draining)
            await self.server.set_serving(True)
            if registry is not None:
                self._announce(registry, stack)
            self._stack = stack.pop_all()
        logger.info("serving %s on %s", self.config.model_name, self.address)

    @property
    def address(self) -> str:
        """host:port of its gRPC server."""
        return self.server.address

    @property
    def ready_line(self) -> str:
        """The line that the process prints once it serves."""
        spec = self.context.spec
        line = f"ready role={self._role} address={self.address} pod_id={self.config.pod_id}"
        line += f" device={spec.device} kernels={spec.kernels}"
        if spec.data_parallel_size > 1:
            line += f" engines={spec.data_parallel_size}"
        if spec.num_threads:
            line += f" threads={spec.num_threads}"
        return line if self.metrics_port is None else f"{line} metrics_port={self.metrics_port}"

    async def serve(self, stop: asyncio.Event) -> int:
        """Steps 3 and 4. Returns the exit code. `stop` requests the drain."""
        stopping = asyncio.create_task(stop.wait(), name="stop")
        hanging = asyncio.create_task(self._until_engine_hangs(), name="engine hangs")
        try:
            await asyncio.wait({stopping, hanging, self._outputs}, return_when=asyncio.FIRST_COMPLETED)
            if stopping.done() and not self._outputs.done():
                await self._drain()
        finally:
            stopping.cancel()
            hanging.cancel()
        if self._outputs.done():
            logger.error("the engine died: %s", self._outputs.exception())
        elif stopping.done():
            return EXIT_OK
        else:
            logger.error("the engine hangs: no answer for %g s", self._engine_timeout_s)
        await self.server.set_serving(False)
        return EXIT_ENGINE_DIED

    async def stop(self) -> None:
        """Step 5. Idempotent."""
        await self._stack.aclose()

    def _announce(self, registry: RedisRegistry, stack: AsyncExitStack) -> None:
        """Keeps the pod in the registry as long as it serves. `stack` withdraws it first."""
        config, context = self.config.announcing, self.context
        record = PodRecord(
            role=self._role,
            address=config.address(self.server.host, self.server.port),
            pod_id=context.pod_id,
            incarnation=context.incarnation,
            fingerprint=context.spec.fingerprint.hex(),
            num_blocks=context.spec.num_blocks,
            max_num_seqs=context.spec.max_num_seqs,
            max_model_len=context.spec.max_model_len,
            lease_s=config.registry_lease_s,
        )
        announcer = Announcer(registry, record)
        announcing = self._tasks.spawn(announcer.run(), "announce")

        async def withdraw() -> None:
            announcing.cancel()
            await asyncio.wait({announcing})  # a running renewal would restore the record
            await announcer.withdraw()

        stack.push_async_callback(withdraw)

    def _create_tracer(self, trace_spans: Counter) -> Tracer | None:
        service, instance = f"baton-{self._role}", self.config.pod_id
        return create_tracer(self.config.tracing, service=service, instance=instance, counter=trace_spans)

    async def _start_engine(self, tracer: Tracer | None, trace_spans: Counter) -> PodContext:
        spec = await self._engine.start()
        stats = StatsBoard(*await self._engine.stats_by_engine())
        caches = tuple(CacheView() for _ in stats.by_engine)
        metrics = PodMetrics(stats, spec, self.config, trace_spans)
        return PodContext(
            role=self._role,
            config=self.config,
            incarnation=secrets.randbits(63),
            spec=spec,
            engine=self._engine,
            requests=EngineRequests(self._engine, stats, *caches),
            stats=stats,
            caches=caches,
            admission=Admission(self.config.max_open),
            adapters=PodAdapters(self._engine, self.config.lora_grace_s, stats.touch),
            metrics=metrics,
            open_channel=self._tls.open_channel if self._tls is not None else open_channel,
            tracer=tracer,
        )

    async def _until_engine_hangs(self) -> None:
        timeout_s = self._engine_timeout_s
        try:
            while True:
                async with asyncio.timeout(timeout_s):
                    await self._sign_of_life()
                await asyncio.sleep(timeout_s / 10)
        except TimeoutError:
            pass
        except EngineDeadError:  # dead, which `serve` handles
            await asyncio.wait({self._outputs})

    async def _sign_of_life(self) -> None:
        while True:
            with suppress(DeadlineExceededError):  # of one call
                await self._engine.stats()
                return

    async def _drain(self) -> None:
        admission = self.context.admission
        admission.end()
        logger.info("draining: %d requests and transfers open", admission.num_open)
        idle = asyncio.create_task(admission.wait_idle(), name="idle")
        timeout_s = self.config.drain_timeout_s
        await asyncio.wait({idle, self._outputs}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        idle.cancel()
        if admission.num_open:
            logger.warning(
                "%d requests and transfers did not finish within %g s of draining, ending them",
                admission.num_open,
                timeout_s,
            )

    def _publish_draining(self) -> None:
        self._tasks.spawn(self._publish_health(), "health")
        self.context.stats.touch()

    async def _publish_health(self) -> None:
        await self.server.set_serving(not self.context.admission.draining)

    async def _end_outputs(self) -> None:
        self._outputs.cancel()
        with suppress(asyncio.CancelledError, EngineDeadError):
            await self._outputs

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()


def run_pod(runtime: PodRuntime) -> int:
    """Runs a pod in this process until it ends. Returns the exit code. Called on the main thread."""
    config = runtime.config
    try:
        with captured_output() as log:
            setup_logging(config.log_level, config.pod_id, config.log_format, stream=log)
            with asyncio.Runner(loop_factory=AsyncioLoop) as runner:
                return runner.run(_run(runtime))
    except ConfigError as error:
        return report_config_error(error)
    except EngineDeadError as error:
        logger.error("the engine did not start: %s", error)
        return EXIT_ENGINE_DIED


async def _run(runtime: PodRuntime) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in _STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    try:
        if not await _start_unless(stop, runtime):
            return EXIT_OK
        try:
            sys.stdout.write(runtime.ready_line + "\n")
            sys.stdout.flush()
            return await runtime.serve(stop)
        finally:
            await runtime.stop()
    finally:
        # It ends by itself now. asyncio closes what a signal would be written to before it removes the handlers.
        for number in _STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)


async def _start_unless(stop: asyncio.Event, runtime: PodRuntime) -> bool:
    """Starts the pod. False: a stop was requested before it served, as loading a model takes a while."""
    starting = asyncio.create_task(runtime.start(), name="start")
    stopping = asyncio.create_task(stop.wait(), name="stop")
    try:
        await asyncio.wait({starting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
            return True
        starting.cancel()
        with suppress(asyncio.CancelledError):
            await starting
            await runtime.stop()
        return False
    finally:
        stopping.cancel()

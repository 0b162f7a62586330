"""One pod, watched for as long as it is listed and has requests of this router.

Each connection goes: connect -> GetInfo -> follow health and stats (and, on a decode pod, run the session) until any
of the three ends -> back off -> connect again. Whether the pod may be used is for the Cluster to judge.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import math
import random
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import BatonError, InvalidRequestError, UnavailableError
from common.observability.tracing.context import Metadata
from common.pb import common_pb2, pods_pb2, pods_pb2_grpc
from common.rpc.channel import ChannelOpener, connect, open_channel
from common.rpc.convert import adapter_name_to_pb
from common.rpc.errors import error_from_pb, from_rpc_error
from common.step_times import StepTimes
from common.types import AdapterName
from common.types.pooling import GENERATE
from router.discovery import Role
from router.placing.index import InvalidEventError, PrefixIndex
from router.placing.policies import HeldAdapters, PodFacts
from router.pods.adapters import ReportedAdapters
from router.pods.canary import CanaryLoop, try_decode, try_pool, try_prefill
from router.pods.config import HealthConfig
from router.pods.health import Outcome, PodHealth, Reason
from router.pods.pod_engine import MAX_ENGINES, PodEngine, join_reports
from router.pods.session import DecodeSession, DeltaSink
from router.pods.stall import StallWatch
from router.pods.stats import follow_stats
from router.pods.suspicion import Cause

logger = logging.getLogger(__name__)

KV_FAILURE_PARAM = "kv_failure_policy"  # in a pod's error: the KV did not come and may not be computed instead

MAX_BACKOFF_S = 2.0

_CONNECT_TIMEOUT_S = 5.0
_INFO_TIMEOUT_S = 5.0
_CONTROL_TIMEOUT_S = 5.0  # of an operator's call
_LOAD_TIMEOUT_S = 300.0  # of one that reads an adapter, which may have to be downloaded
_FIRST_BACKOFF_S = 0.1
_ENGINES = "data_parallel_size"

_Response = TypeVar("_Response")


class PodState(enum.Enum):
    """The state of a pod as the router sees it."""

    CONNECTING = "connecting"  # not reached yet
    DOWN = "down"  # was reached, or refused to be; tried again
    NOT_SERVING = "not_serving"  # connected, but its health says no
    DRAINING = "draining"  # finishes what it has
    LEAVING = "leaving"  # no longer listed; finishes what this router has on it
    EJECTED = "ejected"  # fits and says that it serves, but does not; gets nothing but canaries for a while
    REFUSED = "refused"  # connected, but does not fit the cluster
    READY = "ready"  # takes requests


class PodOwner(Protocol):
    """Permits ejections of pods, and counts them and canaries. The Cluster is one."""

    def may_eject(self, pod: Pod, *, is_certain: bool) -> bool:
        """Whether enough others of its role are left. See HealthOwner."""

    def note_ejection(self, pod: Pod, reason: Reason) -> None:
        """Count it."""

    def note_canary(self, pod: Pod, outcome: Outcome) -> None:
        """Count it."""


class Pod:
    """A pod as the router knows it, and its connection while there is one."""

    def __init__(
        self,
        role: pods_pb2.PodRole.ValueType,
        address: str,
        on_change: Callable[[], None],
        index: PrefixIndex,
        opener: ChannelOpener = open_channel,
        *,
        health: HealthConfig,
        owner: PodOwner,
    ) -> None:
        """`on_change` is called whenever the state may have changed."""
        self.role = role
        self.address = address
        self.listed = True  # some source names it; set by the Cluster
        self.shown = PodState.CONNECTING  # the state that was last told; the Cluster's
        self.shown_adapters: ReportedAdapters | None = None  # those that were last told; the Cluster's
        self.model_names: tuple[str, ...] = ()  # of the model that it serves here, set by ModelPods
        self.on_idle: Callable[[], None] = _nothing  # called when the last request of this router has ended
        self.violation = ""  # what it reported that is invalid; it is refused as long as this incarnation lives
        self.info: pods_pb2.PodInfo | None = None  # None while not connected
        self.pod_id: str | None = None  # of the last pod that was connected at this address
        self.adapters: ReportedAdapters | None = None  # None: it has reported none of this connection
        self.session: DecodeSession | None = None  # None unless this is a connected decode pod
        self.fits: bool | None = None  # whether it fits the cluster; None: not known yet. Set by the Cluster
        self.refusal = ""  # why it does not fit
        self.health = PodHealth(health, self)
        self.canaries = CanaryLoop(self, self.health, lambda outcome: owner.note_canary(self, outcome))
        self.stalls = StallWatch(self, self.health)
        self._owner = owner
        self._on_change = on_change
        self._open_channel = opener
        self._failure = ""  # why the last connection ended
        self._ever_tried = False
        self._serving = False
        self._prefill_stub: pods_pb2_grpc.PrefillAsyncStub | None = None
        self._pooling_stub: pods_pb2_grpc.PoolingAsyncStub | None = None
        self._control_stub: pods_pb2_grpc.PodAsyncStub | None = None
        self._index = index
        self.known_engines = [self._new_engine(0)]  # all that it has had over its connections
        self._invalid_incarnation: int | None = None  # the incarnation that has sent something invalid
        self._incarnation: int | None = None  # the last one that was connected

    @property
    def role_name(self) -> Role:
        """ "prefill" or "decode"."""
        return "prefill" if self.role == pods_pb2.POD_ROLE_PREFILL else "decode"

    @property
    def engines(self) -> list[PodEngine]:
        """The pod's engines, each a target for requests; those of the last connection, if there is none."""
        return self.known_engines if self.info is None else self.known_engines[: _num_engines(self.info)]

    def use_step_times(self, step_times: StepTimes) -> None:
        """Takes the step times of all pods of its role and model."""
        for engine in self.known_engines:
            engine.load.step_times = step_times

    @property
    def num_requests(self) -> int:
        """Requests of this router on it."""
        return sum(engine.load.num_requests for engine in self.known_engines)

    @property
    def state(self) -> PodState:
        """The pod's state now."""
        if not self.listed:
            return PodState.LEAVING
        if self.info is None:
            return PodState.DOWN if self._ever_tried else PodState.CONNECTING
        if not self.fits:
            return PodState.CONNECTING if self.fits is None else PodState.REFUSED
        by_engine = [engine.stats for engine in self.engines]
        if None in by_engine or (self.session is not None and self.session.broken):
            return PodState.NOT_SERVING
        if any(
            stats.draining for stats in by_engine if stats is not None
        ):  # a draining pod's health says NOT_SERVING as well
            return PodState.DRAINING
        if not self._serving:
            return PodState.NOT_SERVING
        return PodState.EJECTED if self.health.is_ejected else PodState.READY

    @property
    def detail(self) -> str:
        """Why it is in this state, for a person; may be empty."""
        if not self.listed:
            return f"no longer listed; {self.num_requests} requests to finish"
        if self.info is None:
            return self._failure
        if self.fits and self.health.is_ejected:
            return self.health.detail
        return "waiting for a decode pod to say which model is served" if self.fits is None else self.refusal

    @property
    def stats(self) -> pods_pb2.PodStats | None:
        """Its last report, of all engines together; None while there is none of this connection."""
        by_engine = [engine.stats for engine in self.engines if engine.stats is not None]
        if len(by_engine) <= 1:
            return by_engine[0] if by_engine else None
        return join_reports(by_engine)

    def facts(self, engine: PodEngine) -> PodFacts:
        """Returns the facts of one of its engines that do not change, for policies. Only for a ready pod."""
        assert self.info is not None
        assert engine.slot is not None
        return PodFacts(
            address=self.address,
            data_parallel_rank=engine.data_parallel_rank,
            slot=engine.slot,
            connector=self.info.connector,
            num_blocks=max(1, self.info.num_blocks),
            max_num_seqs=max(1, self.info.max_num_seqs),
            max_num_batched_tokens=max(1, self.info.max_num_batched_tokens),
            max_model_len=self.info.max_model_len,
            target_itl_s=self.info.target_itl_ms / 1000 or math.inf,
            min_prefill_tokens=max(1, self.info.min_prefill_tokens),
        )

    def on_kv_events(self, engine: PodEngine, events: pods_pb2.KVEvents) -> bool:
        """Take over what the pod says about an engine's prefix cache, see PrefixIndex.apply. False: a snapshot is
        needed.

        A pod that reports something invalid gets no more requests until it is restarted.
        """
        if engine.slot is None or self.violation:
            return True
        try:
            applied = engine.apply(events)
        except InvalidEventError as error:
            self.reject(f"its KV events are invalid: {error.message}")
            return True
        if not applied:
            logger.warning("KV events of %s pod %s are missing; a snapshot is due", self.role_name, self.address)
        return applied

    async def prefill(
        self, request: pods_pb2.PrefillRequest, timeout_s: float, cause: Cause, metadata: Metadata | None = None
    ) -> pods_pb2.PrefillResponse:
        """Run the prefill leg of `cause`, with `metadata` in the call. Raises a BatonError; cancelling ends the work on
        the pod."""
        since = self.health.now()
        try:
            response = await self._prefill(request, timeout_s, metadata)
        except BatonError as error:
            self._note_outcome(error, "prefill", cause, since)
            raise
        self._note_outcome(None, "prefill", cause)
        return response

    async def pool(
        self, request: pods_pb2.PoolRequest, timeout_s: float, cause: Cause, metadata: Metadata | None = None
    ) -> pods_pb2.PoolResponse:
        """Computes the numbers of a prompt. Otherwise as `prefill`."""
        since = self.health.now()
        try:
            response = await self._pool(request, timeout_s, metadata)
        except BatonError as error:
            self._note_outcome(error, "prefill", cause, since)
            raise
        self._note_outcome(None, "prefill", cause)
        return response

    async def _pool(
        self, request: pods_pb2.PoolRequest, timeout_s: float, metadata: Metadata | None = None
    ) -> pods_pb2.PoolResponse:
        stub = self._pooling_stub
        if stub is None:
            raise UnavailableError(f"{self.role_name} pod {self.address} is not connected")
        return await self._call(stub.Pool(request, timeout=timeout_s, metadata=metadata))

    async def _prefill(
        self, request: pods_pb2.PrefillRequest, timeout_s: float, metadata: Metadata | None = None
    ) -> pods_pb2.PrefillResponse:
        if self._prefill_stub is None:
            raise UnavailableError(f"prefill pod {self.address} is not connected")
        return await self._call(self._prefill_stub.Prefill(request, timeout=timeout_s, metadata=metadata))

    async def _call(self, call: Awaitable[_Response]) -> _Response:
        """Raises a BatonError."""
        try:
            return await call
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            raise UnavailableError("the connection was closed") from None  # `watch` has closed it while the call ran

    def reject(self, violation: str) -> None:
        """It reported something invalid: it is refused as long as this incarnation lives, whatever else happens."""
        if self.info is not None and not self.violation:
            self.violation = violation
            self._invalid_incarnation = self.info.incarnation
            self._on_change()

    # --- administration ---

    async def drain(self) -> int:
        """Has the pod take no new requests of any router. Returns how many requests and transfers still run on it.
        Raises a BatonError."""
        request = pods_pb2.DrainRequest(returns_at_once=True)
        response = await self._control(lambda stub: stub.Drain(request, timeout=_CONTROL_TIMEOUT_S))
        return response.num_unfinished

    async def undrain(self) -> None:
        """Has the pod take requests again. Raises a BatonError."""
        await self._control(lambda stub: stub.Undrain(pods_pb2.UndrainRequest(), timeout=_CONTROL_TIMEOUT_S))

    async def reset_prefix_cache(self) -> None:
        """Has the pod forget the blocks that no request uses. Raises a BatonError."""
        request = pods_pb2.ResetPrefixCacheRequest()
        await self._control(lambda stub: stub.ResetPrefixCache(request, timeout=_CONTROL_TIMEOUT_S))

    async def load_adapter(self, path: str, digest: bytes = b"", timeout_s: float = _LOAD_TIMEOUT_S) -> bytes:
        """Has the pod load an adapter, or keep it; see Pod.LoadAdapter. Returns its digest. Raises a BatonError."""
        request = pods_pb2.LoadAdapterRequest(path=path, digest=digest)
        response = await self._control(lambda stub: stub.LoadAdapter(request, timeout=timeout_s))
        return response.digest

    async def name_adapter(self, name: AdapterName) -> None:
        """Has the pod give an adapter a name, or take it away; see Pod.NameAdapter. Raises a BatonError."""
        request = pods_pb2.NameAdapterRequest(name=adapter_name_to_pb(name))
        await self._control(lambda stub: stub.NameAdapter(request, timeout=_CONTROL_TIMEOUT_S))

    async def _control(self, call: Callable[[pods_pb2_grpc.PodAsyncStub], Awaitable[_Response]]) -> _Response:
        if self._control_stub is None:
            raise UnavailableError(f"{self.role_name} pod {self.address} is not connected")
        return await self._call(call(self._control_stub))

    # --- health ---

    @property
    def can_be_tried(self) -> bool:
        """See canary.Subject."""
        return self.state in (PodState.READY, PodState.EJECTED)

    @property
    def is_stepping(self) -> bool:
        """See stall.Engine."""
        return any(engine.load.is_stepping for engine in self.engines)

    @property
    def longest_step_s(self) -> float | None:
        """See stall.Engine."""
        if self.info is None:
            return None
        limit = self.info.max_num_batched_tokens
        known = [engine.load.longest_step_s(limit) for engine in self.engines]
        longest = [seconds for seconds in known if seconds is not None]
        return max(longest) if len(longest) == len(known) else None

    async def try_out(self, timeout_s: float) -> None:
        """See canary.Subject."""
        if self.info is not None and (tasks := self.info.pooling.tasks) and GENERATE not in tasks:
            await try_pool(lambda request: self._pool(request, timeout_s), tasks)
        elif self.session is not None:
            await try_decode(self.session, timeout_s)
        else:
            await try_prefill(lambda request: self._prefill(request, timeout_s))

    def may_eject(self, *, is_certain: bool) -> bool:
        """See HealthOwner."""
        return self._owner.may_eject(self, is_certain=is_certain)

    def ejected(self, reason: Reason) -> None:
        """See HealthOwner."""
        self._owner.note_ejection(self, reason)
        self.canaries.wake()
        self._on_change()

    def recovered(self) -> None:
        """See HealthOwner."""
        self._on_change()

    def _on_decode_end(self, delta: pods_pb2.TokenDelta, sink: DeltaSink) -> None:
        """A request on the session has ended."""
        if sink.cause is None:
            return
        error = None
        if delta.HasField("error"):
            error = error_from_pb(delta.error)
            if error.param == KV_FAILURE_PARAM:  # the handoff failed, not this pod
                return
        elif delta.finish_reason == common_pb2.FINISH_REASON_ABORT:  # not by us: then there would be no sink
            error = UnavailableError("it ended the request")
        self._note_outcome(error, "decode", sink.cause)

    def note_disagreement(self, error: BatonError, cause: Cause) -> None:
        """Notes tokens that differ from those that another pod has computed."""
        self._note_outcome(error, "decode", cause)

    def note_invalid(self, error: BatonError, cause: Cause) -> None:
        """Notes an invalid answer."""
        self.health.note_invalid(error.message, cause)

    def _note_outcome(self, error: BatonError | None, reason: Reason, cause: Cause, since: float | None = None) -> None:
        is_draining = any(engine.stats is not None and engine.stats.draining for engine in self.engines)
        if not is_draining:  # a draining pod may refuse requests
            self.health.note_outcome(error, reason, cause, since=since)

    # --- the connection ---

    async def watch(self) -> None:
        """Connect and follow, for ever. Cancel to end."""
        backoff_s = _FIRST_BACKOFF_S
        while True:
            connected = False
            try:
                async with self._open_channel(self.address) as channel:
                    await self._open(channel)
                    connected = True
                    await self._follow(channel)
            except BatonError as error:
                self._lose(error)
            except Exception as error:  # whatever it is, the pod is tried again
                logger.exception("%s pod %s", self.role_name, self.address)
                self._lose(BatonError(f"internal error: {error!r}"))
            finally:
                self._disconnect()
            backoff_s = _FIRST_BACKOFF_S if connected else min(2 * backoff_s, MAX_BACKOFF_S)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # jitter: routers must not come back in step

    async def _open(self, channel: grpc.aio.Channel) -> None:
        await connect(channel, _CONNECT_TIMEOUT_S)
        control = pods_pb2_grpc.PodStub(channel)
        try:
            info = await control.GetInfo(pods_pb2.GetInfoRequest(), timeout=_INFO_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        if info.role == self.role == pods_pb2.POD_ROLE_DECODE:
            self.session = DecodeSession(channel, self._on_change, self._on_decode_end)
        elif info.role == self.role:
            self._prefill_stub = pods_pb2_grpc.PrefillStub(channel)
        self.info = info
        self.pod_id = info.pod_id
        self._control_stub = control
        self._pooling_stub = pods_pb2_grpc.PoolingStub(channel)
        if info.incarnation != self._invalid_incarnation:
            self.violation = ""
        for rank in range(len(self.known_engines), _num_engines(info)):
            self.known_engines.append(self._new_engine(rank))
        for engine in self.engines:
            engine.connected(info)
        if (num_engines := info.parallel_sizes.get(_ENGINES, 1)) > MAX_ENGINES:
            self.reject(f"it has {num_engines} engines, more than {MAX_ENGINES}")
        if info.incarnation != self._incarnation:
            self._incarnation = info.incarnation
            self.health.restarted()

    async def _follow(self, channel: grpc.aio.Channel) -> NoReturn:
        """Raises why one of the streams has ended."""
        followers: list[Coroutine[Any, Any, NoReturn]] = [
            self._follow_health(channel),
            self._follow_stats(channel),
            self.canaries.run(),
            self.stalls.run(),
        ]
        if self.session is not None:
            followers.append(self.session.run())
        error = await _first_failure(followers)
        try:
            raise error
        finally:
            del error  # else it and this frame keep each other, and the connection, until a garbage collection

    async def _follow_health(self, channel: grpc.aio.Channel) -> NoReturn:
        try:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            async for response in watch:
                self._serving = response.status == health_pb2.HealthCheckResponse.SERVING
                self._on_change()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        raise UnavailableError("the pod ended the health stream")

    async def _follow_stats(self, channel: grpc.aio.Channel) -> NoReturn:
        await follow_stats(pods_pb2_grpc.PodStub(channel), self._take_stats)

    def _take_stats(self, stats: pods_pb2.PodStats) -> bool:
        """False: KV events are missing."""
        if stats.data_parallel_rank >= len(self.engines):
            self.reject(f"it reports figures of engine {stats.data_parallel_rank}, but has {len(self.engines)}")
            return True
        engine = self.engines[stats.data_parallel_rank]
        changed = engine.stats is None or engine.stats.draining != stats.draining
        if engine.stats is not None:  # the first one tells nothing new
            self.health.worked()
        engine.stats = stats
        engine.load.report(stats)
        changed = self._take_adapters(stats, engine) or changed
        self.stalls.reported()
        if changed:
            self._on_change()
        return not stats.HasField("kv_events") or self.on_kv_events(engine, stats.kv_events)

    def _take_adapters(self, stats: pods_pb2.PodStats, engine: PodEngine) -> bool:
        """Returns whether the pod's adapters have changed."""
        is_told = stats.HasField("adapters")
        if is_told:
            try:
                self.adapters = ReportedAdapters.of(stats.adapters)
            except InvalidRequestError as error:
                self.reject(f"it reports invalid adapters: {error.message}")
        loaded = frozenset[bytes]() if self.adapters is None else self.adapters.loaded
        max_running = 0 if self.info is None else self.info.max_adapters
        for each in self.engines if is_told else [engine]:
            running = frozenset(stats.running_adapters) if each is engine else each.adapters.running
            each.hold(HeldAdapters(loaded, running, max_running))
        return is_told

    def _lose(self, error: BatonError) -> None:
        if self.info is not None:
            logger.warning("lost %s pod %s: %s", self.role_name, self.address, error.message)
        elif error.message != self._failure:
            logger.info("cannot reach %s pod %s yet: %s", self.role_name, self.address, error.message)
        self._failure = error.message

    def _disconnect(self) -> None:
        self._ever_tried = True
        self.info = None
        self.session = None
        self._prefill_stub = None
        self._pooling_stub = None
        self._control_stub = None
        for engine in self.known_engines:
            engine.stats = None
            engine.hold(HeldAdapters())
        self.adapters = None
        self._serving = False
        self.fits = None
        self.refusal = ""
        self._on_change()
        for engine in self.known_engines:
            engine.disconnected()

    def _new_engine(self, data_parallel_rank: int) -> PodEngine:
        engine = PodEngine(self._index, data_parallel_rank)
        engine.load.on_idle = self._note_idle
        if data_parallel_rank:
            engine.load.step_times = self.known_engines[0].load.step_times
        return engine

    def _note_idle(self) -> None:
        if not self.num_requests:
            self.on_idle()


def _num_engines(info: pods_pb2.PodInfo) -> int:
    return min(max(1, info.parallel_sizes.get(_ENGINES, 1)), MAX_ENGINES)


def _nothing() -> None:
    pass


def _is_cancelled() -> bool:
    """Whether this task is being cancelled."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def _first_failure(followers: Sequence[Coroutine[Any, Any, NoReturn]]) -> BaseException:
    """Runs all until one fails, and cancels the others. Returns why it failed.

    No TaskGroup: it forgets that it was cancelled if a task fails in the same moment.
    """
    tasks = [asyncio.create_task(follower) for follower in followers]
    try:
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return next(error for task in ended if (error := task.exception()) is not None)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

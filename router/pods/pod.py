"""One pod, watched for as long as it is listed and has requests of this router.

Each connection goes: connect -> GetInfo -> follow health and stats (and, on a decode pod, run the session) until any
of the three ends -> back off -> connect again. Whether the pod may be used is for the Cluster to judge.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import random
from collections.abc import Callable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.errors import BatonError, UnavailableError
from common.pb import pods_pb2, pods_pb2_grpc
from common.rpc.channel import ChannelOpener, connect, open_channel
from common.rpc.errors import from_rpc_error
from router.discovery import Role
from router.index import ImpossibleEventError, PrefixIndex
from router.pods.load import PodLoad
from router.pods.session import DecodeSession
from router.pods.stats import follow_stats
from router.policies import PodFacts, StepTimes

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_INFO_TIMEOUT_S = 5.0
_FIRST_BACKOFF_S = 0.1
_MAX_BACKOFF_S = 2.0


class PodState(enum.Enum):
    """What a pod is to the router."""

    CONNECTING = "connecting"  # not reached yet
    DOWN = "down"  # was reached, or refused to be; tried again
    NOT_SERVING = "not_serving"  # connected, but its health says no
    DRAINING = "draining"  # finishes what it has
    LEAVING = "leaving"  # no longer listed; finishes what this router has on it
    REFUSED = "refused"  # connected, but does not fit the cluster
    READY = "ready"  # takes requests


class Pod:
    """What is known of one pod, and its connection while there is one."""

    def __init__(
        self,
        role: pods_pb2.PodRole.ValueType,
        address: str,
        on_change: Callable[[], None],
        index: PrefixIndex,
        step_times: StepTimes,
        opener: ChannelOpener = open_channel,
    ) -> None:
        """`on_change` is called whenever the state may have changed; `step_times` are those of the role."""
        self.role = role
        self.address = address
        self.listed = True  # some source names it; set by the Cluster
        self.shown = PodState.CONNECTING  # the state that was last told; the Cluster's
        self.load = PodLoad(step_times)
        self.slot: int | None = None  # in the index; None while not connected
        self.is_fed = False  # it has told which blocks it holds
        self.lie = ""  # what it reported that cannot be true; it is refused for as long as it lives
        self.info: pods_pb2.PodInfo | None = None  # None while not connected
        self.session: DecodeSession | None = None  # of a connected decode pod
        self.fits: bool | None = None  # into the cluster; None: it cannot be said yet. Set by the Cluster
        self.refusal = ""  # why it does not fit
        self._on_change = on_change
        self._open_channel = opener
        self._failure = ""  # why the last connection ended
        self._ever_tried = False
        self._serving = False
        self._stats: pods_pb2.PodStats | None = None
        self._prefill_stub: pods_pb2_grpc.PrefillAsyncStub | None = None
        self._index = index
        self._liar: int | None = None  # its incarnation

    @property
    def role_name(self) -> Role:
        """ "prefill" or "decode"."""
        return "prefill" if self.role == pods_pb2.POD_ROLE_PREFILL else "decode"

    @property
    def state(self) -> PodState:
        """What it is to the router now."""
        if not self.listed:
            return PodState.LEAVING
        if self.info is None:
            return PodState.DOWN if self._ever_tried else PodState.CONNECTING
        if not self.fits:
            return PodState.CONNECTING if self.fits is None else PodState.REFUSED
        if self._stats is None or not self._serving or (self.session is not None and self.session.broken):
            return PodState.NOT_SERVING
        return PodState.DRAINING if self._stats.draining else PodState.READY

    @property
    def detail(self) -> str:
        """Why it is in this state, for a person; may be empty."""
        if not self.listed:
            return f"no longer listed; {self.load.num_requests} requests to finish"
        if self.info is None:
            return self._failure
        return "waiting for a decode pod to say which model is served" if self.fits is None else self.refusal

    def facts(self) -> PodFacts:
        """What policies see of it that does not change. Only for a ready pod."""
        assert self.info is not None
        assert self.slot is not None
        return PodFacts(
            address=self.address,
            slot=self.slot,
            connector=self.info.connector,
            num_blocks=max(1, self.info.num_blocks),
            max_num_seqs=max(1, self.info.max_num_seqs),
            max_num_batched_tokens=max(1, self.info.max_num_batched_tokens),
            max_model_len=self.info.max_model_len,
        )

    def on_kv_events(self, sequence: int, stored: bytes, removed: bytes, *, is_snapshot: bool) -> bool:
        """Take over what the pod says about its prefix cache, see PrefixIndex.apply. False: a snapshot is needed.

        A pod that says what cannot be true gets no more requests until it is started anew.
        """
        if self.slot is None or self.lie:
            return True
        try:
            applied = self._index.apply(self.slot, sequence, stored, removed, is_snapshot=is_snapshot)
        except ImpossibleEventError as error:
            assert self.info is not None
            self.lie = f"its KV events cannot be true: {error.message}"
            self._liar = self.info.incarnation
            self._on_change()
            return True
        self.is_fed = self.is_fed or applied
        if not applied:
            logger.warning("KV events of %s pod %s are missing; a snapshot is due", self.role_name, self.address)
        return applied

    def tells_blocks(self, block_size: int) -> bool:
        """Whether it tells which blocks of so many tokens it holds."""
        return self.is_fed and self.info is not None and self.info.block_size == block_size

    async def prefill(self, request: pods_pb2.PrefillRequest, timeout_s: float) -> pods_pb2.PrefillResponse:
        """Run the prefill leg of a request. Raises a BatonError; cancelling ends the work on the pod."""
        if self._prefill_stub is None:
            raise UnavailableError(f"prefill pod {self.address} is not connected")
        try:
            return await self._prefill_stub.Prefill(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error

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
            backoff_s = _FIRST_BACKOFF_S if connected else min(2 * backoff_s, _MAX_BACKOFF_S)
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))  # jitter: routers must not come back in step

    async def _open(self, channel: grpc.aio.Channel) -> None:
        await connect(channel, _CONNECT_TIMEOUT_S)
        try:
            info = await pods_pb2_grpc.PodStub(channel).GetInfo(pods_pb2.GetInfoRequest(), timeout=_INFO_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        if info.role == self.role == pods_pb2.POD_ROLE_DECODE:
            self.session = DecodeSession(channel, self._on_change)
        elif info.role == self.role:
            self._prefill_stub = pods_pb2_grpc.PrefillStub(channel)
        self.info = info
        self.slot = self._index.join(capacity=max(1, info.num_blocks))
        self.is_fed = False
        if info.incarnation != self._liar:
            self.lie = ""
        self.load.connected()

    async def _follow(self, channel: grpc.aio.Channel) -> None:
        """Until one of the streams ends; raises why."""
        followers = [self._follow_health(channel), self._follow_stats(channel)]
        if self.session is not None:
            followers.append(self.session.run())
        try:
            async with asyncio.TaskGroup() as group:
                for follower in followers:
                    group.create_task(follower)
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None

    async def _follow_health(self, channel: grpc.aio.Channel) -> None:
        try:
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            async for response in watch:
                self._serving = response.status == health_pb2.HealthCheckResponse.SERVING
                self._on_change()
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        raise UnavailableError("the pod ended the health stream")

    async def _follow_stats(self, channel: grpc.aio.Channel) -> None:
        await follow_stats(pods_pb2_grpc.PodStub(channel), self._take_stats)

    def _take_stats(self, stats: pods_pb2.PodStats) -> bool:
        """False: KV events are missing."""
        changed = self._stats is None or self._stats.draining != stats.draining
        self._stats = stats
        self.load.report(stats)
        if changed:
            self._on_change()
        if not stats.HasField("kv_events"):
            return True
        events = stats.kv_events
        return self.on_kv_events(events.sequence, events.stored, events.removed, is_snapshot=events.is_snapshot)

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
        self._stats = None
        self._serving = False
        self.fits = None
        self.refusal = ""
        self._on_change()
        if self.slot is not None:
            self._index.forget(self.slot)
            self.slot = None

"""The front of a decode pod: the Decode service, its sessions, and the handoffs of their requests."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Any

import grpc

from common.errors import UnavailableError
from common.pb import pods_pb2, pods_pb2_grpc
from common.pod import pooling
from common.pod.context import PodContext
from common.pod.tasks import TaskSet
from common.rpc.channel import ChannelPool
from common.rpc.errors import rpc_errors
from decode_service.config import DecodeConfig
from decode_service.handoff import CANCEL_TIMEOUT_S, HandoffTimeouts
from decode_service.quarantine import Quarantine
from decode_service.request import PodServices
from decode_service.session import RouterSession

logger = logging.getLogger(__name__)

# Share of the KV blocks in quarantine above which no handoff begins: the rest is for prompts that this pod computes.
_MAX_QUARANTINED_SHARE = 0.5
FLUSH_TIMEOUT_S = 2.0  # for routers to take the last deltas


class DecodeFront(pods_pb2_grpc.DecodeServicer):
    """See common.pod.runtime.Front."""

    service_names = ("baton.v1.Decode", pooling.SERVICE)

    def __init__(
        self,
        pod: PodContext,
        config: DecodeConfig,
        *,
        timeouts: HandoffTimeouts | None = None,
        max_quarantined_share: float = _MAX_QUARANTINED_SHARE,
    ) -> None:
        """`timeouts`: default: from the settings."""
        self._services = PodServices(
            pod=pod,
            config=config,
            peers=ChannelPool(opener=pod.open_channel),
            handoffs=TaskSet(),
            quarantine=Quarantine(max(1, int(max_quarantined_share * pod.spec.num_blocks))),
            timeouts=timeouts or HandoffTimeouts(queue_s=config.handoff_queue_timeout_s),
        )
        self._pooling = pooling.PoolingServicer(pod)
        self._sessions: set[RouterSession] = set()
        self._closed = False

    def add_to(self, server: grpc.aio.Server) -> None:
        """Registers the servicers."""
        pods_pb2_grpc.add_DecodeServicer_to_server(self, server)
        self._pooling.add_to(server)

    async def Session(  # type: ignore[override]  # noqa: N802  (grpc.aio also takes a coroutine that writes)
        self,
        request_iterator: AsyncIterator[pods_pb2.DecodeCommand],
        context: grpc.aio.ServicerContext[Any, pods_pb2.DecodeEvents],
    ) -> None:
        """Serves one router's requests, with one message per step."""
        async with rpc_errors(context, self._services.pod.metrics.internal_errors.inc):
            if self._closed:
                raise UnavailableError("the pod is closing")
            session = RouterSession(self._services)
            self._sessions.add(session)
            try:
                await session.run(request_iterator, context.write)
            finally:
                self._sessions.discard(session)

    @property
    def num_handoffs(self) -> int:
        """Handoff streams open."""
        return len(self._services.handoffs)

    def violations(self) -> list[str]:
        """Broken invariants, one line each."""
        num_requests = sum(len(session) for session in self._sessions) + self._pooling.num_open
        num_open = self._services.pod.admission.num_open
        return [] if num_requests == num_open else [f"{num_open} requests are open, sessions have {num_requests}"]

    async def close(self) -> None:
        """Fails open requests, notifies routers and prefill pods, and ends all sessions and handoffs."""
        self._closed = True
        sessions = list(self._sessions)
        for session in sessions:
            session.close()
        try:
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                for session in sessions:
                    await session.ended.wait()
        except TimeoutError:
            logger.warning("%d routers did not read their last events in time", len(self._sessions))
        await self._services.handoffs.close(grace_s=2 * CANCEL_TIMEOUT_S)
        self._services.quarantine.close()
        await self._services.peers.close()

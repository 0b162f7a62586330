"""The other workers of a router, asked by way of the parent; and what each worker answers them."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

import msgspec
from prometheus_client import CollectorRegistry

from common.errors import BatonError, InvalidRequestError
from common.types import FinishReason
from router.dispatching.kept import KeptStream, KnownChoice, StreamKey
from router.fairness.tenant import Tenant
from router.requests.request import SpeculationCounts
from router.serving.cluster_view import ClusterView
from router.serving.service import InferenceService
from router.timelines.views import RequestSummary, RequestTimeline, summaries_of, timeline_of
from router.workers.link import Link
from router.workers.messages import ALIVE, ASK_TIMEOUT_S, METRICS, OTHERS, TAKE_OVER, TAKE_OVER_TIMEOUT_S, Relayed
from router.workers.metrics import read_families

logger = logging.getLogger(__name__)

T = TypeVar("T")

_GIVE_UP_TIMEOUT_S = TAKE_OVER_TIMEOUT_S - 1  # for a stream to end here
_RELAY_MARGIN_S = 2.0  # for the parent, beyond what the workers that it asks may take


class _Which(msgspec.Struct, frozen=True, array_like=True):
    """Requests of a tenant, or of all."""

    tenant_name: str | None
    shows_pods: bool
    limit: int = 1
    request_id: str = ""


class _Running(msgspec.Struct, frozen=True, array_like=True):
    tenant_name: str
    request_id: str
    identity: bytes = b""


class _Choice(msgspec.Struct, frozen=True, array_like=True):
    token_ids: bytes  # as of array("I")
    finish_reason: FinishReason | None
    speculation: SpeculationCounts

    @classmethod
    def of(cls, choice: KnownChoice) -> _Choice:
        return cls(bytes(choice.token_ids), choice.finish_reason, choice.speculation)

    def known(self) -> KnownChoice:
        return KnownChoice(array("I", self.token_ids), self.finish_reason, self.speculation)


class LinkedPeers:
    """Asks by way of the parent. See Peers."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def metrics(self, own: CollectorRegistry) -> bytes:
        """See Peers. The parent has what dead workers counted, so it puts them together."""
        return await self._link.ask(METRICS, b"", ASK_TIMEOUT_S + _RELAY_MARGIN_S)

    async def num_under_way(self) -> int:
        """See Peers."""
        return sum(await self._ask_others("num_under_way", None, int))

    async def clusters(self) -> Sequence[ClusterView]:
        """See Peers."""
        return await self._ask_others("cluster", None, ClusterView)

    async def requests(self, tenant_name: str | None, limit: int, *, shows_pods: bool) -> Sequence[RequestSummary]:
        """See Peers."""
        lists = await self._ask_others("requests", _Which(tenant_name, shows_pods, limit), list[RequestSummary])
        return [summary for summaries in lists for summary in summaries]

    async def request(self, request_id: str, tenant_name: str | None, *, shows_pods: bool) -> RequestTimeline | None:
        """See Peers."""
        which = _Which(tenant_name, shows_pods, request_id=request_id)
        found = await self._ask_others("request", which, list[RequestTimeline])
        return max(
            (timeline for each in found for timeline in each),
            key=lambda timeline: timeline.request.started_at,
            default=None,
        )

    async def abort(self, request_id: str, tenant_name: str) -> bool:
        """See Peers."""
        return any(await self._ask_others("abort", _Running(tenant_name, request_id), bool))

    async def take_over(self, key: StreamKey, identity: bytes) -> KeptStream | None:
        """See Peers."""
        about = _Running(key.tenant, key.request_id, identity)
        for choices in await self._ask_others(TAKE_OVER, about, list[_Choice], TAKE_OVER_TIMEOUT_S):
            if choices:
                return KeptStream(identity, tuple(each.known() for each in choices))
        return None

    async def _ask_others(self, name: str, about: object, answer: type[T], timeout_s: float = ASK_TIMEOUT_S) -> list[T]:
        """Answers of this type. Those of workers that give none in time are left out."""
        relayed = msgspec.msgpack.encode(Relayed(name, msgspec.Raw(msgspec.msgpack.encode(about))))
        try:
            answers = await self._link.ask(OTHERS, relayed, timeout_s + _RELAY_MARGIN_S)
        except BatonError as error:
            logger.warning("%s: the other workers were not asked: %s", name, error.message)
            return []
        return [
            msgspec.msgpack.decode(each, type=answer)
            for each in msgspec.msgpack.decode(answers, type=list[msgspec.Raw])
        ]


class PeerAnswers:
    """Answers the other workers' questions with this one's knowledge."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._by_name: dict[str, Callable[[bytes], Awaitable[object]]] = {
            ALIVE: self._alive,
            METRICS: self._metrics,
            "num_under_way": self._num_under_way,
            "cluster": self._cluster,
            "requests": self._requests,
            "request": self._request,
            "abort": self._abort,
            TAKE_OVER: self._take_over,
        }

    async def answer(self, name: str, about: bytes) -> bytes:
        """See Link. Raises InvalidRequestError for a question that is not known."""
        find = self._by_name.get(name)
        if find is None:
            raise InvalidRequestError(f"workers know no question {name}")
        return msgspec.msgpack.encode(await find(about))

    async def _alive(self, about: bytes) -> object:
        return None

    async def _metrics(self, about: bytes) -> object:
        return read_families(self._service.metrics.registry)

    async def _num_under_way(self, about: bytes) -> object:
        return self._service.num_under_way

    async def _cluster(self, about: bytes) -> object:
        return self._service.cluster_view()

    async def _requests(self, about: bytes) -> object:
        which = msgspec.msgpack.decode(about, type=_Which)
        return summaries_of(self._service.timelines, which.tenant_name, which.limit, shows_pods=which.shows_pods)

    async def _request(self, about: bytes) -> object:
        which = msgspec.msgpack.decode(about, type=_Which)
        found = timeline_of(self._service.timelines, which.request_id, which.tenant_name, shows_pods=which.shows_pods)
        return [] if found is None else [found]

    async def _abort(self, about: bytes) -> object:
        running = msgspec.msgpack.decode(about, type=_Running)
        return self._service.abort(running.request_id, Tenant(running.tenant_name))

    async def _take_over(self, about: bytes) -> object:
        running = msgspec.msgpack.decode(about, type=_Running)
        key = StreamKey(running.tenant_name, running.request_id)
        try:
            kept = await self._service.streams.give_up(key, running.identity, _GIVE_UP_TIMEOUT_S)
        except TimeoutError:
            return []  # it goes on here, to a client that may be gone; the asker computes it again
        return [] if kept is None else [*map(_Choice.of, kept.choices)]

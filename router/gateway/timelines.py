"""Timelines over HTTP: GET /v1/requests, /v1/requests/{id}, and the header server-timing."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from itertools import islice
from operator import attrgetter
from typing import NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.errors import InvalidRequestError, UnknownRequestError, quoted
from router.fairness.tenant import Tenant
from router.gateway.answers import (
    RequestEvent,
    RequestGaps,
    RequestList,
    RequestPhase,
    RequestSummary,
    RequestTimeline,
)
from router.metrics import GAPS_S
from router.security.access import AccessControl
from router.service import InferenceService
from router.timelines.timeline import Timeline
from router.wire.exchange import TENANT

REQUESTS_PATH = "/v1/requests"

_DEFAULT_LIMIT = 100
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class _Seen(NamedTuple):
    """What the client of a request may see."""

    is_operator: bool
    tenant_name: str | None  # whose requests; None: everyone's


class TimelineEndpoints:
    """Whose key it is sees its own requests, an operator's key all, or those of the tenant that it names. Addresses of
    pods are for operators."""

    def __init__(self, service: InferenceService, access: AccessControl) -> None:
        self._service = service
        self._access = access

    @property
    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route(REQUESTS_PATH, self._requests, methods=["GET"]),
            Route(f"{REQUESTS_PATH}/{{request_id}}", self._request, methods=["GET"]),
        ]

    async def _requests(self, request: Request) -> Response:
        """The newest first. Raises InvalidRequestError."""
        limit = _limit(request.query_params.get("limit"))
        is_operator, tenant_name = self._seen_by(request)
        service = self._service
        data = summaries_of(service, tenant_name, limit, shows_pods=is_operator)
        if others := await service.peers.requests(tenant_name, limit, shows_pods=is_operator):
            data = sorted([*data, *others], key=attrgetter("started_at"), reverse=True)[:limit]
        return _json(RequestList(object="list", max_kept=service.config.max_timelines, data=data))

    async def _request(self, request: Request) -> Response:
        """One of them. Raises UnknownRequestError."""
        request_id = request.path_params["request_id"]
        is_operator, tenant_name = self._seen_by(request)
        timeline = timeline_of(self._service, request_id, tenant_name, shows_pods=is_operator)
        if timeline is None:
            timeline = await self._service.peers.request(request_id, tenant_name, shows_pods=is_operator)
        if timeline is None:
            raise UnknownRequestError(f"no timeline of the request {quoted(request_id)} is kept")
        return _json(timeline)

    def _seen_by(self, request: Request) -> _Seen:
        tenant = _tenant(request)
        if self._access.is_operator(tenant):
            return _Seen(is_operator=True, tenant_name=request.query_params.get("tenant"))
        return _Seen(is_operator=False, tenant_name=tenant.name)


def summaries_of(
    service: InferenceService, tenant_name: str | None, limit: int, *, shows_pods: bool
) -> list[RequestSummary]:
    """The newest requests of this process, at most `limit`. `tenant_name` as of TimelineBook."""
    kept = service.timelines.newest_first()
    seen = (each for each in kept if tenant_name in (None, each.tenant_name))
    now = time.monotonic()
    return [_summary(timeline, now, shows_pods=shows_pods) for timeline in islice(seen, limit)]


def timeline_of(
    service: InferenceService, request_id: str, tenant_name: str | None, *, shows_pods: bool
) -> RequestTimeline | None:
    """That of a request of this process. None: none is kept."""
    timeline = service.timelines.find(request_id, tenant_name)
    return None if timeline is None else _whole(timeline, shows_pods=shows_pods)


def _summary(timeline: Timeline, now: float, *, shows_pods: bool) -> RequestSummary:
    prefill, decode = timeline.pods if shows_pods else ("", "")
    longest = timeline.longest_gap
    return RequestSummary(
        id=timeline.request_id,
        model=timeline.model,
        tenant=timeline.tenant_name,
        status=timeline.status,
        finish_reason=timeline.finish_reason or None,
        error=timeline.error or None,
        started_at=datetime.fromtimestamp(timeline.started_at, UTC).isoformat(timespec="milliseconds")[:-6] + "Z",
        num_prompt_tokens=timeline.num_prompt_tokens,
        num_cached_tokens=timeline.num_cached_tokens,
        num_output_tokens=timeline.num_output_tokens,
        num_verified_drafts=timeline.speculation.num_verified,
        num_accepted_drafts=timeline.speculation.num_accepted,
        ttft_ms=None if timeline.first_token_s is None else _ms(timeline.first_token_s),
        duration_ms=_ms(timeline.duration_s(now)),
        longest_gap_ms=None if longest is None else _ms(longest.seconds),
        prefill_pod=prefill or None,
        decode_pod=decode or None,
        num_events=len(timeline.events),
    )


def _whole(timeline: Timeline, *, shows_pods: bool) -> RequestTimeline:
    now = time.monotonic()
    phases = [
        RequestPhase(
            name=phase.name,
            where=phase.where,
            start_ms=_ms(phase.start_s),
            duration_ms=_ms(phase.duration_s),
            pod=(phase.pod or None) if shows_pods else None,
            attempt=phase.attempt or None,
            reason=phase.reason or None,
        )
        for phase in timeline.phases(now)
    ]
    events = [
        RequestEvent(
            at_ms=_ms(event.at_s), event=event.name, reason=event.reason, pod=event.pod if shows_pods else None
        )
        for event in timeline.events
    ]
    return RequestTimeline(
        object="request",
        request=_summary(timeline, now, shows_pods=shows_pods),
        phases=phases,
        events=events,
        gaps=_gaps(timeline),
        num_left_out=timeline.num_left_out,
    )


def _gaps(timeline: Timeline) -> RequestGaps | None:
    longest = timeline.longest_gap
    if longest is None:
        return None
    return RequestGaps(
        upper_ms=[1000 * bound for bound in GAPS_S],
        counts=list(timeline.gaps),
        longest_ms=_ms(longest.seconds),
        longest_at_ms=_ms(longest.at_s),
        longest_before_token=longest.before_token,
    )


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)


def _limit(text: str | None) -> int:
    if text is None:
        return _DEFAULT_LIMIT
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and int(text) > 0):
        raise InvalidRequestError(f"limit must be an integer from 1 to 999999, got {quoted(text)}", param="limit")
    return int(text)


def _tenant(request: Request) -> Tenant:
    tenant = request.scope[TENANT]
    assert isinstance(tenant, Tenant)
    return tenant


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json", headers=_HEADERS)

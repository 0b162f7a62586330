"""Timelines over HTTP: GET /v1/requests, /v1/requests/{id}, and the header server-timing."""

from __future__ import annotations

from operator import attrgetter
from typing import Literal, NamedTuple

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.errors import InvalidRequestError, UnknownRequestError, quoted
from router.fairness.tenant import Tenant
from router.security.access import AccessControl
from router.serving.service import InferenceService
from router.timelines.views import RequestSummary, summaries_of, timeline_of
from router.wire.answer_struct import AnswerStruct
from router.wire.exchange import TENANT

REQUESTS_PATH = "/v1/requests"

_DEFAULT_LIMIT = 100
_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class RequestList(AnswerStruct):
    """Answer of GET /v1/requests; the newest first, of at most `max_kept`."""

    object: Literal["list"]
    max_kept: int
    data: list[RequestSummary]


class _Seen(NamedTuple):
    """The requests that the client of a request may see."""

    is_operator: bool
    tenant_name: str | None  # tenant whose requests are listed; None: all tenants


class TimelineEndpoints:
    """Shows timelines: to a tenant's key its own requests, to an operator's all, or those of the tenant that it names.
    Addresses of pods are for operators."""

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
        data = summaries_of(service.timelines, tenant_name, limit, shows_pods=is_operator)
        if others := await service.peers.requests(tenant_name, limit, shows_pods=is_operator):
            data = sorted([*data, *others], key=attrgetter("started_at"), reverse=True)[:limit]
        return _json(RequestList(object="list", max_kept=service.config.max_timelines, data=data))

    async def _request(self, request: Request) -> Response:
        """One of them. Raises UnknownRequestError."""
        request_id = request.path_params["request_id"]
        is_operator, tenant_name = self._seen_by(request)
        timeline = timeline_of(self._service.timelines, request_id, tenant_name, shows_pods=is_operator)
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

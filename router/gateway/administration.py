"""Endpoints for operators: POST /admin/pods/ADDRESS/drain and /undrain, POST /reset_prefix_cache."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common.errors import PermissionDeniedError
from router.gateway.answers import Drained, PrefixCachesReset, Undrained
from router.gateway.exchange import TENANT
from router.requests.terms import Tenant
from router.security.access import AccessControl
from router.service import InferenceService

RESET_PATH = "/reset_prefix_cache"  # vLLM's
POD_PATH = "/admin/pods/{address}"


class AdministrationEndpoints:
    """Calls Administration. The guard above has checked the key."""

    def __init__(self, service: InferenceService, access: AccessControl) -> None:
        self._administration = service.administration
        self._access = access

    @property
    def routes(self) -> list[Route]:
        """All of them."""
        return [
            Route(f"{POD_PATH}/drain", self._drain, methods=["POST"]),
            Route(f"{POD_PATH}/undrain", self._undrain, methods=["POST"]),
            Route(RESET_PATH, self._reset, methods=["POST"]),
        ]

    async def _drain(self, request: Request) -> Response:
        address = request.path_params["address"]
        num_unfinished = await self._administration.drain(address, self._operator(request))
        return _json(Drained(address, num_unfinished))

    async def _undrain(self, request: Request) -> Response:
        address = request.path_params["address"]
        await self._administration.undrain(address, self._operator(request))
        return _json(Undrained(address))

    async def _reset(self, request: Request) -> Response:
        return _json(PrefixCachesReset(await self._administration.reset_prefix_caches(self._operator(request))))

    def _operator(self, request: Request) -> Tenant:
        """Raises PermissionDeniedError for a web page if there are no keys: a browser lets any page send such a
        request."""
        if self._access.is_open and "origin" in request.headers:
            raise PermissionDeniedError("administration by web pages needs API keys")
        tenant = request.scope[TENANT]
        assert isinstance(tenant, Tenant)
        return tenant


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")

"""The cluster as it is now, for a page or a program that asks every second: GET /v1/cluster."""

from __future__ import annotations

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from router.serving.cluster_view import with_others
from router.serving.service import InferenceService

CLUSTER_PATH = "/v1/cluster"

_HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}


class ClusterEndpoint:
    """Shows the cluster. Where there are keys, it is for operators, as it names pods and shows the load of all tenants.
    The guard above has checked the key."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service

    @property
    def route(self) -> Route:
        """The only one."""
        return Route(CLUSTER_PATH, self._cluster, methods=["GET"])

    async def _cluster(self, request: Request) -> Response:
        view = with_others(self._service.cluster_view(), await self._service.peers.clusters())
        return Response(msgspec.json.encode(view), media_type="application/json", headers=_HEADERS)

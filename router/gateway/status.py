"""Endpoints that generate nothing: models, health, load, metrics, version."""

from __future__ import annotations

import time
from typing import Any, Literal

import msgspec
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import Response

from common import __version__
from common.types import AdapterName
from router.fairness.tenant import Tenant
from router.security.access import AccessControl
from router.serving.served_model import ServedModel
from router.serving.service import InferenceService
from router.wire.answer_struct import AnswerStruct
from router.wire.exchange import TENANT


class PodHealth(AnswerStruct):
    """A pod as the router sees it."""

    address: str
    role: Literal["prefill", "decode"]
    model: str | None
    state: str
    detail: str


class ModelHealth(AnswerStruct):
    """A served model; `reason`: why no request for it can be served, empty if one can."""

    name: str
    reason: str


class Health(AnswerStruct):
    """Answer of GET /health and /readyz. Where there are API keys, `models` and `pods` are for operators."""

    status: Literal["ok", "unavailable"]
    reason: str
    models: list[ModelHealth] = msgspec.field(default_factory=list)
    pods: list[PodHealth] = msgspec.field(default_factory=list)


class Load(AnswerStruct):
    """Answer of GET /load: generations under way, those that wait in the router included."""

    server_load: int


class Liveness(AnswerStruct):
    """Answer of GET /livez."""

    status: Literal["ok"]


class Version(AnswerStruct):
    """Answer of GET /version."""

    version: str
    grpc_port: int  # gRPC port on the same host


class Status:
    """Endpoints for clients, probes and scrapes."""

    def __init__(self, service: InferenceService, access: AccessControl, grpc_port: int) -> None:
        self._service = service
        self._access = access
        self._grpc_port = grpc_port
        self._started = int(time.time())

    async def models(self, request: Request) -> Response:
        """The served models that the client may use, under all their names, and their adapters."""
        tenant = _tenant(request)
        cards = []
        for model in self._service.models:
            cards += [self._card(model, name) for name in model.names if tenant.may_use(name)]
            adapters = self._service.adapters_of(model)
            cards += [self._adapter_card(model, each, tenant) for each in adapters if tenant.may_use(each.name)]
        return _json({"object": "list", "data": cards})

    async def model(self, request: Request) -> Response:
        """One model by name. Raises UnknownModelError."""
        name, tenant = request.path_params["name"], _tenant(request)
        model, adapter = self._service.asked(name, tenant)
        return _json(self._card(model, name) if adapter is None else self._adapter_card(model, adapter, tenant))

    async def health(self, request: Request) -> Response:
        """200 only while a request can be served; the body tells an operator how each pod is, and others no address."""
        reason = self._service.unavailable_reason
        status, told = (503, "unavailable") if reason else (200, "ok")
        if not self._access.is_operators(lambda name: request.headers.get(name, "")):
            return _json({"status": told, "reason": reason.partition(":")[0]}, status)
        pods = [
            {
                "address": pod.address,
                "role": pod.role_name,
                "model": None if pod.info is None else pod.info.model_name,
                "state": pod.state.value,
                "detail": pod.detail,
            }
            for pod in self._service.cluster.pods
        ]
        models = [{"name": model.name, "reason": model.unavailable_reason} for model in self._service.models]
        return _json({"status": told, "reason": reason, "models": models, "pods": pods}, status)

    async def alive(self, request: Request) -> Response:
        """200 whatever the state of the pods: only a router that does not answer should be restarted."""
        return _json({"status": "ok"})

    async def ping(self, request: Request) -> Response:
        """The status of `health`, without a body."""
        return Response(status_code=503 if self._service.unavailable_reason else 200)

    async def metrics(self, request: Request) -> Response:
        """Prometheus exposition."""
        service = self._service
        return Response(await service.peers.metrics(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    async def load(self, request: Request) -> Response:
        """Generations under way, as vLLM tells it."""
        service = self._service
        return _json({"server_load": service.num_under_way + await service.peers.num_under_way()})

    async def version(self, request: Request) -> Response:
        """Version of Baton, and the port of the gRPC API."""
        return _json({"version": __version__, "grpc_port": self._grpc_port})

    def _card(self, model: ServedModel, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self._started,
            "owned_by": "baton",
            "root": model.name,
            "parent": None,
            "max_model_len": model.max_model_len or None,
        }

    def _adapter_card(self, model: ServedModel, adapter: AdapterName, tenant: Tenant) -> dict[str, Any]:
        """The place from which it was loaded is for operators."""
        root = adapter.path if self._access.is_operator(tenant) else adapter.name
        return {**self._card(model, adapter.name), "root": root, "parent": model.name}


def _tenant(request: Request) -> Tenant:
    tenant = request.scope[TENANT]
    assert isinstance(tenant, Tenant)
    return tenant


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")

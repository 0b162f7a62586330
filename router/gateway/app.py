"""The ASGI application: routes, error pages, API description."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from common import __version__
from common.errors import BatonError
from router.gateway.anthropic.count_tokens import CountTokensEndpoint
from router.gateway.completions import CHAT, COMPLETIONS, EXPLAIN, MESSAGES, RESPONSES, CompletionsEndpoint
from router.gateway.config import GatewayConfig
from router.gateway.openai.tokens import DetokenizeEndpoint, TokenizeEndpoint
from router.gateway.openapi import describe
from router.gateway.operators.adapters import LoadAdapterEndpoint, UnloadAdapterEndpoint
from router.gateway.operators.administration import AdministrationEndpoints
from router.gateway.operators.cluster import CLUSTER_PATH, ClusterEndpoint
from router.gateway.operators.timelines import REQUESTS_PATH, TimelineEndpoints
from router.gateway.page import static_routes
from router.gateway.pooling.endpoints import POOLING_PATHS, PoolingEndpoint
from router.gateway.status import Status
from router.requests.ids import REQUEST_ID_HEADER, RunningIds
from router.requests.terms import QUEUED_HEADER
from router.security.access import AccessControl
from router.security.http_guard import LOAD_PATH, OPEN_PATHS, PROBE_PATHS, UNLOAD_PATH, ApiKeyGuard
from router.serving.service import InferenceService
from router.wire.access_log import ACCESS, AccessRecord
from router.wire.errors import MESSAGES_PATH, error_headers, error_json, route_error
from router.wire.exchange import TENANT, TIMING_HEADER, Receive, Scope, Send

App = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI application."""

_JSON = "application/json"
_NOT_LOGGED = PROBE_PATHS | {"/metrics", CLUSTER_PATH, REQUESTS_PATH}  # what programs and the page ask for all the time


def create_app(
    service: InferenceService,
    access: AccessControl,
    config: GatewayConfig,
    open_paths: frozenset[str] = OPEN_PATHS,
    *,
    grpc_port: int,
    allowed_origins: Sequence[str] = (),
) -> App:
    """The HTTP front of one service. What is not at `open_paths` is for those that `access` knows. `grpc_port`, where
    the service has its gRPC front, is told to clients. The page and /docs are open as well."""
    app = FastAPI(title="Baton", version=__version__, redirect_slashes=False, docs_url=None, redoc_url=None)
    pages = static_routes(has_page=config.page)
    open_paths |= {route.path for route in pages}
    status, ids = Status(service, access, grpc_port), RunningIds()
    explain = CompletionsEndpoint(EXPLAIN, service, access, ids)
    endpoints: dict[str, App] = {
        "/v1/completions": CompletionsEndpoint(COMPLETIONS, service, access, ids),
        "/v1/chat/completions": CompletionsEndpoint(CHAT, service, access, ids),
        MESSAGES_PATH: CompletionsEndpoint(MESSAGES, service, access, ids),
        f"{MESSAGES_PATH}/count_tokens": CountTokensEndpoint(service, access),
        "/v1/responses": CompletionsEndpoint(RESPONSES, service, access, ids),
        "/tokenize": TokenizeEndpoint(service, access),
        "/detokenize": DetokenizeEndpoint(service, access),
        LOAD_PATH: LoadAdapterEndpoint(service, access),
        UNLOAD_PATH: UnloadAdapterEndpoint(service, access),
        **{path: PoolingEndpoint(kind, service, access, ids) for path, kind in POOLING_PATHS.items()},
    }
    app.router.routes += [Route(path, endpoint, methods=["POST"]) for path, endpoint in endpoints.items()]
    app.router.routes += [
        Route("/v1/route/explain", explain, methods=["GET", "POST"]),
        Route("/v1/models", status.models, methods=["GET"]),
        Route("/v1/models/{name:path}", status.model, methods=["GET"]),
        Route("/health", status.health, methods=["GET"]),
        Route("/readyz", status.health, methods=["GET"]),
        Route("/livez", status.alive, methods=["GET"]),
        Route("/ping", status.ping, methods=["GET", "POST"]),
        Route("/metrics", status.metrics, methods=["GET"]),
        Route("/version", status.version, methods=["GET"]),
        Route("/load", status.load, methods=["GET"]),
        Route("/v1/load", status.load, methods=["GET"]),
        *AdministrationEndpoints(service, access).routes,
        *TimelineEndpoints(service, access).routes,
        ClusterEndpoint(service).route,
        *pages,
    ]
    app.add_middleware(ApiKeyGuard, access=access, open_paths=open_paths, on_error=service.count_error)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(BatonError, _baton_error)
    app.openapi = lambda: _openapi(app, access, open_paths)  # type: ignore[method-assign]  # as its documentation does
    guarded: dict[str, App] = {
        path: ApiKeyGuard(endpoint, access, open_paths, service.count_error) for path, endpoint in endpoints.items()
    }
    shortcut = _Shortcut(guarded, app, has_access_log=config.access_log)
    return _with_cors(shortcut, allowed_origins) if allowed_origins else shortcut


def _with_cors(app: App, origins: Sequence[str]) -> App:
    """Answers preflight requests, which have no key, and lets pages of these origins read responses. No cookies: a page
    shows its key as every client does."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=[REQUEST_ID_HEADER, QUEUED_HEADER, TIMING_HEADER, "retry-after", "x-should-retry"],
    )


class _Shortcut:
    """Takes requests with a body past FastAPI, which adds nothing: the endpoints answer every error themselves. Its
    layers cost a stream 5 KB for as long as it is open."""

    def __init__(self, endpoints: Mapping[str, App], app: App, *, has_access_log: bool) -> None:
        self._endpoints = endpoints
        self._app = app
        self._has_access_log = has_access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        app = self._endpoints.get(scope["path"], self._app) if is_post else self._app
        if scope["type"] != "http" or not self._has_access_log or scope["path"] in _NOT_LOGGED:
            await app(scope, receive, send)
            return
        client = scope.get("client")
        record = scope[ACCESS] = AccessRecord(scope["method"], scope["path"], client[0] if client else "")
        try:
            await app(scope, receive, record.watching(send) if app is self._app else send)
        finally:
            tenant = scope.get(TENANT)
            record.tenant_name = "" if tenant is None else tenant.name
            record.write()


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status, body = route_error(error.status_code, request.method, request.url.path)
    return Response(body, status_code=status, media_type=_JSON, headers=error.headers)


async def _baton_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BatonError)
    headers = {name.decode(): value.decode() for name, value in error_headers(error)}
    return Response(error_json(error), error.code.value.http_status, headers=headers, media_type=_JSON)


def _openapi(app: FastAPI, access: AccessControl, open_paths: frozenset[str]) -> dict[str, Any]:
    if app.openapi_schema is None:
        document = get_openapi(title=app.title, version=app.version, routes=[])
        describe(document, needs_key=not access.is_open, open_paths=open_paths)
        app.openapi_schema = document
    return app.openapi_schema

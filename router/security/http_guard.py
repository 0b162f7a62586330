"""API keys on HTTP: an ASGI layer below which every request has a tenant."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from common.errors import BatonError, InvalidRequestError, PermissionDeniedError, UnauthenticatedError
from router.security.access import AccessControl
from router.wire.exchange import TENANT, Exchange, Receive, Scope, Send

PROBE_PATHS = frozenset({"/health", "/readyz", "/livez", "/ping"})
OPEN_PATHS = PROBE_PATHS | {"/version", "/openapi.json"}
LOAD_PATH, UNLOAD_PATH = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"  # vLLM's, of adapters
OPERATOR_PATHS = frozenset(
    {"/metrics", "/load", "/v1/load", "/v1/cluster", "/reset_prefix_cache", LOAD_PATH, UNLOAD_PATH}
)
_OPERATOR_PREFIX = "/admin/"


def is_operators(path: str) -> bool:
    """Whether it needs an operator's key."""
    return path in OPERATOR_PATHS or path.startswith(_OPERATOR_PREFIX)


class ApiKeyGuard:
    """Refuses what has no valid key, before a byte of its body is read. What is not known to be open needs one, and
    what concerns all tenants needs an operator's."""

    def __init__(
        self, app: Any, access: AccessControl, open_paths: frozenset[str], on_error: Callable[[BatonError], None]
    ) -> None:
        self._app = app
        self._access = access
        self._open_paths = open_paths
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            exchange = Exchange(scope, receive, send)
            try:
                scope[TENANT] = tenant = self._access.authenticate(exchange.header)
                if is_operators(scope["path"]):
                    self._access.check_operator(tenant)
            except (UnauthenticatedError, PermissionDeniedError) as error:
                self._on_error(error)
                with suppress(InvalidRequestError):  # the lack of a key matters more
                    exchange.settle_request_id()
                await exchange.send_error(error)
                return
        await self._app(scope, receive, send)

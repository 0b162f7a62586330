"""API keys on gRPC: an interceptor above every servicer of the public server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from typing import Any, NoReturn

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from common.errors import BatonError, UnauthenticatedError
from common.rpc.errors import abort_with
from router.fairness.tenant import Tenant
from router.security.access import AccessControl

OPEN_SERVICES = frozenset({health.SERVICE_NAME, reflection.SERVICE_NAME})

COUNTED_METHODS = frozenset(
    f"/baton.v1.Inference/{name}"
    for name in ("Generate", "GenerateStream", "Embed", "Classify", "Score", "Tokenize", "Detokenize", "Explain")
)  # against quotas

_tenant: ContextVar[Tenant] = ContextVar("tenant")  # no default: a call without the interceptor fails


def tenant_of_call() -> Tenant:
    """Returns the tenant of the call that the current task serves."""
    return _tenant.get()


def admitted(access: AccessControl, method: str) -> AbstractContextManager[None]:
    """Holds the place of the current call for one generation, if its method is counted against its tenant's quota.
    Raises OverloadedError on entry."""
    return access.account(tenant_of_call()).admit() if method in COUNTED_METHODS else nullcontext()


class ApiKeyInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the type stubs only
    """Refuses calls without a valid key. What is not known to be open needs one."""

    def __init__(self, access: AccessControl, on_error: Callable[[BatonError], None]) -> None:
        self._access = access
        self._on_error = on_error

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The servicer's handler, or one that refuses."""
        service = details.method.strip("/").partition("/")[0]
        if service in OPEN_SERVICES:
            _tenant.set(Tenant())
        else:
            metadata = {key: value for key, value in details.invocation_metadata if isinstance(value, str)}
            try:
                _tenant.set(self._access.authenticate(lambda name: metadata.get(name, "")))
            except UnauthenticatedError as error:
                self._on_error(error)
                return _refusal(error)
        return await continuation(details)


def _refusal(error: BatonError) -> grpc.RpcMethodHandler[Any, Any]:
    async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> NoReturn:
        await abort_with(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)  # which reads nothing before it is served

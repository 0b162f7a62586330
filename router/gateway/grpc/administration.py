"""The gRPC front for operators: baton.v1.Admin."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc

from common.pb import admin_pb2, admin_pb2_grpc
from common.rpc.errors import rpc_errors
from router.fairness.tenant import Tenant
from router.security.access import AccessControl
from router.security.grpc_guard import tenant_of_call
from router.serving.service import InferenceService

_Context = grpc.aio.ServicerContext[Any, Any]


class AdminServicer(admin_pb2_grpc.AdminServicer):
    """Calls Administration for those with an operator's key."""

    def __init__(self, service: InferenceService, access: AccessControl) -> None:
        """Its calls come through an ApiKeyInterceptor."""
        self._service = service
        self._access = access

    async def DrainPod(  # noqa: N802
        self, request: admin_pb2.DrainPodRequest, context: _Context
    ) -> admin_pb2.DrainPodResponse:
        """The pod takes no new requests."""
        async with self._operator(context) as operator:
            num_unfinished = await self._service.administration.drain(request.address, operator)
        return admin_pb2.DrainPodResponse(num_unfinished=num_unfinished)

    async def UndrainPod(  # noqa: N802
        self, request: admin_pb2.UndrainPodRequest, context: _Context
    ) -> admin_pb2.UndrainPodResponse:
        """The pod takes requests again."""
        async with self._operator(context) as operator:
            await self._service.administration.undrain(request.address, operator)
        return admin_pb2.UndrainPodResponse()

    async def ResetPrefixCache(  # noqa: N802
        self, request: admin_pb2.ResetPrefixCacheOfPodsRequest, context: _Context
    ) -> admin_pb2.ResetPrefixCacheOfPodsResponse:
        """All pods forget their prefix caches."""
        async with self._operator(context) as operator:
            addresses = await self._service.administration.reset_prefix_caches(operator)
        return admin_pb2.ResetPrefixCacheOfPodsResponse(addresses=addresses)

    async def LoadLoraAdapter(  # noqa: N802
        self, request: admin_pb2.LoadLoraAdapterRequest, context: _Context
    ) -> admin_pb2.LoadLoraAdapterResponse:
        """All pods of a model load an adapter."""
        async with self._operator(context) as operator:
            await self._service.adapters.load(
                request.lora_name,
                request.lora_path,
                operator,
                base_model=request.base_model_name or None,
                in_place=request.load_inplace,
            )
        return admin_pb2.LoadLoraAdapterResponse()

    async def UnloadLoraAdapter(  # noqa: N802
        self, request: admin_pb2.UnloadLoraAdapterRequest, context: _Context
    ) -> admin_pb2.UnloadLoraAdapterResponse:
        """An adapter gets no new requests."""
        async with self._operator(context) as operator:
            name = request.base_model_name or None
            await self._service.adapters.unload(request.lora_name, operator, base_model=name)
        return admin_pb2.UnloadLoraAdapterResponse()

    @asynccontextmanager
    async def _operator(self, context: _Context) -> AsyncIterator[Tenant]:
        """Errors become statuses, and are counted."""
        async with rpc_errors(context), self._service.counted_errors():
            tenant = tenant_of_call()
            self._access.check_operator(tenant)
            yield tenant

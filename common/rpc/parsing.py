"""Rejects requests that cannot be parsed. gRPC itself would answer UNKNOWN and log a traceback for each."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from common.errors import InvalidRequestError
from common.rpc.errors import abort_with, drop_frames


class ParsingInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the type stubs only
    """Answers INVALID_ARGUMENT. Streams of requests are parsed where they are read, see `rpc_errors`."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """Wraps the servicer's handler in a check."""
        handler = await continuation(details)
        # None for an unknown method, unlike in the type stubs.
        if not handler or handler.request_streaming or handler.request_deserializer is None:
            return handler
        serve: Any = handler.unary_stream if handler.response_streaming else handler.unary_unary
        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
        return make(_checked(serve), _lenient(handler.request_deserializer), handler.response_serializer)


def _lenient(parse: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Returns the error instead of raising it, as the deserialiser cannot answer the call."""

    def deserialize(request: bytes) -> Any:
        try:
            return parse(request)
        except DecodeError as error:
            return error

    return deserialize


def _checked(serve: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Awaitable[Any]]:
    async def call(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            if isinstance(request, DecodeError):
                await abort_with(context, InvalidRequestError(f"the request cannot be parsed: {request}"))
            return await answered(serve, request, context)
        except grpc.aio.AbortError as error:
            request = None
            drop_frames(error)
            raise

    return call


async def answered(serve: Callable[[Any, Any], Any], request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
    """Runs a servicer's method, which may also yield its answers."""
    answer = serve(request, context)
    if not inspect.isasyncgen(answer):
        return await answer
    async with aclosing(answer):
        async for each in answer:
            await context.write(each)
    return None

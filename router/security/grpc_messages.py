"""Messages of gRPC clients that may send anything.

gRPC itself bounds how large a message is, not how long it takes to come, how many unfinished ones there are, or how
long it takes to parse. Here every call reads its messages itself.

1. A message is read while its call holds one of a bounded number of slots, of all clients and of each address. What is
   not read yet is held back at the client, by flow control.
2. A message has a time to come, and a call as long to wait for a slot.
3. A call that is counted against a quota is refused before its message is read, if the quota is used up.
4. A message that has come counts in a BodyBudget until it was tokenised or the call has ended.
5. What holds very many values is refused before it is parsed.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from contextvars import ContextVar
from typing import Any
from urllib.parse import unquote

import grpc
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import DecodeError

from common.errors import BatonError, DeadlineExceededError, InvalidRequestError, OverloadedError
from common.rpc.errors import abort_with, drop_frames
from common.rpc.parsing import answered
from router.fairness.turns import others_turn_if_large
from router.security.access import AccessControl
from router.security.bodies import BodyBudget, client_of
from router.security.grpc_guard import admitted, tenant_of_call
from router.security.message_size import check_num_values

_Context = grpc.aio.ServicerContext[Any, Any]
_Parse = Callable[[bytes], Any]


class ReadSlots:
    """Calls that may read a message at once: `max_all` in all, `max_client` of one client. Others wait, and clients
    take turns."""

    def __init__(self, max_all: int, max_client: int) -> None:
        self._num_free = max_all
        self._max_client = max_client
        self._num_held: Counter[str] = Counter()  # by client
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # by client, in turn

    @asynccontextmanager
    async def held(self, client: str) -> AsyncIterator[None]:
        """Waits for a slot and holds it."""
        if self._num_free and self._num_held[client] < self._max_client:
            self._take(client)
        else:
            await self._wait(client)
        try:
            yield
        finally:
            self._give_back(client)

    def _take(self, client: str) -> None:
        self._num_free -= 1
        self._num_held[client] += 1

    def _give_back(self, client: str) -> None:
        self._num_free += 1
        self._num_held[client] -= 1
        if not self._num_held[client]:
            del self._num_held[client]
        self._pass_on()

    async def _wait(self, client: str) -> None:
        """Returns with a slot."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._forget(client, turn)
            else:
                self._give_back(client)  # the slot was granted in the moment in which the call ended
            raise

    def _pass_on(self) -> None:
        """Gives a free slot to the next client that may have one."""
        for client, turns in self._waiting.items():
            if self._num_free and self._num_held[client] < self._max_client:
                turn = next((each for each in turns if not each.done()), None)
                if turn is None:
                    continue  # all calls that this client waits for are ending
                self._take(client)
                self._waiting.move_to_end(client)
                self._forget(client, turn)
                turn.set_result(None)
                return

    def _forget(self, client: str, turn: asyncio.Future[None]) -> None:
        turns = self._waiting[client]
        turns.remove(turn)
        if not turns:
            del self._waiting[client]


class _HeldBytes:
    """Bytes of one call's messages that count in a budget."""

    def __init__(self, budget: BodyBudget, client: str) -> None:
        self._budget = budget
        self._client = client
        self._num_bytes = 0

    def take(self, num_bytes: int) -> None:
        """Raises OverloadedError or UnavailableError if there is no memory for them."""
        self._budget.take(self._client, num_bytes)
        self._num_bytes += num_bytes

    def release(self) -> None:
        """They count no longer. Idempotent."""
        if self._num_bytes:
            self._budget.give_back(self._client, self._num_bytes)
            self._num_bytes = 0


_held: ContextVar[_HeldBytes] = ContextVar("held")


def release_message() -> None:
    """The current call's message counts no longer against what its client may have waiting: it was tokenised."""
    _held.get().release()


class MessageInterceptor(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # generic in the type stubs only
    """Outside of all interceptors that may refuse a call."""

    def __init__(
        self,
        slots: ReadSlots,
        bodies: BodyBudget,
        timeout_s: float,
        max_values: Callable[[], int],
        on_error: Callable[[BatonError], None],
        access: AccessControl,
    ) -> None:
        """`timeout_s`: for each message; `max_values`: of each list in a message; `access`: where quotas are."""
        self._slots = slots
        self._bodies = bodies
        self._timeout_s = timeout_s
        self._max_values = max_values
        self._on_error = on_error
        self._access = access

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        """The servicer's handler, given what was read here."""
        handler = await continuation(details)
        if not handler or handler.request_deserializer is None:  # None for an unknown method; else it reads nothing
            return handler
        take = _all_of if handler.request_streaming else _one_of
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
        parse = self._parser(handler.request_deserializer, details.method)
        return make(self._bounded(details.method, _serving(handler), parse, take), None, handler.response_serializer)

    def _bounded(
        self,
        method: str,
        serve: Callable[[Any, Any], Any],
        parse: _Parse,
        take: Callable[[AsyncIterator[Any]], Awaitable[Any]],
    ) -> Callable[[Any, Any], Awaitable[Any]]:
        async def call(messages: AsyncIterator[bytes], context: _Context) -> Any:
            client = client_of_peer(context.peer())
            held = _HeldBytes(self._bodies, client)
            _held.set(held)
            try:
                try:
                    with admitted(self._access, method):
                        request = await take(self._read(messages, client, held, parse))
                        return await answered(serve, request, context)
                except BatonError as error:  # of reading: a servicer turns its own into statuses
                    self._on_error(error)
                    await abort_with(context, error)
            except grpc.aio.AbortError as error:
                request = None
                drop_frames(error)
                raise
            finally:
                held.release()

        return call

    async def _read(
        self, messages: AsyncIterator[bytes], client: str, held: _HeldBytes, parse: _Parse
    ) -> AsyncIterator[Any]:
        """Each message, parsed. Raises OverloadedError, UnavailableError, DeadlineExceededError, PayloadTooLargeError
        or InvalidRequestError."""
        while True:
            async with AsyncExitStack() as stack:
                try:
                    async with asyncio.timeout(self._timeout_s):
                        await stack.enter_async_context(self._slots.held(client))
                except TimeoutError:
                    raise OverloadedError("this client has too many unfinished messages; try again later") from None
                try:
                    async with asyncio.timeout(self._timeout_s):
                        data = await anext(messages, None)
                except TimeoutError:
                    problem = f"the message did not arrive within {self._timeout_s:g} s"
                    raise DeadlineExceededError(problem) from None
            if data is None:
                return
            held.take(len(data))
            tenant = tenant_of_call()
            await others_turn_if_large(tenant, len(data))
            message = parse(data)  # takes some 10 ms if it is large
            await others_turn_if_large(tenant, len(data))
            yield message

    def _parser(self, parse: _Parse, method: str) -> _Parse:
        kind = _input_of(method)

        def parsed(data: bytes) -> Any:
            if kind is not None:
                check_num_values(data, kind, self._max_values())
            try:
                return parse(data)
            except DecodeError as error:
                raise InvalidRequestError(f"the request cannot be parsed: {error}") from None

        return parsed


async def _all_of(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
    return messages


async def _one_of(messages: AsyncIterator[Any]) -> Any:
    message = await anext(messages, None)
    if message is None:
        raise InvalidRequestError("the call ended without a message")
    return message


def _serving(handler: grpc.RpcMethodHandler[Any, Any]) -> Callable[[Any, Any], Any]:
    served = (handler.unary_unary, handler.unary_stream, handler.stream_unary, handler.stream_stream)
    return next(each for each in served if each is not None)


def _input_of(method: str) -> Descriptor | None:
    """Returns the type of a method's request; None: it is not known."""
    service, _, name = method.strip("/").partition("/")
    try:
        return descriptor_pool.Default().FindServiceByName(service).FindMethodByName(name).input_type
    except KeyError:
        return None


def client_of_peer(peer: str) -> str:
    """Returns an id for a client, see `client_of`, by gRPC's name of its end of the connection: ipv4:10.0.0.7:5123."""
    family, _, address = unquote(peer).partition(":")
    return client_of(address.rpartition(":")[0].strip("[]")) if family in ("ipv4", "ipv6") else peer

"""Client channels: keepalive, connect deadlines, and a pool of them by address."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import grpc

from common.errors import UnavailableError
from common.rpc.options import SHARED_OPTIONS, Options

CHANNEL_OPTIONS: Options = [
    *SHARED_OPTIONS,
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.enable_retries", 0),  # the router and the handoff decide what is retried
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),  # pods are reached directly, whatever http_proxy is set to
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 2_000),  # also gRPC's deadline of one connect attempt
    ("grpc.max_reconnect_backoff_ms", 2_000),
]

_READY = grpc.ChannelConnectivity.READY
_BROKEN = (grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN)


ChannelOpener = Callable[[str], grpc.aio.Channel]  # of a host:port


def open_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, server_name: str = ""
) -> grpc.aio.Channel:
    """A channel to host:port. It connects with its first call and reconnects by itself.

    With `credentials` it uses TLS, and the server's certificate must have `server_name`, by default the address's host.
    """
    if credentials is None:
        return grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.aio.secure_channel(address, credentials, options=_tls_options(server_name))


def open_blocking_channel(
    address: str, credentials: grpc.ChannelCredentials | None = None, server_name: str = ""
) -> grpc.Channel:
    """The same as `open_channel` for a caller without an event loop."""
    if credentials is None:
        return grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
    return grpc.secure_channel(address, credentials, options=_tls_options(server_name))


def _tls_options(server_name: str) -> list[tuple[str, int | str]]:
    options: list[tuple[str, int | str]] = [*CHANNEL_OPTIONS]
    if server_name:
        options.append(("grpc.ssl_target_name_override", server_name))
    return options


async def connect(channel: grpc.aio.Channel, timeout_s: float) -> None:
    """Returns once the channel is connected.

    Raises UnavailableError as soon as an attempt is refused, or after `timeout_s` seconds without an answer.
    """
    try:
        async with asyncio.timeout(timeout_s):
            state = channel.get_state(try_to_connect=True)
            while state is not _READY:
                if state in _BROKEN:
                    raise UnavailableError("connection refused")
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
    except TimeoutError as error:
        raise UnavailableError(f"no connection within {timeout_s:g} s") from error


class _PooledChannel:
    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.channel = channel
        self.num_users = 0


class ChannelPool:
    """One channel per address, shared by all who use it at a time. Owns its channels.

    At most `max_idle` unused channels stay open; the least recently used is closed first. A broken channel is replaced
    when it is next used, so that a peer that is back is reached at once and not after a backoff.
    """

    def __init__(self, max_idle: int = 64, opener: ChannelOpener = open_channel) -> None:
        self._max_idle = max_idle
        self._opener = opener
        self._by_address: OrderedDict[str, _PooledChannel] = OrderedDict()  # least recently used first

    @asynccontextmanager
    async def channel(self, address: str, connect_timeout_s: float) -> AsyncIterator[grpc.aio.Channel]:
        """Provides a connected channel within the context. Raises UnavailableError as `connect` does."""
        pooled = await self._take(address)
        try:
            await connect(pooled.channel, connect_timeout_s)
            yield pooled.channel
        finally:
            await self._give_back(pooled)

    async def close(self) -> None:
        """Closes all channels, which ends their calls. Idempotent."""
        while self._by_address:
            _, pooled = self._by_address.popitem()
            await pooled.channel.close(None)

    async def _take(self, address: str) -> _PooledChannel:
        pooled = self._by_address.get(address)
        broken = None
        if pooled is None or pooled.channel.get_state() in _BROKEN:
            broken, pooled = pooled, _PooledChannel(address, self._opener(address))
            self._by_address[address] = pooled
        self._by_address.move_to_end(address)
        pooled.num_users += 1
        if broken is not None and broken.num_users == 0:  # otherwise its last user closes it
            await broken.channel.close(None)
        return pooled

    async def _give_back(self, pooled: _PooledChannel) -> None:
        pooled.num_users -= 1
        if pooled.num_users == 0 and self._by_address.get(pooled.address) is not pooled:
            await pooled.channel.close(None)
        idle = [each for each in self._by_address.values() if each.num_users == 0]
        for surplus in idle[: max(0, len(idle) - self._max_idle)]:
            del self._by_address[surplus.address]
            await surplus.channel.close(None)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

"""A peer that is there but silent: its machine froze, or its process was stopped. Its kernel still takes our bytes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from common.rpc.options import SHARED_OPTIONS, keepalive_options
from common.rpc.server import RpcServer

GRPC_DEFAULT_S = 60.0  # within which gRPC notices by itself


async def test_silent_peer_is_noticed_in_the_time_that_the_options_give() -> None:
    server = RpcServer("127.0.0.1", 0, [])
    async with server, freezing_proxy(server.port) as (port, frozen):
        options = keepalive_options(interval_ms=200, timeout_ms=1_000)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
            statuses = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            await statuses.read()
            frozen.set()
            async with asyncio.timeout(GRPC_DEFAULT_S / 2):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await statuses.read()
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_every_connection_has_them() -> None:
    assert {name for name, _ in keepalive_options(1, 1)} <= {name for name, _ in SHARED_OPTIONS}


@asynccontextmanager
async def freezing_proxy(target: int) -> AsyncIterator[tuple[int, asyncio.Event]]:
    """A port that leads to port `target` until the event is set, and from then on takes bytes and passes none on."""
    frozen = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while chunk := await reader.read(65536):
                if not frozen.is_set():
                    writer.write(chunk)
        finally:
            writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target_reader, target_writer = await asyncio.open_connection("127.0.0.1", target)
        tasks.add(asyncio.create_task(pass_on(reader, target_writer)))
        tasks.add(asyncio.create_task(pass_on(target_reader, writer)))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as proxy:
        yield proxy.sockets[0].getsockname()[1], frozen
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

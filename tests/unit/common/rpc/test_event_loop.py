"""Event loops on which gRPC's events do not pile up."""

from __future__ import annotations

import asyncio
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from common.rpc.event_loop import AsyncioLoop, UvLoop

DEADLINE_S = 60.0
NUM_CALLS = 250  # their operations fit into the socket pair
NUM_HELD_UP = 200


def _watched(kind: type[Any], readers: list[socket.socket]) -> type[Any]:
    class Loop(kind):
        def add_reader(self, fd: Any, callback: Any, *args: Any) -> Any:
            if isinstance(fd, socket.socket):
                readers.append(fd)
            return super().add_reader(fd, callback, *args)

    return Loop


def _num_wakeups(reader: socket.socket) -> int:
    try:
        return len(reader.recv(1 << 16, socket.MSG_PEEK | socket.MSG_DONTWAIT))
    except BlockingIOError:
        return 0


@pytest.mark.parametrize("kind", [AsyncioLoop, UvLoop])
def test_what_has_finished_meanwhile_comes_in_one_round(kind: type[Any]) -> None:
    readers: list[socket.socket] = []

    async def call() -> None:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            method = channel.unary_unary("/any/Method")
            calls = [asyncio.ensure_future(method(b"")) for _ in range(NUM_CALLS)]
            await asyncio.sleep(0)
            deadline = time.monotonic() + DEADLINE_S
            while _num_wakeups(readers[-1]) < NUM_HELD_UP:  # the loop does something else meanwhile
                assert time.monotonic() < deadline
                time.sleep(0.001)  # noqa: ASYNC251
            for _ in range(3):
                await asyncio.sleep(0)
            assert _num_wakeups(readers[-1]) < NUM_HELD_UP // 2
            assert await asyncio.wait_for(asyncio.gather(*calls), DEADLINE_S) == [b"answer"] * NUM_CALLS

    handler = grpc.method_handlers_generic_handler(
        "any", {"Method": grpc.unary_unary_rpc_method_handler(lambda _request, _context: b"answer")}
    )
    server = grpc.server(ThreadPoolExecutor(4), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        with asyncio.Runner(loop_factory=_watched(kind, readers)) as runner:
            runner.run(call())
    finally:
        server.stop(None)

"""Refused connections: answered, counted, and a line of the log now and then."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys

import httpx
import pytest

from router.security.config import LimitsConfig
from router.testing import FakeDecodePod
from tests.fuzz.raw_http import Wire

MAX_FILES = 64
STANDARD_LOOP = "import asyncio, router.__main__ as m; m.UvLoop = asyncio.SelectorEventLoop; m.main()"


async def test_malformed_requests_are_counted_and_logged_once(start_cluster, caplog):
    cluster = await start_cluster()
    for _ in range(20):
        async with Wire.to(cluster.router.port) as wire:
            await wire.send(b"secret nonsense\r\n\r\n")
            assert (await wire.receive()).status == 400
    lines = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert lines == ["HTTP: refused 127.0.0.1 (malformed): Invalid method encountered"]
    assert cluster.metric("baton_router_http_refused_total", reason="malformed") == 20


async def test_requests_to_upgrade_are_answered_and_not_logged(start_cluster, caplog):
    cluster = await start_cluster()
    async with Wire.to(cluster.router.port) as wire:
        for _ in range(3):
            await wire.send(b"GET /version HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n\r\n")
            assert (await wire.receive()).status == 200
    assert "upgrade" not in caplog.text


async def test_connections_beyond_the_limit_are_told_so(start_cluster):
    cluster = await start_cluster(limits=LimitsConfig(max_connections=2))
    await cluster.client.aclose()
    async with Wire.to(cluster.router.port) as first, Wire.to(cluster.router.port) as second:
        for wire in (first, second):
            await wire.send(b"GET /version HTTP/1.1\r\n\r\n")
            assert (await wire.receive()).status == 200
        async with Wire.to(cluster.router.port) as third:
            refused = await third.receive()
            assert (refused.status, refused.json["error"]["code"]) == (503, "unavailable")
            assert int(refused.headers["retry-after"]) >= 1
            assert await third.is_closed()
    assert cluster.metric("baton_router_http_refused_total", reason="connections") == 1
    async with httpx.AsyncClient(base_url=cluster.router.http_url) as client:
        async with asyncio.timeout(30):
            while (await client.get("/version")).status_code != 200:  # until the two are closed there too
                pass


@pytest.mark.parametrize(
    ("command", "max_connections", "num_lines"),
    [
        pytest.param(["-m", "router"], None, 1, id="limited"),
        pytest.param(["-m", "router"], 10_000, 0, id="exhausted"),  # libuv closes what it cannot keep, and is silent
        pytest.param(["-c", STANDARD_LOOP], 10_000, 1, id="exhausted-asyncio"),
    ],
)
async def test_without_descriptors_nothing_is_flooded_and_it_serves_again(command, max_connections, num_lines):
    async with FakeDecodePod() as decode:
        arguments = ["--decode", decode.address, "--port", "0", "--grpc-port", "0", "--no-access-log"]
        arguments += [] if max_connections is None else ["--max-connections", str(max_connections)]
        limited = ["sh", "-c", f'ulimit -n {MAX_FILES} && exec "$@"', "sh", sys.executable, *command, *arguments]
        router = await asyncio.create_subprocess_exec(*limited, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        try:
            line = (await router.stdout.readline()).decode()
            port = int(re.search(r"http=http://127\.0\.0\.1:(\d+)", line)[1])
            await flood(port, router.pid, MAX_FILES if max_connections else MAX_FILES // 2)
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client, asyncio.timeout(60):
                while not await answers(client):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
        finally:
            router.kill()
            logged = (await router.communicate())[1].decode().splitlines()
    assert len([line for line in logged if "accept" in line or "refused" in line]) == num_lines, logged
    assert len(logged) < 10, logged


async def flood(port: int, pid: int, num_files: int) -> None:
    """Opens more connections than there are descriptors, until the router has `num_files` files open."""
    async with contextlib.AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(Wire.to(port)) for _ in range(2 * MAX_FILES)]
        for wire in wires:
            with contextlib.suppress(ConnectionError):
                await wire.send(b"GET /version HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(60):
            while len(os.listdir(f"/proc/{pid}/fd")) < num_files:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def answers(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/version")).status_code == 200
    except httpx.TransportError:
        return False

"""What hostile clients make the router process hold, as the kernel sees it."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from pathlib import Path

import httpx
import pytest

from router.testing import FakeDecodePod
from tests.fuzz.raw_http import Wire

MIB = 2**20
CHUNKED = b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n"


class Target:
    """A router process."""

    def __init__(self, pid: int, port: int) -> None:
        self._pid = pid
        self.port = port
        self._at_first = self._peak()

    @property
    def grown(self) -> int:
        """Bytes by which its peak of resident memory has grown."""
        return self._peak() - self._at_first

    def _peak(self) -> int:
        status = Path(f"/proc/{self._pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) * 1024

    async def send(self, *pieces: bytes) -> None:
        """On a connection of their own, as far as the router takes them."""
        async with Wire.to(self.port) as wire:
            with contextlib.suppress(ConnectionError):
                await wire.send(*pieces)

    async def serves(self) -> bool:
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=60) as client:
            return (await client.post("/v1/completions", json={"prompt": [600], "max_tokens": 2})).status_code == 200


@pytest.fixture
async def target():
    async with FakeDecodePod() as decode:
        arguments = ["--decode", decode.address, "--port", "0", "--grpc-port", "0"]
        router = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "router", *arguments, stdout=asyncio.subprocess.PIPE
        )
        try:
            line = (await asyncio.wait_for(router.stdout.readline(), 60)).decode()
            port = int(re.search(r"http=http://127\.0\.0\.1:(\d+)", line)[1])
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client, asyncio.timeout(60):
                while (await client.get("/health")).status_code != 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            yield Target(router.pid, port)
        finally:
            if router.returncode is None:
                router.kill()
            await router.wait()


async def test_trailers_take_no_memory(target):
    trailers = b"x: y\r\n" * (MIB // 6)
    await asyncio.gather(*(target.send(CHUNKED, *[trailers] * 4) for _ in range(4)))
    assert target.grown < 100 * MIB, "16 MiB of trailers, which would be 450 MB in a list"
    assert await target.serves()


async def test_unfinished_bodies_take_no_more_memory_than_they_may(target):
    head = b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % (16 * MIB)
    async with contextlib.AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(Wire.to(target.port)) for _ in range(24)]
        for wire in wires:
            with contextlib.suppress(ConnectionError):
                await wire.send(head, *[b" " * MIB] * 15)
        assert target.grown < 180 * MIB, "360 MiB of bodies were sent, and a client may have 64"
        assert await target.serves()

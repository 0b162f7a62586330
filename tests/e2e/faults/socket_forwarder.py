"""Passes Unix sockets on to TCP servers: `python -m tests.e2e.faults.socket_forwarder PATH=HOST:PORT...`.

Says "ready" when all are open, and ends at the end of its input.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable, Coroutine

_CHUNK = 64 * 1024
Forward = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def main(pairs: list[str]) -> None:
    """Returns at the end of the input."""
    servers = []
    for pair in pairs:
        path, _, address = pair.partition("=")
        host, _, port = address.rpartition(":")
        servers.append(await asyncio.start_unix_server(_to(host, int(port)), path))
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    for server in servers:
        server.close()


def _to(host: str, port: int) -> Forward:
    async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer), contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection(host, port)
            with contextlib.closing(far_writer):
                await _first_end(_copy(reader, far_writer), _copy(far_reader, writer))

    return forward


async def _first_end(*copies: Coroutine[None, None, None]) -> None:
    tasks = [asyncio.create_task(copy) for copy in copies]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while chunk := await reader.read(_CHUNK):
        writer.write(chunk)
        await writer.drain()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1:]))

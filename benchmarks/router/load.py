"""The load generator, in a process of its own: `python -m benchmarks.router.load`.

Orders come as lines of JSON on stdin, each is answered by one line on stdout:

    answers ADDRESS CONCURRENCY COUNT [CALL]   whole answers of one token -> their latencies
    pods PREFILL DECODE CONCURRENCY COUNT      the same, asked of fake pods directly, both legs
    open ADDRESS STREAMS TOKENS [CALL]         streams that stay open; answered when each had its first event
    finish                                     wait for their ends -> what came
    close                                      drop them

The client is cheap, so that it hardly competes with what it measures: one connection per stream, C parser, no tasks.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol

import httptools
import uvloop

from benchmarks.router.direct import PodClient
from benchmarks.router.workload import COMPLETION, Call

_TOLD_BYTES = 512  # of an error
OPENED_AT_ONCE = 16  # with all at once, the memory of their beginnings would count as that of streams


class Stream(Protocol):
    """One that is open."""

    num_events: int  # so far
    is_complete: bool  # it ended as it should

    def close(self) -> None:
        """Drop it."""


class _Client(asyncio.Protocol):
    """One connection; one request at a time."""

    def __init__(self) -> None:
        self._parser: Any = None
        self._transport: Any = None
        self._end = b""
        self._tail = b""
        self._first: asyncio.Future[None] | None = None
        self._ended: asyncio.Future[None] | None = None
        self.num_events = 0  # of the current request, as is the next
        self.is_complete = False  # the stream ended as it should

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def connection_lost(self, exc: Exception | None) -> None:
        for future in (self._first, self._ended):
            if future is not None and not future.done():
                future.set_exception(exc or ConnectionError("the connection was closed"))
                future.exception()  # looked at: whoever does not wait for it need not know

    def on_body(self, body: bytes) -> None:
        """A part of the answer; an event may be cut in two."""
        self.num_events += body.count(b"\n\n")
        seen = self._tail + body
        self.is_complete = self.is_complete or self._end in seen
        self._tail = seen[-max(len(self._end), _TOLD_BYTES) :]
        if self._first is not None and not self._first.done():
            self._first.set_result(None)

    def on_message_complete(self) -> None:
        """The answer is whole."""
        status = self._parser.get_status_code()
        if self._ended is not None and not self._ended.done():
            if status == 200:
                self._ended.set_result(None)
            else:
                self._ended.set_exception(RuntimeError(f"status {status}: {self._tail!r}"))

    def post(self, host: str, call: Call, body: bytes) -> tuple[asyncio.Future[None], asyncio.Future[None]]:
        """Send a request; futures of the first part of its answer and of its end."""
        loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._first, self._ended = loop.create_future(), loop.create_future()
        self.num_events, self.is_complete, self._tail = 0, False, b""
        self._end = call.stream_end.encode()
        head = f"POST {call.path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        self._transport.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        return self._first, self._ended

    def close(self) -> None:
        """Drop the connection."""
        self._transport.abort()


class Load:
    """Carries out orders."""

    def __init__(self) -> None:
        self._streams: list[Stream] = []
        self._ends: list[asyncio.Future[None]] = []
        self._num_seen = 0  # events, when all streams were open
        self._pods: dict[tuple[str, str], PodClient] = {}

    async def answers(
        self, address: str, concurrency: int, count: int, call: Sequence[Any] = COMPLETION
    ) -> dict[str, Any]:
        """Latencies of so many one-token answers."""
        clients = [await _connect(address) for _ in range(concurrency)]
        asked = Call(*call)
        body = asked.body(1, stream=False)

        async def ask(client: _Client) -> None:
            await client.post(address, asked, body)[1]

        measured = await repeat([lambda client=client: ask(client) for client in clients], count)
        for client in clients:
            client.close()
        return measured

    async def pods(self, prefill: str, decode: str, concurrency: int, count: int) -> dict[str, Any]:
        """The same without a router."""
        if (prefill, decode) not in self._pods:
            self._pods[prefill, decode] = PodClient(prefill, decode)
        client = self._pods[prefill, decode]
        return await repeat([client.first_token] * concurrency, count)

    async def open(self, address: str, streams: int, tokens: int, call: Sequence[Any] = COMPLETION) -> dict[str, Any]:
        """More streams, which go on until finish or close."""
        asked = Call(*call)
        body = asked.body(tokens, stream=True)
        for start in range(0, streams, OPENED_AT_ONCE):
            clients = [await _connect(address) for _ in range(min(OPENED_AT_ONCE, streams - start))]
            begun = [client.post(address, asked, body) for client in clients]
            await asyncio.gather(*(first for first, _ in begun))
            self.add([(client, ended) for client, (_, ended) in zip(clients, begun, strict=True)])
        return {}

    def add(self, begun: Sequence[tuple[Stream, asyncio.Future[None]]]) -> None:
        """Streams that have had their first event, with their ends."""
        for stream, ended in begun:
            self._streams.append(stream)
            self._ends.append(ended)
        self._num_seen = sum(stream.num_events for stream in self._streams)

    async def finish(self) -> dict[str, Any]:
        """Returns the figures of all streams from when they were open until the last had ended."""
        await asyncio.gather(*self._ends)
        broken = sum(not client.is_complete for client in self._streams)
        if broken:
            raise RuntimeError(f"{broken} of {len(self._streams)} streams did not end as they should")
        num_events = sum(client.num_events for client in self._streams) - self._num_seen
        num_events -= len(self._streams)  # [DONE] is none of them
        await self.close()
        return {"num_events": num_events}

    async def close(self) -> dict[str, Any]:
        """Drop all streams."""
        for client in self._streams:
            client.close()
        self._streams, self._ends = [], []
        return {}


async def repeat(askers: list[Any], count: int) -> dict[str, Any]:
    """`count` calls in all, by all askers at once; each goes on as soon as it is answered."""
    latencies: list[float] = []
    turns = itertools.count()

    async def work(ask: Any) -> None:
        while next(turns) < count:
            began = time.perf_counter()
            await ask()
            latencies.append(time.perf_counter() - began)

    started = time.perf_counter()
    await asyncio.gather(*(work(ask) for ask in askers))
    return {"latencies": latencies, "wall_s": time.perf_counter() - started}


async def _connect(address: str) -> _Client:
    host, _, port = address.rpartition(":")
    _, client = await asyncio.get_running_loop().create_connection(_Client, host, int(port))
    return client


async def obey(load: object) -> None:
    """Takes orders, each a method of `load`, until stdin ends."""
    loop = asyncio.get_running_loop()
    print("ready", flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        name, *arguments = json.loads(line)
        try:
            answer = await getattr(load, name)(*arguments)
        except (OSError, RuntimeError) as error:
            answer = {"error": repr(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    uvloop.run(obey(Load()))

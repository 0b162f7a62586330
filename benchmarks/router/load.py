"""The load generator, in a process of its own: `python -m benchmarks.router.load`.

Orders, as `Child.ask` gives them; those of chats over gRPC go all on one connection:

    answers ADDRESS CONCURRENCY COUNT [CALL]   whole answers of one token -> their latencies
    pods PREFILL DECODE CONCURRENCY COUNT      the same, asked of fake pods directly, both legs
    grpc_answers ADDRESS CONCURRENCY COUNT     the same of chats over gRPC
    open ADDRESS STREAMS TOKENS [CALL]         streams that stay open; answered when each had its first event
    grpc_open ADDRESS STREAMS TOKENS           the same of chats over gRPC
    finish                                     wait for their ends -> what came
    close                                      drop them
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import uvloop

from benchmarks.harness.processes import obey
from benchmarks.router.direct import PodClient
from benchmarks.router.workload import COMPLETION, MODEL, PROMPT, Call
from common.pb import inference_pb2, inference_pb2_grpc
from common.rpc.channel import open_channel
from loadgen.events import error_in
from loadgen.http_client import HttpClient, RequestFailed

_TIMEOUT_S = 600.0
_OPENED_AT_ONCE = 16  # with all at once, the memory of their beginnings would count as that of streams


class Stream:
    """One that is open, and read by a task."""

    def __init__(self) -> None:
        self.num_events = 0  # so far
        self.is_complete = False  # it ended as it should
        self.first = asyncio.get_running_loop().create_future()
        self.ended = asyncio.create_task(self._read())

    def note(self, num_events: int) -> None:
        """Some more have come."""
        self.num_events += num_events
        if not self.first.done():
            self.first.set_result(None)

    async def begin(self) -> None:
        """Waits for the first event, or for an error instead."""
        await asyncio.wait((self.first, self.ended), return_when=asyncio.FIRST_COMPLETED)
        if not self.first.done():
            await self.ended

    async def _read(self) -> None:
        raise NotImplementedError


class _HttpStream(Stream):
    def __init__(self, client: HttpClient, call: Call, body: bytes) -> None:
        self._client, self._call, self._body = client, call, body
        self._end, self._tail = call.stream_end.encode(), b""
        super().__init__()

    async def _read(self) -> None:
        await _post(self._client, self._call, self._body, self._take)

    def _take(self, body: bytes, _: float) -> None:
        """Takes a part of the answer; an event may be cut in two."""
        seen = self._tail + body
        self.is_complete = self.is_complete or self._end in seen
        self._tail = seen[-len(self._end) :]
        self.note(body.count(b"\n\n"))


class _GrpcStream(Stream):
    def __init__(self, stub: inference_pb2_grpc.InferenceAsyncStub, message: inference_pb2.GenerateRequest) -> None:
        self._stub, self._message = stub, message
        super().__init__()

    async def _read(self) -> None:
        try:
            async for chunk in self._stub.GenerateStream(self._message, timeout=_TIMEOUT_S):
                self.is_complete = bool(chunk.finish_reason)
                self.note(1)
        except grpc.aio.AioRpcError as error:
            raise RuntimeError(error.details()) from error


class Load:
    """Carries out orders."""

    def __init__(self) -> None:
        self._streams: list[Stream] = []
        self._num_seen = 0  # events, when all streams were open
        self._clients: dict[str, HttpClient] = {}
        self._pods: dict[tuple[str, str], PodClient] = {}
        self._stubs: dict[str, inference_pb2_grpc.InferenceAsyncStub] = {}

    async def answers(
        self, address: str, concurrency: int, count: int, call: Sequence[Any] = COMPLETION
    ) -> dict[str, Any]:
        """Latencies of so many one-token answers."""
        client, asked = self._client(address), Call(*call)
        body = asked.body(1, stream=False)
        return await _repeat(lambda: _post(client, asked, body), concurrency, count)

    async def pods(self, prefill: str, decode: str, concurrency: int, count: int) -> dict[str, Any]:
        """The same without a router."""
        if (prefill, decode) not in self._pods:
            self._pods[prefill, decode] = PodClient(prefill, decode)
        return await _repeat(self._pods[prefill, decode].first_token, concurrency, count)

    async def grpc_answers(self, address: str, concurrency: int, count: int) -> dict[str, Any]:
        """The same over gRPC."""
        stub, message = self._stub(address), _message(1)

        async def ask() -> None:
            try:
                await stub.Generate(message, timeout=_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise RuntimeError(error.details()) from error

        return await _repeat(ask, concurrency, count)

    async def open(self, address: str, streams: int, tokens: int, call: Sequence[Any] = COMPLETION) -> dict[str, Any]:
        """More streams, which go on until finish or close."""
        client, asked = self._client(address), Call(*call)
        body = asked.body(tokens, stream=True)
        return await self._open(streams, lambda: _HttpStream(client, asked, body))

    async def grpc_open(self, address: str, streams: int, tokens: int) -> dict[str, Any]:
        """The same over gRPC."""
        stub, message = self._stub(address), _message(tokens)
        return await self._open(streams, lambda: _GrpcStream(stub, message))

    async def finish(self) -> dict[str, Any]:
        """Returns the figures of all streams from when they were open until the last had ended."""
        await asyncio.gather(*(stream.ended for stream in self._streams))
        broken = sum(not stream.is_complete for stream in self._streams)
        if broken:
            raise RuntimeError(f"{broken} of {len(self._streams)} streams did not end as they should")
        num_events = sum(stream.num_events for stream in self._streams) - self._num_seen
        num_events -= len(self._streams)  # [DONE] is none of them
        self._streams = []
        return {"num_events": num_events}

    async def close(self) -> dict[str, Any]:
        """Drop all streams."""
        for stream in self._streams:
            stream.ended.cancel()
        await asyncio.gather(*(stream.ended for stream in self._streams), return_exceptions=True)
        self._streams = []
        return {}

    async def _open(self, count: int, begin: Callable[[], Stream]) -> dict[str, Any]:
        for start in range(0, count, _OPENED_AT_ONCE):
            begun = [begin() for _ in range(min(_OPENED_AT_ONCE, count - start))]
            await asyncio.gather(*(stream.begin() for stream in begun))
            self._streams += begun
        self._num_seen = sum(stream.num_events for stream in self._streams)
        return {}

    def _client(self, address: str) -> HttpClient:
        if address not in self._clients:
            self._clients[address] = HttpClient(f"http://{address}")
        return self._clients[address]

    def _stub(self, address: str) -> inference_pb2_grpc.InferenceAsyncStub:
        if address not in self._stubs:
            self._stubs[address] = inference_pb2_grpc.InferenceStub(open_channel(address))
        return self._stubs[address]


async def _post(
    client: HttpClient, call: Call, body: bytes, on_body: Callable[[bytes, float], None] | None = None
) -> None:
    response = await client.request("POST", call.path, body, timeout_s=_TIMEOUT_S, on_body=on_body)
    if response.status != 200:
        raise RequestFailed(f"status {response.status}", error_in(response.body))


async def _repeat(ask: Callable[[], Awaitable[None]], concurrency: int, count: int) -> dict[str, Any]:
    """`count` calls in all, so many at once; each goes on as soon as it is answered."""
    latencies: list[float] = []
    turns = itertools.count()

    async def work() -> None:
        while next(turns) < count:
            began = time.perf_counter()
            await ask()
            latencies.append(time.perf_counter() - began)

    started = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return {"latencies": latencies, "wall_s": time.perf_counter() - started}


def _message(max_tokens: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        model=MODEL,
        chat=inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content=PROMPT)]),
        options=inference_pb2.GenerateOptions(temperature=0, max_tokens=max_tokens),
    )


if __name__ == "__main__":
    uvloop.run(obey(Load()))

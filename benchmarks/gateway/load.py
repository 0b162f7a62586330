"""The load generator with gRPC, in a process of its own: `python -m benchmarks.gateway.load`.

Beside the orders of benchmarks.router.load it takes, for chats over gRPC, all on one connection:

    grpc_answers ADDRESS CONCURRENCY COUNT
    grpc_open ADDRESS STREAMS TOKENS
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import uvloop

from benchmarks.router.load import OPENED_AT_ONCE, Load, obey, repeat
from benchmarks.router.workload import MODEL, PROMPT
from common.pb import inference_pb2, inference_pb2_grpc
from common.rpc.channel import open_channel

_TIMEOUT_S = 600.0


class _Stream:
    """One call, read by a task."""

    def __init__(self, stub: inference_pb2_grpc.InferenceStub, message: inference_pb2.GenerateRequest) -> None:
        self.num_events = 0
        self.is_complete = False
        self.first = asyncio.get_running_loop().create_future()
        self.ended = asyncio.create_task(self._read(stub, message))

    async def _read(self, stub: inference_pb2_grpc.InferenceStub, message: inference_pb2.GenerateRequest) -> None:
        try:
            async for chunk in stub.GenerateStream(message, timeout=_TIMEOUT_S):
                self.num_events += 1
                self.is_complete = bool(chunk.finish_reason)
                if not self.first.done():
                    self.first.set_result(None)
        except grpc.aio.AioRpcError as error:
            raise RuntimeError(error.details()) from error
        finally:
            self.first.cancel()

    def close(self) -> None:
        """Drop the call."""
        self.ended.cancel()


class _GatewayLoad(Load):
    def __init__(self) -> None:
        super().__init__()
        self._stubs: dict[str, inference_pb2_grpc.InferenceStub] = {}

    async def grpc_answers(self, address: str, concurrency: int, count: int) -> dict[str, Any]:
        """Latencies of so many one-token answers."""
        stub, message = self._stub(address), _message(1)

        async def ask() -> None:
            try:
                await stub.Generate(message, timeout=_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise RuntimeError(error.details()) from error

        return await repeat([ask] * concurrency, count)

    async def grpc_open(self, address: str, streams: int, tokens: int) -> dict[str, Any]:
        """More streams, which go on until finish or close."""
        stub, message = self._stub(address), _message(tokens)
        for start in range(0, streams, OPENED_AT_ONCE):
            begun = [_Stream(stub, message) for _ in range(min(OPENED_AT_ONCE, streams - start))]
            await asyncio.gather(*(each.first for each in begun))
            self.add([(each, each.ended) for each in begun])
        return {}

    def _stub(self, address: str) -> inference_pb2_grpc.InferenceStub:
        if address not in self._stubs:
            self._stubs[address] = inference_pb2_grpc.InferenceStub(open_channel(address))
        return self._stubs[address]


def _message(max_tokens: int) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest(
        model=MODEL,
        chat=inference_pb2.ChatPrompt(messages=[{"role": "user", "content": PROMPT}]),
        options=inference_pb2.GenerateOptions(temperature=0, max_tokens=max_tokens),
    )


if __name__ == "__main__":
    uvloop.run(obey(_GatewayLoad()))

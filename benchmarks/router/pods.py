"""A fake pod that answers at once, in a process of its own: `python -m benchmarks.router.pods prefill|decode [ANSWER]`.

Real gRPC and the real protocol; only the engine is missing. A decode pod sends one message per step with one token for
each of its requests, as fast as it can or as it is told (see pace).
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from typing import Any

import grpc
import uvloop

from benchmarks.router.pace import Pace
from benchmarks.router.workload import ANSWER, MAX_MODEL_LEN
from common.pb import common_pb2, pods_pb2, pods_pb2_grpc
from common.tokenization import Tokenizer
from decode_service.delta_buffer import DeltaBuffer
from router.serving.model_files import resolve_model
from router.testing import FakePod

_NUM_BLOCKS = 10_000_000
_MAX_REQUESTS = 1 << 16


class _Request:
    """The rest of a request."""

    __slots__ = ("index", "request_id", "size")

    def __init__(self, request: common_pb2.EngineRequest) -> None:
        self.request_id = request.request_id
        self.index = len(request.output_token_ids)
        self.size = request.sampling.max_tokens

    def step(self, answer: list[int]) -> pods_pb2.TokenDelta:
        """Its next token."""
        index = self.index
        self.index += 1
        delta = pods_pb2.TokenDelta(
            request_id=self.request_id, start_index=index, token_ids=(answer[index % len(answer)],)
        )
        if index == 0:
            delta.report.num_cached_tokens = 0
        if self.index == self.size:
            delta.finish_reason = common_pb2.FINISH_REASON_LENGTH
        return delta


class _Pod(FakePod):
    def __init__(self, answer: list[int]) -> None:
        super().__init__(max_model_len=MAX_MODEL_LEN)
        self.answer = answer
        self.pace = Pace()
        self.info.num_blocks = self.stats.num_blocks = self.stats.num_free_blocks = _NUM_BLOCKS
        self.info.max_num_seqs = _MAX_REQUESTS


class _PrefillPod(_Pod):
    role = pods_pb2.POD_ROLE_PREFILL
    service_name = "baton.v1.Prefill"

    def add_service(self, server: grpc.aio.Server) -> None:
        """See FakePod."""
        pods_pb2_grpc.add_PrefillServicer_to_server(_PrefillServicer(self), server)


class _DecodePod(_Pod):
    role = pods_pb2.POD_ROLE_DECODE
    service_name = "baton.v1.Decode"

    def add_service(self, server: grpc.aio.Server) -> None:
        """See FakePod."""
        pods_pb2_grpc.add_DecodeServicer_to_server(_DecodeServicer(self), server)


class _PrefillServicer(pods_pb2_grpc.PrefillServicer):
    def __init__(self, pod: _Pod) -> None:
        self._pod = pod

    async def Prefill(  # noqa: N802
        self, request: pods_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pods_pb2.PrefillResponse:
        """The first token."""
        is_last = request.request.sampling.max_tokens == 1
        reason = common_pb2.FINISH_REASON_LENGTH if is_last else common_pb2.FINISH_REASON_UNSPECIFIED
        return pods_pb2.PrefillResponse(first_token_id=self._pod.answer[0], finish_reason=reason)


class _DecodeServicer(pods_pb2_grpc.DecodeServicer):
    def __init__(self, pod: _Pod) -> None:
        self._pod = pod

    async def Session(  # type: ignore[override]  # noqa: N802  (grpc.aio also takes a coroutine that writes)
        self,
        request_iterator: AsyncIterator[pods_pb2.DecodeCommand],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """One message per step, or for several steps where the last message has not gone yet."""
        pace, answer = self._pod.pace, self._pod.answer
        new: dict[str, _Request] = {}  # without their first token
        running: dict[str, _Request] = {}
        buffer = DeltaBuffer(max_keys=_MAX_REQUESTS)
        tasks = [
            asyncio.create_task(self._read(request_iterator, new, running)),
            asyncio.create_task(buffer.write_to(context.write)),
        ]
        try:
            while True:
                await pace.next_step(lambda: bool(new or (running and not pace.is_held)))
                stepping = new if pace.is_held else new | running
                deltas = [request.step(answer) for request in stepping.values()]
                running.update(new)
                new.clear()
                for delta in deltas:
                    if delta.finish_reason:
                        del running[delta.request_id]
                    buffer.put(delta.request_id, delta)
                pace.note(len(running))
        finally:
            for task in tasks:
                task.cancel()

    async def _read(
        self, commands: AsyncIterator[pods_pb2.DecodeCommand], new: dict[str, _Request], running: dict[str, _Request]
    ) -> None:
        async for command in commands:
            match command.WhichOneof("command"):
                case "submit":
                    request = command.submit.request
                    new[request.request_id] = _Request(request)
                    self._pod.pace.wake()
                case "abort":
                    new.pop(command.abort.request_id, None)
                    running.pop(command.abort.request_id, None)
            self._pod.pace.note(len(new) + len(running))


async def _serve(role: str, text: str = ANSWER) -> None:
    directory, _ = resolve_model("", None)
    answer = Tokenizer.from_directory(directory).encode(text)
    pod = _PrefillPod(answer) if role == "prefill" else _DecodePod(answer)
    async with pod:
        print(pod.address, flush=True)
        await pod.pace.obey()


if __name__ == "__main__":
    uvloop.run(_serve(*sys.argv[1:]))

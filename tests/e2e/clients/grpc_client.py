"""baton.v1.Inference from a client's side: whole answers and streams."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import grpc

from common.pb import common_pb2, inference_pb2, inference_pb2_grpc
from common.rpc.convert import finish_reason_from_pb
from tests.e2e.clients.answers import NO_HEADERS, Answer, Choice, Position
from tests.e2e.clients.progress import Progress
from tests.e2e.clients.specs import RequestSpec

CALL_DEADLINE_S = 300.0
_Piece = inference_pb2.Choice | inference_pb2.GenerateChunk


class GrpcFront:
    """Channels to one or more routers; a request names them by number."""

    def __init__(self, channels: Sequence[grpc.aio.Channel], headers: Mapping[str, str] = NO_HEADERS) -> None:
        self._stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]
        self._metadata = tuple(headers.items())

    async def hear(self, spec: RequestSpec, answer: Answer, progress: Progress) -> None:
        """Sends the request and fills in the answer."""
        stub = self._stubs[spec.routers[0] % len(self._stubs)]
        call = stub.GenerateStream if spec.stream else stub.Generate
        sent = call(spec.grpc_message(), timeout=CALL_DEADLINE_S, metadata=self._metadata)
        answer.choices = [Choice(token_ids=[]) for _ in range(spec.n)]
        try:
            if spec.stream:
                ends: list[inference_pb2.Usage] = []
                async for chunk in sent:
                    _take(answer, chunk, chunk.start_index)
                    ends += [chunk.usage] if chunk.finish_reason else []
                    progress.advance()
                if len(ends) == spec.n:
                    answer.num_tokens = sum(usage.completion_tokens for usage in ends)
                    answer.num_prompt_tokens = ends[0].prompt_tokens
            else:
                whole = await sent
                for choice in whole.choices:
                    _take(answer, choice, 0)
                answer.num_tokens = whole.usage.completion_tokens
                answer.num_prompt_tokens = whole.usage.prompt_tokens
        except grpc.aio.AioRpcError as error:
            answer.error = f"{error.code().name}: {error.details()}"
            answer.is_unavailable = error.code() is grpc.StatusCode.UNAVAILABLE
            answer.is_overload = error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


@asynccontextmanager
async def grpc_channels(targets: Sequence[str]) -> AsyncIterator[list[grpc.aio.Channel]]:
    """A connection of its own to each."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(grpc.aio.insecure_channel(target, options=options)) for target in targets
        ]


def _take(answer: Answer, message: _Piece, start: int) -> None:
    choice = answer.choices[message.index]
    assert choice.token_ids is not None
    if message.token_ids and start != len(choice.token_ids):
        answer.error = f"tokens from index {start} on after {len(choice.token_ids)}"
    choice.text += message.text
    choice.token_ids += message.token_ids
    choice.positions += map(_position, message.token_ids, message.logprobs)
    if (reason := finish_reason_from_pb(message.finish_reason)) is not None:
        choice.finish_reason = reason.label


def _position(token_id: int, logprobs: common_pb2.PositionLogprobs) -> Position:
    return Position(token_id, logprobs.sampled, [(each.token_id, each.logprob) for each in logprobs.top])

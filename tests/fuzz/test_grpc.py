"""Whatever comes over gRPC: a true answer or a status that names the fault, in time, and nothing is left of it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.pb import inference_pb2
from common.pb.inference_pb2_grpc import InferenceStub
from common.rpc.channel import open_channel
from router.security.config import SecurityConfig
from tests.fuzz.grpc_strategies import CREDENTIALS, Metadata, good_requests, metadata, requests
from tests.fuzz.host import DEADLINE_S, Footprint, Host, profile, sizes
from tests.fuzz.http_strategies import MAX_BODY_BYTES
from tests.fuzz.proto_strategies import bytes_of, messages
from tests.fuzz.router_host import budget, check_quiet, key_file, router_host
from tests.unit.router.router_cluster import RouterCluster

METHODS = ["Generate", "GenerateStream", "Abort", "ListModels"]
STREAMED = "GenerateStream"
GOOD = inference_pb2.GenerateRequest(text="Hi", options=inference_pb2.GenerateOptions(max_tokens=4))

_WHOLE, _CHUNK = inference_pb2.GenerateResponse, inference_pb2.GenerateChunk
_REFUSALS = {
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.RESOURCE_EXHAUSTED,  # too large, or too much at once
    grpc.StatusCode.UNAUTHENTICATED,  # without a key, where there are keys
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,  # that the request named
}
_aborts = messages(inference_pb2.AbortRequest).filter(lambda abort: abort.ByteSize() <= MAX_BODY_BYTES)


@pytest.fixture(scope="module", params=[False, True], ids=["open", "keys"])
def host(request, tmp_path_factory) -> Iterator[Host[RouterCluster]]:
    with router_host(security=key_file(tmp_path_factory.mktemp("keys")) if request.param else SecurityConfig()) as host:
        yield host


@pytest.fixture
def channel(host) -> Iterator[grpc.aio.Channel]:
    """To the router; when it closes, there is nothing more of its calls than before them."""

    async def connect() -> grpc.aio.Channel:
        channel = open_channel(host.value.router.grpc_address)
        await InferenceStub(channel).ListModels(
            inference_pb2.ListModelsRequest(), timeout=DEADLINE_S, metadata=CREDENTIALS
        )
        return channel

    channel = host.run(connect())
    footprint = Footprint(host)
    yield channel
    settle(host, channel)
    check_quiet(host)
    footprint.check()
    host.run(channel.close(None))


def settle(host: Host[RouterCluster], channel: grpc.aio.Channel) -> None:
    """Calls that were cancelled have come, which they do in order, and are over."""
    router = host.value.router
    for _ in range(2):
        host.run(
            InferenceStub(channel).ListModels(
                inference_pb2.ListModelsRequest(), timeout=DEADLINE_S, metadata=CREDENTIALS
            )
        )
    loads = [pod.engines[0].load for pod in router.cluster.pods]
    host.wait_for(lambda: not router.service._running and not any(load.num_requests for load in loads))


@sizes(15, 5_000)
def test_any_message_is_answered(host, channel, num_examples):
    stub = InferenceStub(channel)

    @profile(num_examples)
    @given(st.sampled_from(["Generate", STREAMED]), requests, metadata)
    def holds(method: str, request: inference_pb2.GenerateRequest, sent: Metadata) -> None:
        with budget(host):
            host.run(check_call(getattr(stub, method)(request, metadata=sent, timeout=DEADLINE_S)))

    holds()


@sizes(10, 5_000)
def test_any_bytes_are_answered_or_refused(host, channel, num_examples):
    @profile(num_examples)
    @given(st.sampled_from([*METHODS, "None", ""]), bytes_of(good_requests), metadata)
    def holds(method: str, sent: bytes, entries: Metadata) -> None:
        allowed = _REFUSALS | ({grpc.StatusCode.UNIMPLEMENTED} if method not in METHODS else set())
        with budget(host):
            host.run(check_call(raw_call(channel, method, sent, metadata=entries), allowed, may_not_parse=True))

    holds()


@sizes(10, 5_000)
def test_calls_cancelled_at_any_point_leave_nothing_behind(host, channel, num_examples):
    stub = InferenceStub(channel)

    @profile(num_examples)
    @given(st.sampled_from(["Generate", STREAMED]), good_requests, st.integers(0, 40), st.integers(0, 6))
    def holds(method: str, request: inference_pb2.GenerateRequest, num_turns: int, num_reads: int) -> None:
        with budget(host):
            call = getattr(stub, method)(request, timeout=DEADLINE_S, metadata=CREDENTIALS)
            host.run(leave(call, num_turns, num_reads if method == STREAMED else 0))

    holds()


@sizes(12, 2_000)
def test_an_abort_ends_what_it_names_at_any_point(host, channel, num_examples):
    stub = InferenceStub(channel)

    @profile(num_examples)
    @given(_aborts, st.booleans(), st.integers(0, 40))
    def holds(abort: inference_pb2.AbortRequest, is_meant: bool, num_turns: int) -> None:
        request = inference_pb2.GenerateRequest(text="Hi", request_id="mine")
        if is_meant:
            abort.request_id = "mine"
        with budget(host):
            host.run(check_aborted(stub, request, abort, num_turns))

    holds()


def test_a_good_request_is_answered_after_all_that(host, channel):
    answer = host.run(InferenceStub(channel).Generate(GOOD, timeout=DEADLINE_S, metadata=CREDENTIALS))
    assert len(answer.choices[0].token_ids) == 4


async def check_call(call: Any, allowed: set[grpc.StatusCode] = _REFUSALS, *, may_not_parse: bool = False) -> None:
    """It ends with a whole answer, or a status that says what is wrong in one line."""
    try:
        answers = [chunk async for chunk in call] if hasattr(call, "read") else [await call]
    except grpc.aio.AioRpcError as error:
        refused = error
    else:
        return check_answer(answers)
    details = refused.details()
    assert details, refused
    assert refused.code() in allowed, refused
    assert "\n" not in details, refused
    return None


def check_answer(answers: list[Any]) -> None:
    """Each choice ends once, in its last message."""
    pieces = [choice for answer in answers if isinstance(answer, _WHOLE) for choice in answer.choices]
    pieces += [answer for answer in answers if isinstance(answer, _CHUNK)]
    for index in {piece.index for piece in pieces}:
        ends = [piece.finish_reason for piece in pieces if piece.index == index]
        assert ends[-1] != 0
        assert not any(ends[:-1])


async def check_aborted(
    stub: InferenceStub, request: inference_pb2.GenerateRequest, abort: inference_pb2.AbortRequest, num_turns: int
) -> None:
    """The generation ends either way, and the abort says whether it was its doing."""
    generating = asyncio.ensure_future(stub.Generate(request, timeout=DEADLINE_S, metadata=CREDENTIALS))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    found = (await stub.Abort(abort, timeout=DEADLINE_S, metadata=CREDENTIALS)).found
    answer = await generating
    assert answer.choices[0].finish_reason
    assert not found or abort.request_id == "mine"


async def leave(call: Any, num_turns: int, num_reads: int) -> None:
    """Reads so many chunks at most, lets the loop turn so often, and cancels."""
    with suppress(grpc.aio.AioRpcError):  # refused: its status is looked at
        for _ in range(num_reads):
            if await call.read() is grpc.aio.EOF:
                break
    for _ in range(num_turns):
        await asyncio.sleep(0)
    call.cancel()
    assert await call.code() in _REFUSALS | {grpc.StatusCode.CANCELLED, grpc.StatusCode.OK}, call


def raw_call(channel: grpc.aio.Channel, method: str, sent: bytes, **options: Any) -> Any:
    """Of bytes, by a client that knows no messages."""
    start = channel.unary_stream if method == STREAMED else channel.unary_unary
    return start(f"/baton.v1.Inference/{method}")(sent, timeout=DEADLINE_S, **options)

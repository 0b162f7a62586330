import inspect
from collections.abc import Callable

import grpc
import pytest
from google.protobuf.message import DecodeError

from common import errors
from common.errors import BatonError, ErrorCode, InvalidRequestError, OverloadedError
from common.pb import pods_pb2, pods_pb2_grpc
from common.rpc.channel import open_channel
from common.rpc.errors import error_from_pb, error_to_pb, from_rpc_error, rpc_errors
from common.rpc.server import RpcServer


class FailingPrefill(pods_pb2_grpc.PrefillServicer):
    def __init__(self, make: Callable[[], Exception], count_internal: Callable[[], None]) -> None:
        self.make = make
        self.count_internal = count_internal

    async def Prefill(self, request, context):  # noqa: N802
        async with rpc_errors(context, self.count_internal):
            raise self.make()


async def call_failing_with(
    make: Callable[[], Exception], count_internal: Callable[[], None] = lambda: None
) -> grpc.aio.AioRpcError:
    server = RpcServer("127.0.0.1", 0, ["baton.v1.Prefill"])
    pods_pb2_grpc.add_PrefillServicer_to_server(FailingPrefill(make, count_internal), server.grpc_server)
    async with server, open_channel(server.address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await pods_pb2_grpc.PrefillStub(channel).Prefill(pods_pb2.PrefillRequest(), timeout=10)
    return caught.value


async def test_error_keeps_its_class_over_the_wire() -> None:
    rpc_error = await call_failing_with(lambda: InvalidRequestError("top_p must be positive", param="top_p"))
    assert rpc_error.code() is grpc.StatusCode.INVALID_ARGUMENT
    error = from_rpc_error(rpc_error)
    assert (type(error), error.message, error.param) == (InvalidRequestError, "top_p must be positive", "top_p")


async def test_overload_tells_when_to_come_back() -> None:
    failure = OverloadedError("full", param="x-slo-ttft-ms", retry_after_s=2.5)
    error = from_rpc_error(await call_failing_with(lambda: failure))
    assert isinstance(error, OverloadedError)
    assert (error.retry_after_s, error.param) == (2.5, "x-slo-ttft-ms")


async def test_a_message_is_one_short_line_whatever_it_quotes() -> None:
    message = "x is 'a\r\nb\u2028c'" + "y" * 20_000  # more than the metadata of a status may have
    rpc_error = await call_failing_with(lambda: InvalidRequestError(message, param="x"))
    assert rpc_error.code() is grpc.StatusCode.INVALID_ARGUMENT
    for told in (rpc_error.details(), error_to_pb(InvalidRequestError(message)).message):
        assert told is not None
        assert told.startswith("x is 'a b c'yyy")
        assert len(told.splitlines()) == 1
        assert len(told) < 1000


async def test_a_message_of_a_stream_that_cannot_be_parsed_is_the_callers_fault() -> None:
    rpc_error = await call_failing_with(lambda: DecodeError("Wire format was corrupt"))
    assert rpc_error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert rpc_error.details() == "invalid message: Wire format was corrupt"


async def test_unforeseen_exception_is_logged_and_counted_and_leaks_nothing(caplog: pytest.LogCaptureFixture) -> None:
    counted: list[int] = []
    rpc_error = await call_failing_with(lambda: RuntimeError("the secret path"), lambda: counted.append(1))
    assert counted == [1]
    assert rpc_error.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in (rpc_error.details() or "")
    assert "the secret path" in caplog.text
    assert from_rpc_error(rpc_error).code is ErrorCode.INTERNAL


def test_status_without_our_metadata_is_understood() -> None:
    for status, code in [
        (grpc.StatusCode.UNAVAILABLE, ErrorCode.UNAVAILABLE),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, ErrorCode.TOO_LARGE),
        (grpc.StatusCode.DATA_LOSS, ErrorCode.INTERNAL),
    ]:
        empty = grpc.aio.Metadata()
        assert from_rpc_error(grpc.aio.AioRpcError(status, empty, empty, "details")).code is code


def test_every_error_class_survives_as_a_stream_event() -> None:
    classes = [
        cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, BatonError) and cls.code
    ]
    for cls in classes:
        returned = error_from_pb(error_to_pb(cls("what happened")))
        assert (returned.code, returned.message) == (cls.code, "what happened")
    assert {error_from_pb(error_to_pb(cls("x"))).code for cls in classes} == set(ErrorCode)

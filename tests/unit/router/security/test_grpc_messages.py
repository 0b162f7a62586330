"""What gRPC clients may send, how slowly, and what is left of it."""

from __future__ import annotations

import asyncio
import gc

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.errors import PayloadTooLargeError, UnknownModelError
from common.pb import inference_pb2, inference_pb2_grpc
from router.requests.bounds import MAX_MESSAGES
from router.security.config import LimitsConfig
from router.security.grpc_messages import ReadSlots, client_of_peer
from router.security.message_size import MAX_FIELDS, check_num_values

GENERATE = "/baton.v1.Inference/Generate"
KIND = inference_pb2.GenerateRequest.DESCRIPTOR
MAX_VALUES = 1024


def tokens(num_tokens):
    return inference_pb2.GenerateRequest(tokens=inference_pb2.TokenPrompt(token_ids=[300] * num_tokens))


def chat(num_messages):
    message = inference_pb2.ChatMessage(role="user", content="x" * 300)
    return inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt(messages=[message] * num_messages))


@pytest.mark.parametrize(
    "request_", [tokens(MAX_VALUES), chat(MAX_MESSAGES), inference_pb2.GenerateRequest(text="x" * 2**20)]
)
def test_the_largest_requests_pass(request_):
    check_num_values(request_.SerializeToString(), KIND, MAX_VALUES)


@pytest.mark.parametrize(
    "data",
    [
        tokens(MAX_VALUES + 1).SerializeToString(),
        chat(MAX_FIELDS).SerializeToString(),
        b"\xa0\x1f\x01" * (MAX_FIELDS + 1),  # a field that is not known
        b"\xa3\x1f\xa4\x1f" * MAX_FIELDS,  # groups
    ],
    ids=["tokens", "messages", "unknown", "groups"],
)
def test_many_values_are_refused(data):
    with pytest.raises(PayloadTooLargeError):
        check_num_values(data, KIND, MAX_VALUES)


@pytest.mark.parametrize("data", [b"\xff" * 100, b"\x0a\xff\xff\xff\xff\x7f", b"\x0a", b"\x0f", b"\x09\x00"])
def test_the_malformed_is_left_to_the_parser(data):
    check_num_values(data, KIND, MAX_VALUES)


async def test_slots_of_one_client_are_not_those_of_another():
    slots = ReadSlots(3, 2)
    held = asyncio.Event()
    order = []

    async def read(client, name):
        async with slots.held(client):
            order.append(name)
            await held.wait()

    tasks = [asyncio.create_task(read("a", f"a{number}")) for number in range(5)]
    tasks += [asyncio.create_task(read("b", f"b{number}")) for number in range(2)]
    await asyncio.sleep(0)
    assert order == ["a0", "a1", "b0"]
    tasks[2].cancel()  # waits
    tasks[0].cancel()  # holds
    await asyncio.wait(tasks[:1])
    await asyncio.wait(tasks[2:3])
    held.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order[3:] == ["a3", "b1", "a4"]
    assert slots._num_free == 3
    assert not slots._num_held
    assert not slots._waiting


async def test_a_slot_goes_to_a_call_that_still_waits():
    slots = ReadSlots(1, 1)
    async with slots.held("a"):
        waiting = [asyncio.ensure_future(slots.held("b").__aenter__()) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
    await asyncio.wait(waiting, timeout=30)
    assert waiting[0].cancelled()
    assert waiting[1].done()


async def test_a_turn_that_comes_as_its_call_ends_is_passed_on():
    slots = ReadSlots(1, 1)
    async with slots.held("a"):
        waiting = asyncio.ensure_future(slots.held("b").__aenter__())
        await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    async with asyncio.timeout(30), slots.held("c"):
        pass


def test_clients_by_their_address():
    assert client_of_peer("ipv4:10.0.0.7:5123") == "10.0.0.7"
    assert client_of_peer("ipv6:%5B2001:db8::7%5D:5123") == "2001:db8::/64"
    assert client_of_peer("unix:/tmp/socket") == "unix:/tmp/socket"


async def never():
    await asyncio.Event().wait()
    yield b""


@pytest.mark.parametrize("method", [GENERATE, "/baton.v1.Inference/GenerateStream", "/grpc.health.v1.Health/Check"])
async def test_a_message_that_does_not_come(start_cluster, method):
    cluster = await start_cluster(limits=LimitsConfig(body_timeout_s=0.05))
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.stream_unary(method)(never(), timeout=30)
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert caught.value.details() == "the message did not arrive within 0.05 s"


async def start_with_one_slot(start_cluster, body_timeout_s):
    limits = LimitsConfig(max_unfinished_body_bytes=2**20, body_timeout_s=body_timeout_s)
    return await start_cluster(limits=limits, max_body_bytes=2**20)


async def test_a_call_that_gets_no_slot(start_cluster):
    one_slot = await start_with_one_slot(start_cluster, 0.5)
    async with grpc.aio.insecure_channel(one_slot.router.grpc_address) as channel:
        calls = [asyncio.ensure_future(channel.stream_unary(GENERATE)(never(), timeout=30)) for _ in range(4)]
        errors = await asyncio.gather(*calls, return_exceptions=True)
    assert {error.code() for error in errors} == {
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    }


async def test_a_call_gets_the_slot_of_one_that_ends(start_cluster):
    one_slot = await start_with_one_slot(start_cluster, 60.0)
    async with grpc.aio.insecure_channel(one_slot.router.grpc_address) as channel:
        slow = channel.stream_unary(GENERATE)(never(), timeout=30)
        stub = inference_pb2_grpc.InferenceStub(channel)
        models = asyncio.ensure_future(stub.ListModels(inference_pb2.ListModelsRequest(), timeout=30))
        await asyncio.sleep(0)
        slow.cancel()
        assert (await models).models


async def test_what_waits_to_be_tokenised_counts_until_it_is(start_cluster, monkeypatch):
    limits = LimitsConfig(max_unfinished_body_bytes=2**20, max_unfinished_body_bytes_per_client=100_000)
    cluster = await start_cluster(limits=limits, max_body_bytes=100_000)
    decode, may_tokenize, num_waiting = cluster.decode[0], asyncio.Event(), 0

    async def run(_, work):
        nonlocal num_waiting
        num_waiting += 1
        await may_tokenize.wait()
        return work()

    monkeypatch.setattr(cluster.router.service.model("").preprocessor._threads, "run", run)
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)

        def generate(num_bytes):
            options = inference_pb2.GenerateOptions(max_tokens=2, truncate_prompt_tokens=9)
            message = inference_pb2.GenerateRequest(text="a" * num_bytes, options=options)
            return asyncio.ensure_future(stub.Generate(message, timeout=30))

        decode.allowed = 1
        first = generate(60_000)
        while not num_waiting:  # noqa: ASYNC110
            await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await generate(60_000)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        may_tokenize.set()
        await decode.until(lambda: len(decode.submits) == 1)
        second = generate(60_000)  # while the first one runs
        await decode.until(lambda: len(decode.submits) == 2)
        await decode.allow(None)
        await asyncio.gather(first, second)


async def test_a_call_without_a_message(start_cluster):
    async def nothing():
        for each in ():
            yield each

    cluster = await start_cluster()
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.stream_unary(GENERATE)(nothing(), timeout=30)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_without_a_key_nothing_is_read(start_cluster, key_file):
    cluster = await start_cluster(security=key_file.security)
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.stream_unary(GENERATE)(never(), timeout=30)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_many_values_end_the_call(start_cluster):
    cluster = await start_cluster()
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceStub(channel).Generate(tokens(2**19), timeout=30)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert cluster.metric("baton_router_request_errors_total", code="too_large") == 1


async def test_an_invalid_message_on_a_stream(start_cluster):
    cluster = await start_cluster()
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        call = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")(
            iter([b"\xff"]), timeout=30
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_health_and_reflection_still_answer(start_cluster):
    cluster = await start_cluster()
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=30)
        assert (await watch.read()).status
        watch.cancel()
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        answers = [each async for each in reflection.ServerReflectionInfo(iter([asked, asked]), timeout=30)]
        assert len(answers) == 2


async def test_nothing_of_a_refused_request_stays(start_cluster):
    """gRPC would keep the error that ended a call in a cycle with it, and with the error all that it came through."""
    cluster = await start_cluster()
    gc.collect()
    gc.disable()
    try:
        async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await inference_pb2_grpc.InferenceStub(channel).Generate(
                    inference_pb2.GenerateRequest(text="Hi", model="another"), timeout=30
                )
            async with asyncio.timeout(60):
                # No event tells when the last reference goes.
                while any(type(each) is UnknownModelError for each in gc.get_objects()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
    finally:
        gc.enable()

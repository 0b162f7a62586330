"""How much one client may send, and how slowly."""

from __future__ import annotations

import asyncio
import contextlib
import json

import grpc
import pytest

from common.pb import inference_pb2, inference_pb2_grpc
from common.rpc.errors import from_rpc_error
from router.security.config import LimitsConfig

COMPLETIONS = "/v1/completions"


async def answer_to(cluster, *chunks):
    """Status and error of what the router says to raw bytes before it closes the connection; None: nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.router.port)
    try:
        for chunk in chunks:
            writer.write(chunk)
            await writer.drain()
        answer = await asyncio.wait_for(reader.read(), 30)
    finally:
        writer.close()
    if not answer:
        return None
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


@pytest.fixture
async def small(start_cluster):
    limits = LimitsConfig(max_header_bytes=2048, header_timeout_s=30)
    return await start_cluster(limits=limits, max_prompt_tokens=8, max_body_bytes=4096)


@pytest.fixture
async def hurried(start_cluster):
    return await start_cluster(limits=LimitsConfig(header_timeout_s=0.3))


async def test_headers_that_are_too_large(small):
    status, message = await answer_to(small, b"GET /health HTTP/1.1\r\nx: " + b"x" * 3000 + b"\r\n\r\n")
    assert (status, message) == (431, "the headers are larger than the limit of 2048 bytes")
    status, _ = await answer_to(small, b"GET /" + b"x" * 3000 + b" HTTP/1.1\r\n\r\n")
    assert status == 431
    assert (await small.client.get("/health", headers={"x": "x" * 1000})).status_code == 200


async def test_a_large_body_does_not_count_as_headers(small):
    body = {"prompt": [600], "max_tokens": 1, "stop": ["x" * 1000] * 3}
    assert (await small.post(COMPLETIONS, **body)).status_code == 200


async def test_what_is_no_http_is_a_json_error_that_repeats_nothing(small):
    assert await answer_to(small, b"secret nonsense\r\n\r\n") == (400, "Invalid HTTP request received.")


async def test_a_client_that_does_not_say_what_it_wants_is_cut_off(hurried):
    assert await answer_to(hurried) is None
    status, message = await answer_to(hurried, b"GET /health HTTP/1.1\r\nx: ")
    assert (status, message) == (408, "the headers did not arrive within 0.3 s")


async def test_a_request_may_take_longer_than_its_headers(hurried):
    hurried.decode[0].allowed = 1
    loop = asyncio.get_running_loop()
    answer = asyncio.ensure_future(hurried.post(COMPLETIONS, prompt=[600], max_tokens=2))
    await hurried.decode[0].until(lambda: hurried.decode[0].submits)
    overdue = loop.create_future()
    loop.call_later(0.4, overdue.set_result, None)
    await overdue
    await hurried.decode[0].allow(None)
    assert (await answer).status_code == 200


async def test_a_second_request_on_the_connection_has_the_same_limits(hurried):
    reader, writer = await asyncio.open_connection("127.0.0.1", hurried.router.port)
    writer.write(b"GET /version HTTP/1.1\r\n\r\n")
    assert (await reader.readuntil(b"}")).startswith(b"HTTP/1.1 200")
    writer.write(b"GET /version HT")
    rest = await asyncio.wait_for(reader.read(), 30)
    assert rest.startswith(b"HTTP/1.1 408")
    writer.close()


async def test_a_body_that_was_refused_is_not_waited_for(start_cluster, key_file):
    cluster = await start_cluster(security=key_file.security, limits=LimitsConfig(header_timeout_s=0.3))
    reader, writer = await asyncio.open_connection("127.0.0.1", cluster.router.port)
    writer.write(b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1000000000\r\n\r\n")
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 401")
    rest = asyncio.ensure_future(reader.read())
    with contextlib.suppress(ConnectionError):  # bytes under way when the router closes
        while not rest.done():
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0)
        await rest
    writer.close()


async def test_a_prompt_longer_than_is_allowed(small):
    for prompt, status in (([600] * 8, 200), ([600] * 9, 400), ("word " * 500, 400)):
        response = await small.post(COMPLETIONS, prompt=prompt, max_tokens=1)
        assert response.status_code == status
    error = (await small.post(COMPLETIONS, prompt=[600] * 9, max_tokens=1)).json()["error"]
    assert error["param"] == "prompt"
    assert error["message"] == "prompt has 9 tokens, more than the limit of 8"


async def test_a_message_larger_than_a_body_may_be(small):
    async with grpc.aio.insecure_channel(small.router.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(inference_pb2.GenerateRequest(text="x" * 5000), timeout=30)
    assert from_rpc_error(caught.value).code.label == "too_large"
    assert small.decode[0].submits == []


async def test_calls_beyond_those_of_one_connection_wait_at_the_client(start_cluster):
    cluster = await start_cluster(limits=LimitsConfig(max_grpc_streams=1))
    decode = cluster.decode[0]
    decode.allowed = 1
    message = inference_pb2.GenerateRequest(text="Hello", options=inference_pb2.GenerateOptions(max_tokens=2))
    async with (
        grpc.aio.insecure_channel(cluster.router.grpc_address) as one,
        grpc.aio.insecure_channel(cluster.router.grpc_address, options=[("grpc.use_local_subchannel_pool", 1)]) as two,
    ):
        first, second = (
            asyncio.ensure_future(inference_pb2_grpc.InferenceStub(one).Generate(message, timeout=60)) for _ in range(2)
        )
        other = asyncio.ensure_future(inference_pb2_grpc.InferenceStub(two).Generate(message, timeout=60))
        await decode.until(lambda: len(decode.submits) == 2)  # one of each connection
        await decode.allow(None)
        await asyncio.gather(first, second, other)
    assert len(decode.submits) == 3

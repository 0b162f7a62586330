"""Connections of clients that send odd things, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket
import struct

import pytest
import uvicorn
from prometheus_client import CollectorRegistry
from uvicorn.server import ServerState

from router.metrics import SecurityMetrics
from router.security.bodies import BodyBudget
from router.security.config import LimitsConfig
from router.security.http_connection import bounded_connections
from router.security.refusals import Refusals
from router.testing import FakeDecodePod, FakePrefillPod
from tests.fuzz.raw_http import RawAnswer, Wire
from tests.unit.router.security.conftest import ALICE

COMPLETIONS = "/v1/completions"
BODY = json.dumps({"prompt": [600], "max_tokens": 2}).encode()
STREAM = json.dumps({"prompt": [600], "max_tokens": 8, "stream": True}).encode()
CHUNKED = b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n"
TOO_LARGE = "the headers are larger than the limit of 2048 bytes"


def post(body: bytes) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


def error_of(answer: RawAnswer | None) -> tuple[int, str]:
    assert answer is not None
    return answer.status, answer.json["error"]["message"]


@pytest.fixture
async def cluster(start_cluster):
    return await start_cluster([FakePrefillPod()], [FakeDecodePod()], limits=LimitsConfig(max_header_bytes=2048))


@pytest.fixture
async def wire(cluster):
    async with Wire.to(cluster.router.port) as wire:
        yield wire


# --- headers, trailers and chunks ---


async def test_headers_that_never_end(wire):
    await wire.send(b"GET /health HTTP/1.1\r\nx: ")
    assert error_of(await wire.receive_while_sending(b"x" * 1000)) == (431, TOO_LARGE)
    assert await wire.is_closed()


async def test_a_body_may_end_with_trailers(wire):
    await wire.send(CHUNKED, chunk(BODY), b"0\r\nx-checksum: 1\r\nx-other: 2\r\n\r\n")
    assert (await wire.receive()).status == 200
    await wire.send(post(BODY))
    assert (await wire.receive()).status == 200, "the connection can be used again"


async def test_a_key_in_a_trailer_is_none(start_cluster, key_file):
    cluster = await start_cluster(security=key_file.security)
    async with Wire.to(cluster.router.port) as wire:
        await wire.send(CHUNKED + chunk(BODY) + b"0\r\nx-api-key: " + ALICE.encode() + b"\r\n\r\n")
        assert (await wire.receive()).status == 401
    assert cluster.decode[0].submits == []


@pytest.mark.parametrize("line", [b"x: y\r\n" * 100, b"x: " + b"y" * 1000 + b"\r\n", b"y" * 1000])
async def test_trailers_that_never_end(cluster, wire, line):
    await wire.send(CHUNKED + chunk(BODY) + b"0\r\n" + (b"x: " if b":" not in line else b""))
    assert error_of(await wire.receive_while_sending(line)) == (431, TOO_LARGE)
    assert await wire.is_closed()
    await wire.send(line)
    assert (await cluster.client.get("/version")).status_code == 200  # by then the router has read it
    for reason, number in (("header_size", 1), ("malformed", 0)):
        assert cluster.metric("baton_router_http_refused_total", reason=reason) == number


async def test_trailers_that_never_end_of_a_request_without_a_key(start_cluster, key_file):
    cluster = await start_cluster(security=key_file.security, limits=LimitsConfig(max_header_bytes=2048))
    async with Wire.to(cluster.router.port) as wire:
        await wire.send(CHUNKED, b"0\r\n")
        assert (await wire.receive()).status == 401
        await wire.send_until_closed(b"x: y\r\n" * 100)


async def test_extensions_of_chunks_that_never_end(wire):
    await wire.send(CHUNKED, b"5;")
    assert error_of(await wire.receive_while_sending(b"x" * 1000)) == (431, TOO_LARGE)
    assert await wire.is_closed()


async def test_extensions_of_chunks_that_are_larger_than_the_chunks(wire):
    await wire.send(CHUNKED)
    assert error_of(await wire.receive_while_sending(chunk(b" ", b";" + b"x" * 100))) == (431, TOO_LARGE)


async def test_a_body_may_come_in_tiny_chunks(wire):
    body = BODY + b" " * 5000
    await wire.send(CHUNKED, *(chunk(body[at : at + 1]) for at in range(len(body))), b"0\r\n\r\n")
    assert (await wire.receive()).status == 200


async def test_more_headers_than_are_allowed(start_cluster):
    cluster = await start_cluster()
    for number, status in ((255, 200), (256, 431)):
        async with Wire.to(cluster.router.port) as wire:
            await wire.send(b"GET /version HTTP/1.1\r\nhost: x\r\n" + b"a:\r\n" * number + b"\r\n")
            assert (await wire.receive()).status == status


# --- one request at a time ---


@pytest.mark.parametrize("second", [post(STREAM), b"GET /version HTTP/1.1\r\n\r\n", b"GET /ver", b"nonsense"])
@pytest.mark.parametrize("apart", [False, True])
async def test_a_client_that_leaves_is_noticed_whatever_it_has_sent_ahead(cluster, second, apart):
    prefill, decode = cluster.prefill[0], cluster.decode[0]
    prefill.may_answer.clear()
    decode.allowed = 0
    async with Wire.to(cluster.router.port) as wire:
        await wire.send(post(STREAM) + (b"" if apart else second))
        await prefill.until(lambda: prefill.prefills)
        if apart:
            await wire.send(second)
    await prefill.until(lambda: prefill.num_cancelled == 1)
    await decode.until(lambda: decode.aborts)
    assert len(prefill.prefills) == len(decode.submits) == 1
    assert cluster.metric("baton_router_request_errors_total", code="cancelled") == 1


@pytest.mark.parametrize("second", [post(BODY), b"GET /version HTTP/1.1\r\n\r\n", b"nonsense\r\n\r\n", b"x" * 10_000])
@pytest.mark.parametrize("apart", [False, True])
async def test_what_is_sent_ahead_is_not_answered(cluster, wire, second, apart):
    decode = cluster.decode[0]
    decode.allowed = 1
    await wire.send(post(BODY) + (b"" if apart else second))
    await decode.until(lambda: decode.submits)
    if apart:
        await wire.send(second)
        await cluster.post(COMPLETIONS, prompt=[600], max_tokens=1)  # by then the router has read it
    await decode.allow(None)
    answer = await wire.receive()
    assert (answer.status, answer.headers["connection"]) == (200, "close")
    assert await wire.is_closed()
    assert len(decode.submits) == 2 if apart else 1


async def test_a_stream_that_has_begun_is_finished_before_the_connection_is_closed(cluster, wire):
    decode = cluster.decode[0]
    decode.allowed = 1
    await wire.send(post(STREAM))
    await wire.receive_until(b"data: ")
    await wire.send(post(STREAM))
    await cluster.post(COMPLETIONS, prompt=[600], max_tokens=1)  # by then the router has read it
    await decode.allow(None)
    assert (await wire.receive()).body.endswith(b"data: [DONE]\n\n")
    assert await wire.is_closed()


async def test_requests_one_after_the_other_share_a_connection(wire):
    for _ in range(3):
        await wire.send(post(BODY) + b"\r\n")  # some old clients end a body with a line break
        assert (await wire.receive()).status == 200


async def test_a_request_may_begin_in_the_read_in_which_a_refused_body_ends(wire):
    refused = b"POST /v1/completions HTTP/1.1\r\ncontent-type: text/plain\r\ncontent-length: 9000\r\n\r\n"
    await wire.send(refused + bytes(5000))
    assert (await wire.receive()).status == 400
    await wire.send(bytes(4000) + post(BODY)[:-1])
    await wire.send(BODY[-1:])
    assert (await wire.receive()).status == 200


@pytest.mark.parametrize(
    ("first", "rest"),
    [
        (b"GET /version HTTP/1.1\r\n\r\n", b"\r\n"),
        (b"POST /v1/completions HTTP/1.1\r\ncontent-type: text/plain\r\ncontent-length: 9\r\n\r\n1234", b"56789"),
    ],
)
async def test_a_connection_is_not_kept_for_ever_after_what_is_no_request(cluster, first, rest):
    cluster.router._http.config.timeout_keep_alive = 0.2
    async with Wire.to(cluster.router.port) as wire:
        await wire.send(first)
        await wire.receive()
        await wire.send(rest)
        assert await wire.is_closed()


async def test_a_client_that_does_not_read_is_cut_off(start_cluster):
    cluster = await start_cluster(limits=LimitsConfig(send_timeout_s=0.3))
    body = json.dumps({"prompt": [600], "max_tokens": 4000, "n": 6, "logprobs": 20, "stream": True}).encode()
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        client.connect(("127.0.0.1", cluster.router.port))
        client.sendall(post(body))
        while not cluster.metric("baton_router_http_refused_total", reason="send_time"):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await cluster.until_quiet()
    assert cluster.router._http.server_state.connections == set()


# --- HTTP/1.0 ---


async def exchange_1_0(port, request):
    """What is sent until the connection ends, by a client that knows no more: head and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    head, separator, body = answer.partition(b"\r\n\r\n")
    assert separator
    return head.lower().split(b"\r\n"), body


@pytest.mark.parametrize("headers", [b"", b"connection: keep-alive\r\n"])
async def test_a_stream_over_http_1_0_ends_with_the_connection(cluster, headers):
    length = b"content-length: %d\r\n\r\n" % len(STREAM)
    request = b"POST /v1/completions HTTP/1.0\r\n" + headers + length + STREAM
    head, body = await exchange_1_0(cluster.router.port, request)
    assert head[0].endswith(b" 200 ok")
    assert b"connection: close" in head
    assert not [line for line in head if line.startswith((b"transfer-encoding", b"content-length"))]
    events = body.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert all(json.loads(event.removeprefix("data: ")) for event in events[:-2])


async def test_an_answer_over_http_1_0_has_its_length(cluster):
    head, body = await exchange_1_0(cluster.router.port, post(BODY).replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert b"content-length: %d" % len(body) in head
    assert b"connection: close" in head
    assert json.loads(body)["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize("coding", [b"chunked", b"gzip, chunked", b"identity"])
async def test_a_chunked_request_over_http_1_0_is_refused(cluster, coding):
    request = b"POST /v1/completions HTTP/1.0\r\ntransfer-encoding: " + coding + b"\r\n\r\n"
    head, body = await exchange_1_0(cluster.router.port, request + chunk(BODY) + b"0\r\n\r\n")
    assert (head[0], b"connection: close" in head) == (b"http/1.1 400 bad request", True)
    assert "HTTP/1.0" in json.loads(body)["error"]["message"]
    assert cluster.metric("baton_router_http_refused_total", reason="malformed") == 1
    assert cluster.decode[0].submits == []


async def test_a_client_of_http_1_0_is_not_asked_to_go_on(cluster):
    request = post(BODY).replace(b"HTTP/1.1", b"HTTP/1.0\r\nexpect: 100-continue")
    head, _ = await exchange_1_0(cluster.router.port, request)
    assert head[0].endswith(b" 200 ok")


START = {"type": "http.response.start", "status": 200, "headers": []}
PART_A = {"body": b"a", "more_body": True}
NOTHING_YET = {"more_body": True}


@pytest.mark.parametrize(
    ("request_line", "messages", "writes"),
    [
        (b"GET / HTTP/1.1", [{"body": b"ok"}], [b"2\r\nok\r\n0\r\n\r\n"]),
        (b"GET / HTTP/1.1", [PART_A, {"body": b"b"}], [b"1\r\na\r\n", b"1\r\nb\r\n0\r\n\r\n"]),
        (b"GET / HTTP/1.1", [NOTHING_YET, {"body": b"a"}], [b"", b"1\r\na\r\n0\r\n\r\n"]),
        (b"GET / HTTP/1.1", [], [b""]),  # the application has ended early
        (b"HEAD / HTTP/1.1", [{"body": b"ok"}], [b""]),
        (b"GET / HTTP/1.0", [{"body": b"ok"}], [b"ok"]),
        (b"GET / HTTP/1.0", [PART_A, NOTHING_YET, {"body": b"0\r\n\r\n"}], [b"a", b"", b"0\r\n\r\n"]),
        (b"GET / HTTP/1.0", [NOTHING_YET, PART_A, {}], [b"", b"a", b""]),
        (b"GET / HTTP/1.0", [], [b""]),
        (b"HEAD / HTTP/1.0", [{"body": b"ok"}], [b""]),
    ],
)
async def test_the_head_of_a_response_goes_with_the_first_part_of_its_body(request_line, messages, writes):
    ended = asyncio.Event()

    async def answer(scope, receive, send):
        await send(START)
        for message in messages:
            await send({"type": "http.response.body", **message})
        asyncio.get_running_loop().call_soon(ended.set)

    config = uvicorn.Config(answer, ws="none", lifespan="off", log_config=None, server_header=False, date_header=False)
    config.load()
    refusals = Refusals(SecurityMetrics(CollectorRegistry()))
    connection = bounded_connections(LimitsConfig(), BodyBudget(1, 1), refusals)(config, ServerState(), {})
    transport = RecordingTransport()
    connection.connection_made(transport)
    connection.data_received(request_line + b"\r\n\r\n")
    await ended.wait()
    connection.connection_lost(None)
    first, *rest = transport.written
    head, separator, body = first.partition(b"\r\n\r\n")
    assert (head.splitlines()[0], separator) == (b"HTTP/1.1 200 OK", b"\r\n\r\n")
    assert [body, *rest] == writes


async def test_the_end_of_an_answer_that_is_not_read_is_not_waited_for():
    """What is left in the transport's buffer is too little for it to say that the client is slow."""

    async def answer(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

    config = uvicorn.Config(answer, ws="none", lifespan="off", log_config=None)
    config.load()
    refusals = Refusals(SecurityMetrics(CollectorRegistry()))
    protocol = bounded_connections(LimitsConfig(send_timeout_s=0.01), BodyBudget(1, 1), refusals)
    connection = protocol(config, ServerState(), {})
    transport = StuckTransport()
    connection.connection_made(transport)
    connection.data_received(b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n")
    await transport.aborted.wait()
    assert transport.is_closing()


async def test_a_client_that_resets_its_idle_connection_is_not_counted_as_one_that_does_not_read(start_cluster):
    cluster = await start_cluster(limits=LimitsConfig(send_timeout_s=0.01))
    connections = cluster.router._http.server_state.connections
    with socket.create_connection(("127.0.0.1", cluster.router.port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # close() sends a reset
        client.sendall(b"GET /livez HTTP/1.1\r\nhost: x\r\n\r\n")
        reply = await asyncio.to_thread(client.recv, 4096)
        assert reply.startswith(b"HTTP/1.1 200")
        (connection,) = connections
    while connections:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert connection.timeout_keep_alive_task is None


class RecordingTransport(asyncio.Transport):
    """Notes what is written at once."""

    def __init__(self):
        super().__init__()
        self.written = []
        self._is_closing = False

    def write(self, data):
        self.written.append(data)

    def close(self):
        self._is_closing = True

    def is_closing(self):
        return self._is_closing

    def pause_reading(self):
        pass

    def resume_reading(self):
        pass


class StuckTransport(asyncio.Transport):
    """Whatever is written stays in its buffer, so that it never closes by itself."""

    def __init__(self):
        super().__init__()
        self.aborted = asyncio.Event()
        self._is_closing = False

    def write(self, data):
        pass

    def close(self):
        self._is_closing = True

    def is_closing(self):
        return self._is_closing

    def abort(self):
        self.aborted.set()


# --- refusals while something is under way ---


async def test_a_refusal_never_lands_in_an_answer(cluster, wire):
    """The rest of a body that was refused is not what it should be."""
    await wire.send(b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\ncontent-type: text/plain\r\n\r\n")
    assert (await wire.receive()).status == 400
    await wire.send(b"no length\r\n")
    assert await wire.is_closed()


async def test_broken_chunks_end_the_request(cluster, wire):
    await wire.send(CHUNKED, chunk(BODY[:5]), b"no length\r\n")
    assert error_of(await wire.receive()) == (400, "Invalid HTTP request received.")
    assert await wire.is_closed()
    assert cluster.metric("baton_router_request_errors_total", code="internal") == 0


async def test_a_refusal_before_the_application_has_begun_to_read(cluster, wire):
    head = CHUNKED[:-2] + b"expect: 100-continue\r\n\r\n"
    await wire.send(head + chunk(BODY) + b"0\r\nx: " + b"y" * 3000 + b"\r\n\r\n")
    assert error_of(await wire.receive()) == (431, TOO_LARGE)
    assert await wire.is_closed()
    assert cluster.metric("baton_router_request_errors_total", code="internal") == 0

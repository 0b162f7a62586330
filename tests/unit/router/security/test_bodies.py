"""Bodies that do not end: how much of them is held, and for how long."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from common.errors import OverloadedError, UnavailableError
from router.config import RouterConfig
from router.gateway import endpoint
from router.security.bodies import BodyBudget, BodyPace, client_of
from router.security.config import LimitsConfig
from router.serving.config import ServingConfig
from tests.fuzz.raw_http import Wire

KIB = 1024
HELD = "baton_router_http_unfinished_body_bytes"


def beginning(size: int, *, of: int) -> bytes:
    """A request with as much of its body."""
    return b"POST /v1/completions HTTP/1.1\r\ncontent-length: %d\r\n\r\n" % of + b" " * size


async def until(condition):
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0)


@pytest.fixture
async def small(start_cluster):
    """60 KiB for a body, 64 KiB for a client, 128 KiB for all."""
    limits = LimitsConfig(max_unfinished_body_bytes=128 * KIB, max_unfinished_body_bytes_per_client=64 * KIB)
    return await start_cluster(max_body_bytes=60 * KIB, limits=limits)


@pytest.fixture
async def connect(small):
    async with AsyncExitStack() as stack:

        async def connect(client="127.0.0.1"):
            return await stack.enter_async_context(Wire.to(small.router.port, client=client))

        yield connect


async def hold(cluster, wire, size):
    """Sends so much of a body, and waits until it is held."""
    before = cluster.metric(HELD)
    await wire.send(beginning(size, of=60 * KIB))
    await until(lambda: cluster.metric(HELD) == before + size)


async def test_a_client_over_its_share_is_refused_and_others_are_not(small, connect):
    first, second, other = await connect(), await connect(), await connect("127.0.0.2")
    await hold(small, first, 50 * KIB)
    await second.send(beginning(15 * KIB, of=60 * KIB))
    refused = await second.receive()
    assert (refused.status, refused.json["error"]["type"]) == (429, "rate_limit_error")
    assert int(refused.headers["retry-after"]) >= 1
    assert "the limit of 65536 bytes for one address" in refused.json["error"]["message"]
    assert await second.is_closed()
    await hold(small, other, 15 * KIB)
    body = {"prompt": [600], "max_tokens": 1, "stop": ["x" * 1000] * 15}  # as much as was refused, but it ends
    assert (await small.post("/v1/completions", **body)).status_code == 200
    assert small.metric("baton_router_http_refused_total", reason="body_memory") == 1


async def test_beyond_what_all_clients_may_have_the_next_is_refused(small, connect):
    for number in range(2):
        await hold(small, await connect(f"127.0.0.{2 + number}"), 59 * KIB)
    wire = await connect("127.0.0.9")
    await wire.send(beginning(11 * KIB, of=60 * KIB))
    refused = await wire.receive()
    assert (refused.status, refused.json["error"]["type"]) == (503, "server_error")
    assert int(refused.headers["retry-after"]) >= 1
    assert small.metric(HELD) == 118 * KIB
    assert (await small.post("/v1/completions", prompt=[600], max_tokens=1)).status_code == 200


@pytest.mark.parametrize("stream", ["false", "true"])
async def test_what_has_ended_is_held_no_longer(small, connect, stream):
    body = b'{"prompt": [600], "max_tokens": 2, "stream": %b}' % stream.encode()
    body += b" " * (60 * KIB - len(body))
    wire, decode = await connect(), small.decode[0]
    for number in range(1, 4):
        decode.allowed = 1
        await wire.send(beginning(0, of=len(body)) + body[: 50 * KIB])
        await until(lambda: small.metric(HELD) == 50 * KIB)
        await wire.send(body[50 * KIB :])
        await decode.until(lambda: len(decode.submits) == number)  # noqa: B023
        assert small.metric(HELD) == 0, "while the answer is being generated"
        await decode.allow(None)
        assert (await wire.receive()).status == 200
    await small.until_quiet()


@pytest.fixture
def tokenizing(small, monkeypatch):
    """What waits for a thread to be tokenised, until it is released."""

    class Tokenizing:
        num_waiting = 0
        released = asyncio.Event()

    async def run(_, work):
        Tokenizing.num_waiting += 1
        try:
            await Tokenizing.released.wait()
        finally:
            Tokenizing.num_waiting -= 1
        return work()

    monkeypatch.setattr(small.router.service.model("").preprocessor._threads, "run", run)
    return Tokenizing


async def send_in_two_parts(cluster, wire):
    """A whole body, of which 50 KiB are counted."""
    before = cluster.metric(HELD)
    body = b'{"truncate_prompt_tokens": 9, "max_tokens": 1, "prompt": "%b"}' % (b"a" * 52 * KIB)
    await wire.send(beginning(0, of=len(body)) + body[: 50 * KIB])
    await until(lambda: cluster.metric(HELD) == before + 50 * KIB)
    await wire.send(body[50 * KIB :])


async def test_what_waits_to_be_tokenised_is_held(small, connect, tokenizing):
    first, second = await connect(), await connect()
    await send_in_two_parts(small, first)
    await until(lambda: tokenizing.num_waiting)
    assert small.metric(HELD) == 50 * KIB
    await second.send(beginning(15 * KIB, of=60 * KIB))
    assert (await second.receive()).status == 429
    tokenizing.released.set()
    assert (await first.receive()).status == 200
    assert small.metric(HELD) == 0


async def test_what_waits_to_be_tokenised_is_dropped_once_its_client_leaves(small, tokenizing):
    async with Wire.to(small.router.port) as wire:
        await send_in_two_parts(small, wire)
        await until(lambda: tokenizing.num_waiting)
    await until(lambda: not tokenizing.num_waiting)
    await until(lambda: not small.metric(HELD))


async def test_what_waits_for_its_turn_is_held_and_dropped_once_its_client_leaves(start_cluster, monkeypatch):
    cluster = await start_cluster()
    may_go, waiting = asyncio.Event(), []

    async def wait_for_turn(*_):
        waiting.append(asyncio.current_task())
        await may_go.wait()

    monkeypatch.setattr(endpoint, "others_turn_if_large", wait_for_turn)
    async with Wire.to(cluster.router.port) as wire:
        await wire.send(beginning(1, of=2))
        await until(lambda: cluster.metric(HELD) == 1)
        await wire.send(b" ")
        await until(lambda: waiting)
        assert cluster.metric(HELD) == 1
    await until(waiting[0].done)
    assert cluster.metric(HELD) == 0


async def test_what_fails_is_held_no_longer(small, connect):
    async with Wire.to(small.router.port) as leaves:
        await hold(small, leaves, 50 * KIB)
    await until(lambda: small.metric(HELD) == 0)
    too_large = await connect()
    await too_large.send(b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1000000\r\n")
    await too_large.send(b" " * 60 * KIB)
    await until(lambda: small.metric(HELD) == 60 * KIB)
    await too_large.send(b" ")
    assert (await too_large.receive()).status == 413
    assert small.metric(HELD) == 0
    await too_large.send(b" " * 60 * KIB)
    broken = await connect()
    await broken.send(b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n5\r\n12345\r\n")
    await until(lambda: small.metric(HELD) == 5)
    await broken.send(b"no length\r\n")
    assert (await broken.receive()).status == 400
    assert small.metric(HELD) == 0
    assert small.router._http.config.http.bodies._by_client == {}


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"body_timeout_s": 0.05}, "the body did not arrive within 0.05 s"),
        ({"body_grace_s": 0.05, "min_body_rate": 1e6}, "the body came at less than 1e+06 bytes per second"),
    ],
)
async def test_a_body_that_comes_too_slowly_is_not_waited_for(start_cluster, limits, problem):
    cluster = await start_cluster(limits=LimitsConfig(**limits))
    async with Wire.to(cluster.router.port) as wire:
        await wire.send(beginning(9, of=10))
        answer = await wire.receive()
        assert (answer.status, answer.json["error"]["message"]) == (408, problem)
        assert await wire.is_closed()
    assert cluster.metric(HELD) == 0
    assert cluster.metric("baton_router_http_refused_total", reason="body_time") == 1
    assert cluster.decode[0].submits == []


async def test_the_answer_may_take_longer_than_the_body(start_cluster):
    cluster = await start_cluster(limits=LimitsConfig(body_timeout_s=0.5, header_timeout_s=0.5))
    decode = cluster.decode[0]
    decode.allowed = 1
    body = b'{"prompt": [600], "max_tokens": 2}'
    async with Wire.to(cluster.router.port) as wire:
        await wire.send(beginning(0, of=len(body)), body[:5], body[5:])
        await decode.until(lambda: decode.submits)
        overdue = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(0.6, overdue.set_result, None)
        await overdue
        await decode.allow(None)
        assert (await wire.receive()).status == 200


def test_a_pace_is_kept_in_each_window():
    pace = BodyPace(timeout_s=60, min_rate=100, grace_s=10, now=1000)
    assert pace.begin_window(1_000_000, now=1000) == 10
    assert pace.problem(1_001_000) == ""
    assert pace.begin_window(1_001_000, now=1010) == 10
    assert pace.problem(1_001_999) == "the body came at less than 100 bytes per second"


def test_a_body_that_keeps_its_pace_has_to_end_all_the_same():
    pace = BodyPace(timeout_s=25, min_rate=0, grace_s=10, now=0)
    assert [pace.begin_window(0, now) for now in (0, 10, 20)] == [10, 10, 5]
    assert pace.problem(10**9) == "the body did not arrive within 25 s"


def test_a_budget_counts_what_it_takes_and_nothing_of_what_it_refuses():
    budget = BodyBudget(max_bytes=100, max_client_bytes=60)
    budget.take("a", 60)
    with pytest.raises(OverloadedError):
        budget.take("a", 1)
    budget.take("b", 40)
    with pytest.raises(UnavailableError):
        budget.take("c", 1)
    budget.give_back("a", 60)
    budget.take("c", 1)
    budget.give_back("c", 1)
    budget.give_back("b", 40)
    assert (budget.num_bytes, budget._by_client) == (0, {})


def test_who_has_a_network_is_one_client():
    assert client_of("10.0.0.1") != client_of("10.0.0.2")
    assert client_of("2001:db8::1") == client_of("2001:db8::ffff:1")
    assert client_of("2001:db8::1") != client_of("2001:db8:0:1::1")
    assert client_of("::ffff:10.0.0.1") == client_of("10.0.0.1")
    assert client_of("fe80::1%eth0") == client_of("fe80::2")


def test_a_body_must_fit_what_may_be_held():
    decode = ["a:1"]
    assert RouterConfig(decode=decode).max_client_body_bytes == 64 * 2**20
    serving = ServingConfig(max_body_bytes=100 * 2**20)
    assert RouterConfig(decode=decode, serving=serving).max_client_body_bytes == 100 * 2**20
    for limits, setting in (
        (LimitsConfig(max_unfinished_body_bytes=2**20), "--max-unfinished-body-bytes"),
        (LimitsConfig(max_unfinished_body_bytes_per_client=2**20), "--max-unfinished-body-bytes-per-client"),
    ):
        with pytest.raises(ValueError, match=f"^{setting}: must be at least max_body_bytes, 8388608"):
            RouterConfig(decode=decode, limits=limits)

"""Streams that break and are resumed with Last-Event-ID, over HTTP."""

from __future__ import annotations

import json
from typing import NamedTuple

import httpx
import pytest

from router.config import RouterConfig
from router.dispatching.config import SurvivalConfig
from router.runtime import Router
from router.security.config import SecurityConfig
from router.security.keys import digest_of as hash_of_key
from router.testing import FakeDecodePod
from tests.unit.router.dispatching.test_two_legs import PROMPT, TOKENS
from tests.unit.router.router_cluster import until

ANSWER = "Où? Une île, ça va 🦜🌍 STOP and on"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEXT = {"prompt": "Hi", "max_tokens": 64}
BODIES = [
    (COMPLETIONS, TEXT),
    (COMPLETIONS, {**TEXT, "seed": 2**64 - 1, "n": 3, "echo": True}),
    (COMPLETIONS, {**TEXT, "prompt": ["Hi", "Hi"], "stop": ["STOP", "nothing"]}),
    (COMPLETIONS, {**TEXT, "logprobs": 2, "stream_options": {"include_usage": True}}),
    (
        COMPLETIONS,
        {
            **TEXT,
            "logprobs": 1,
            "echo": True,
            "return_token_ids": True,
            "include_stop_str_in_output": True,
            "stop": "STOP",
        },
    ),
    (CHAT, {"messages": [{"role": "user", "content": "Hi"}], "n": 2, "logprobs": True}),
]


class Event(NamedTuple):
    """One server-sent event."""

    id: str
    data: str
    kind: str = "message"

    @property
    def json(self):
        return json.loads(self.data)


class Parser:
    """As the HTML standard says; the last id stays until there is another."""

    def __init__(self):
        self.last_id = ""
        self._data, self._kind = [], "message"

    def line(self, line):
        """The event that ends with this line, if one does."""
        if line:
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "data":
                self._data.append(value)
            elif field == "id":
                self.last_id = value
            elif field == "event":
                self._kind = value
            return None
        event = Event(self.last_id, "\n".join(self._data), self._kind)
        self._data, self._kind = [], "message"
        return event


class Connection:
    """A stream that the client reads as far as it wants."""

    def __init__(self, client, path, body, last_id=None):
        headers = {"x-baton-resumable": "1"} if last_id is None else {"last-event-id": last_id}
        self._context = client.stream("POST", path, json={**body, "stream": True}, headers=headers)
        self._parser = Parser()

    async def __aenter__(self):
        self.response = await self._context.__aenter__()
        self._lines = self.response.aiter_lines()
        return self

    async def __aexit__(self, *exc_info):
        await self._lines.aclose()
        await self._context.__aexit__(*exc_info)

    async def next(self):
        async for line in self._lines:
            if (event := self._parser.line(line)) is not None:
                return event
        return None

    async def rest(self):
        events = []
        while (event := await self.next()) is not None:
            events.append(event)
        return events


async def ask(client, path, body, last_id=None):
    """All events of a stream that is not refused."""
    async with Connection(client, path, body, last_id) as connection:
        assert connection.response.status_code == 200, await connection.response.aread()
        return await connection.rest()


def content(events):
    """What the events say of each choice, however it is cut into events."""
    choices = {}
    for event in events:
        if event.data == "[DONE]":
            continue
        for choice in event.json["choices"]:
            said = choices.setdefault(choice["index"], {"text": "", "logprobs": [], "ends": []})
            delta = choice.get("delta", choice)
            said["text"] += delta.get("content") or delta.get("text") or ""
            logprobs = choice["logprobs"] or {}
            said["logprobs"] += logprobs.get("content") or list(
                zip(
                    *(logprobs[key] for key in ("tokens", "token_logprobs", "text_offset") if key in logprobs),
                    strict=True,
                )
            )
            said["ends"] += [choice["finish_reason"]] if choice["finish_reason"] else []
    return choices


@pytest.fixture
async def spoken(start_cluster, says):
    return await start_cluster([], [FakeDecodePod(says(ANSWER))])


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_the_answer_goes_on_after_any_event(spoken, path, body):
    """Nothing is kept of a stream that the router has ended well: it is computed again."""
    events = await check_every_resumption(spoken.client, path, body)
    assert len(events) > 10
    assert spoken.metric("baton_router_stream_resume_total", source="kept") == 0
    await spoken.until_quiet()


async def test_an_echo_is_not_lost_while_the_first_tokens_have_no_text(start_cluster, says):
    """An event of one choice says how many tokens of the others were delivered, theirs without text included."""
    cluster = await start_cluster([], [FakeDecodePod(says("🦜🌍 and on"))])
    events = await check_every_resumption(cluster.client, COMPLETIONS, {**TEXT, "n": 2, "echo": True})
    assert [choice["text"] for choice in content(events).values()] == ["Hi🦜🌍 and on"] * 2


async def check_every_resumption(client, path, body):
    """All events of a stream; resumed after any of them, it goes on the same."""
    events = await ask(client, path, body)
    usage = [event.json.get("usage") for event in events[:-1]]
    for number, event in enumerate(events[:-1]):
        if not event.id:
            continue
        rest = await ask(client, path, body, event.id)
        assert content(events[: number + 1] + rest) == content(events)
        assert rest[-1].data == "[DONE]"
        if usage[-1] is not None:
            assert rest[-2].json["usage"]["total_tokens"] == usage[-1]["total_tokens"]
        assert {each.json["id"] for each in rest[:-1]} <= {event.json["id"]}
    return events


BODY = {"prompt": PROMPT, "max_tokens": 8}


async def read_to(connection, num_events):
    """The events read, of which the last says that so many tokens were delivered."""
    events = [await connection.next()]
    while len(events) < num_events:
        events.append(await connection.next())
    return events


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": 1}])
async def test_what_is_kept_is_not_computed_again(start_cluster, logprobs):
    cluster = await start_cluster()
    decode, body = cluster.decode[0], {**BODY, **logprobs}
    uninterrupted = content(await ask(cluster.client, COMPLETIONS, body))
    decode.submits.clear()
    decode.allowed = 1
    async with Connection(cluster.client, COMPLETIONS, body) as connection:
        before = await read_to(connection, 1)
        await decode.allow(5)  # the router has them, the client does not look any more
        (generation,) = cluster.router.service._running.values()
        await until(lambda: len(generation._output) == 5)
    await decode.until(lambda: decode.aborts == [decode.submits[0].request.request_id])
    await until(lambda: cluster.metric("baton_router_num_streams_kept") == 1)
    await decode.allow(None)
    after = await ask(cluster.client, COMPLETIONS, body, before[-1].id)
    assert content(before + after) == uninterrupted
    first, second = (submit.request for submit in decode.submits)
    assert list(second.output_token_ids) == TOKENS[: 1 if logprobs else 5]
    assert second.sampling.seed == first.sampling.seed
    assert cluster.metric("baton_router_stream_resume_total", source="kept") == 1
    assert cluster.metric("baton_router_num_streams_kept") == 0
    await cluster.until_quiet()


@pytest.mark.parametrize("stop_at", [None, 5])
async def test_a_stream_that_was_complete_when_it_broke_needs_no_pod(start_cluster, tokenizer, stop_at):
    """Whether the pods said that it was, or a stop string."""
    cluster = await start_cluster()
    decode = cluster.decode[0]
    decode.allowed = 1
    stops = [] if stop_at is None else [tokenizer.decode(TOKENS[stop_at - 1 : stop_at + 1])[1:]]  # across two tokens
    body = {**BODY, "n": 2, "stop": stops}
    async with Connection(cluster.client, COMPLETIONS, body) as connection:
        before = await read_to(connection, 2)
        finishing, waiting = cluster.router.service._running.values()
        decode.live.pop(waiting._legs.decode.request_id)
        waiting._legs.decode.session.abort(waiting._legs.decode.request_id)  # it hears nothing any more
        await decode.allow(None if stop_at is None else stop_at + 1)
        await until(lambda: finishing.is_over)
    await until(lambda: cluster.metric("baton_router_num_streams_kept") == 1)
    await decode.allow(None)
    after = await ask(cluster.client, COMPLETIONS, body, before[-1].id)
    whole = content(before + after)
    assert whole[0] == whole[1]
    assert whole[0]["ends"] == ["length" if stop_at is None else "stop"]
    assert [len(submit.request.output_token_ids) for submit in decode.submits] == [0, 0, 1]
    await cluster.until_quiet()


async def test_a_connection_that_looks_alive_is_replaced(start_cluster):
    cluster = await start_cluster()
    decode = cluster.decode[0]
    decode.allowed = 3
    async with Connection(cluster.client, COMPLETIONS, BODY) as first:
        before = await read_to(first, 1)
        async with Connection(cluster.client, COMPLETIONS, BODY, before[-1].id) as second:
            await decode.until(lambda: len(decode.submits) == 2)
            await decode.allow(None)
            after = await second.rest()
        error = (await first.rest())[-2]
    assert error.json["error"]["code"] == "cancelled"
    assert content(before + after)[0]["ends"] == ["length"]
    assert content(before + after) == content(await ask(cluster.client, COMPLETIONS, BODY))
    await cluster.until_quiet()


async def test_another_router_goes_on_with_the_same_seed(start_cluster):
    cluster = await start_cluster()
    decode = cluster.decode[0]
    uninterrupted = content(await ask(cluster.client, COMPLETIONS, BODY))
    decode.submits.clear()
    decode.allowed = 2
    config = RouterConfig(port=0, grpc_port=0, shutdown_grace_s=0.0, decode=[decode.address])
    async with Router(config).running() as other, httpx.AsyncClient(base_url=other.http_url, timeout=60) as client:
        await until(lambda: other.cluster.can_serve)
        async with Connection(cluster.client, COMPLETIONS, BODY) as connection:
            before = await read_to(connection, 1)
        await decode.allow(None)
        after = await ask(client, COMPLETIONS, BODY, before[-1].id)
    assert content(before + after) == uninterrupted
    assert len({submit.request.sampling.seed for submit in decode.submits}) == 1
    assert [list(submit.request.output_token_ids) for submit in decode.submits] == [[], []]


async def test_an_answer_that_is_another_now_is_refused_before_anything_is_sent(start_cluster):
    cluster = await start_cluster()
    events = await ask(cluster.client, COMPLETIONS, BODY)
    cluster.decode[0].reply = lambda request: [30, *TOKENS[1:]]
    response = await cluster.client.post(
        COMPLETIONS, json={**BODY, "stream": True}, headers={"last-event-id": events[1].id}
    )
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "Last-Event-ID"
    await cluster.until_quiet()


async def test_a_stream_of_one_tenant_is_none_of_anothers(start_cluster, tmp_path):
    """Neither what is kept nor what still runs; their digests differ as well."""
    keys = {name: f"{name}-secret-key-0123456789" for name in ("alice", "bob")}
    file = tmp_path / "keys.yaml"
    file.write_text(
        json.dumps([{"name": name, "hash": f"sha256:{hash_of_key(key).hex()}"} for name, key in keys.items()])
    )
    cluster = await start_cluster(security=SecurityConfig(api_keys_file=str(file)))
    decode, clients = cluster.decode[0], {}
    for name, key in keys.items():
        headers = {"authorization": f"Bearer {key}"}
        clients[name] = httpx.AsyncClient(base_url=cluster.router.http_url, timeout=60, headers=headers)
    decode.allowed = 3
    async with clients["alice"], clients["bob"]:
        async with Connection(clients["alice"], COMPLETIONS, BODY) as connection:
            before = await read_to(connection, 1)
            for_bob = {"json": {**BODY, "stream": True}, "headers": {"last-event-id": before[-1].id}}
            assert (await clients["bob"].post(COMPLETIONS, **for_bob)).status_code == 400
            assert not decode.aborts
        await decode.until(lambda: decode.aborts)
        assert (await clients["bob"].post(COMPLETIONS, **for_bob)).status_code == 400
        await decode.allow(None)
        after = await ask(clients["alice"], COMPLETIONS, BODY, before[-1].id)
        assert content(before + after) == content(await ask(clients["alice"], COMPLETIONS, BODY))
    assert cluster.metric("baton_router_stream_resume_total", source="kept") == 1


@pytest.mark.parametrize(
    ("path", "body", "last_id", "problem"),
    [
        (COMPLETIONS, {"stream": True}, "17", "not an event id of this server"),
        (COMPLETIONS, {"stream": True, "max_tokens": 9}, None, "another request"),
        (COMPLETIONS, {"stream": True, "prompt": "Another"}, None, "another request"),
        (COMPLETIONS, {"stream": True, "n": 2}, None, "another request"),
        (COMPLETIONS, {}, None, "stream must be true"),
    ],
)
async def test_what_cannot_be_resumed_is_refused_by_name(start_cluster, path, body, last_id, problem):
    cluster = await start_cluster()
    (event, *_) = await ask(cluster.client, COMPLETIONS, BODY)
    num_submits = len(cluster.decode[0].submits)
    response = await cluster.client.post(
        path, json={**BODY, **body}, headers={"last-event-id": last_id or event.id}
    )  # fmt: skip
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "Last-Event-ID"
    assert problem in error["message"]
    assert len(cluster.decode[0].submits) == num_submits


async def test_without_a_window_a_stream_is_computed_again(start_cluster):
    cluster = await start_cluster(survival=SurvivalConfig(resume_window_s=0))
    decode = cluster.decode[0]
    decode.allowed = 3
    async with Connection(cluster.client, COMPLETIONS, BODY) as connection:
        before = await read_to(connection, 1)
    await decode.until(lambda: decode.aborts)
    await decode.allow(None)
    after = await ask(cluster.client, COMPLETIONS, BODY, before[-1].id)
    assert content(before + after) == content(await ask(cluster.client, COMPLETIONS, BODY))
    assert [len(submit.request.output_token_ids) for submit in decode.submits] == [0, 0, 0]
    await cluster.until_quiet()

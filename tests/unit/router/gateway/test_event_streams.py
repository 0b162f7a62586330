"""Streams as clients of other servers read them: every event is one `data:` line."""

from __future__ import annotations

import asyncio
import json

import httpx
import httpx_sse
import openai
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from common.errors import UnavailableError
from router.dispatching.text_generation import TextDelta
from router.gateway.openai.chunks import ChatFormat, CompletionFormat
from router.testing import FakeDecodePod
from router.wire.errors import error_json

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}
CALLS = [(TEXT, {"prompt": "Hi"}), (CHAT, HELLO)]
SENTENCE = "Paris is big. 日本 😀 END of it"
LINE_BREAKS = "\n \r \r\n \x0b \x0c \x1c \x1d \x1e \x85 \u2028 \u2029 data: [DONE]\n\n"


@pytest.fixture
async def spoken(start_cluster, says):
    return await start_cluster([], [FakeDecodePod(says(SENTENCE))])


def blocks_of(body: bytes) -> list[bytes]:
    """Events as load generators cut them; each must be one line of data."""
    *blocks, rest = body.split(b"\n\n")
    assert rest == b""
    assert all(block.startswith(b"data: ") and b"\n" not in block for block in blocks)
    assert blocks[-1] == b"data: [DONE]"
    return [block.removeprefix(b"data: ") for block in blocks[:-1]]


def text_of(events) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"]["content"] for choice in choices)


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_an_event_is_one_line_of_data(spoken, path, body):
    response = await spoken.post(path, **body, max_tokens=64, stream=True, stream_options={"include_usage": True})
    events = [json.loads(block) for block in blocks_of(response.content)]
    assert text_of(events) == SENTENCE
    assert [event["usage"] is None for event in events] == [True] * (len(events) - 1) + [False]
    assert spoken.metric("baton_router_num_streams_kept") == 0


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_nothing_is_kept_of_a_stream_without_ids(spoken, path, body):
    pod = spoken.decode[0]
    pod.allowed = 2
    async with spoken.client.stream("POST", path, json={**body, "max_tokens": 64, "stream": True}) as response:
        await anext(response.aiter_lines())
    await pod.until(lambda: pod.aborts)
    assert spoken.metric("baton_router_num_streams_kept") == 0


@pytest.mark.parametrize(
    ("headers", "options", "has_ids"),
    [
        ({}, None, False),
        ({}, {"include_event_ids": False}, False),
        ({}, {"include_event_ids": True}, True),
        ({"x-baton-resumable": "0"}, None, False),
        ({"x-baton-resumable": "1"}, None, True),
    ],
)
async def test_events_have_ids_on_request(spoken, headers, options, has_ids):
    body = {"prompt": "Hi", "max_tokens": 64, "stream": True, "stream_options": options}
    response = await spoken.client.post(TEXT, json=body, headers=headers)
    assert (b"\nid: " in response.content) == has_ids
    assert response.content.startswith(b"id: " if has_ids else b"data: ")


async def test_only_0_and_1_say_whether_a_stream_can_be_resumed(spoken):
    response = await spoken.client.post(TEXT, json={"prompt": "Hi"}, headers={"x-baton-resumable": "yes"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "x-baton-resumable"


@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.parametrize("wants_logprobs", [False, True])
async def test_every_chunk_has_the_counts_of_its_choice(spoken, path, body, wants_logprobs):
    logprobs = {TEXT: 1, CHAT: True}[path] if wants_logprobs else None
    options = {"include_usage": True, "continuous_usage_stats": True}
    response = await spoken.post(
        path, **body, n=2, max_tokens=64, stream=True, stream_options=options, logprobs=logprobs
    )
    *events, last = [json.loads(block) for block in blocks_of(response.content)]
    for index in range(2):
        counts = [event["usage"] for event in events if event["choices"][0]["index"] == index]
        num_tokens = [each["completion_tokens"] for each in counts]
        assert num_tokens == sorted(num_tokens)
        assert num_tokens[0] == (0 if path == CHAT else 1)
        assert num_tokens[-1] * 2 == last["usage"]["completion_tokens"]
        assert {each["prompt_tokens"] for each in counts} == {last["usage"]["prompt_tokens"]}
        assert all(each["total_tokens"] == each["prompt_tokens"] + each["completion_tokens"] for each in counts)
    assert last["choices"] == []


async def test_continuous_usage_needs_include_usage(spoken):
    """As with vLLM."""
    options = {"continuous_usage_stats": True}
    response = await spoken.post(TEXT, prompt="Hi", stream=True, stream_options=options)
    assert not any("usage" in json.loads(block) for block in blocks_of(response.content))


@pytest.mark.parametrize("stream", [None, False])
@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_stream_options_are_for_streams(spoken, path, body, stream):
    for options in (None, {}):
        response = await spoken.post(path, **body, stream=stream, stream_options=options)
        assert response.status_code == 200
    response = await spoken.post(path, **body, stream=stream, stream_options={"include_usage": False})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "stream_options"


@pytest.mark.parametrize(("path", "body"), CALLS)
async def test_an_error_within_a_stream_is_an_event_of_data(spoken, path, body):
    generations = spoken.router.service._running
    spoken.decode[0].allowed = 1
    async with spoken.client.stream("POST", path, json={**body, "max_tokens": 64, "stream": True}) as response:
        lines = response.aiter_lines()
        received = [await anext(lines)]
        (generation,) = generations.values()
        generation.fail(UnavailableError("the pod\u2028is gone"))
        received += [line async for line in lines]
    error, done = [line for line in received if line][-2:]
    assert json.loads(error.removeprefix("data: ")) == {
        "error": {"message": "the pod\u2028is gone", "type": "server_error", "param": None, "code": "unavailable"}
    }
    assert done == "data: [DONE]"


async def test_openai_raises_an_error_within_a_stream(spoken):
    spoken.decode[0].allowed = 1
    url = f"{spoken.router.http_url}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        stream = await client.completions.create(model="baton-demo", prompt="Hi", max_tokens=64, stream=True)
        await anext(stream)
        (generation,) = spoken.router.service._running.values()
        generation.fail(UnavailableError("the pod is gone"))
        with pytest.raises(openai.APIError, match="the pod is gone"):
            await asyncio.wait_for(anext(stream), 30)


# --- any text ---


def encoded(tokenizer, api, texts) -> bytes:
    answer_format = api("id", 1, "model", tokenizer, wants_logprobs=False, has_usage_chunk=True)
    deltas = [TextDelta(text, index, [5], [], [], None) for index, text in enumerate(texts)]
    chunks = [answer_format.opening(0), *(answer_format.chunk(0, delta) for delta in deltas)]
    return b"".join([*chunks, answer_format.end({})])


def by_blocks(body: bytes) -> str:
    return text_of([json.loads(block) for block in blocks_of(body)])


def by_text_lines(body: bytes) -> str:
    """Lines as Python cuts text: at any of Unicode's line breaks."""
    lines = [line for line in body.decode().splitlines() if line]
    assert lines.pop() == "data: [DONE]"
    return text_of([json.loads(line.removeprefix("data: ")) for line in lines])


def by_httpx_sse(body: bytes) -> str:
    response = httpx.Response(200, headers={"content-type": "text/event-stream"}, content=body)
    events = [event.data for event in httpx_sse.EventSource(response).iter_sse()]
    assert events.pop() == "[DONE]"
    return text_of([json.loads(event) for event in events])


def by_httpx_lines(body: bytes) -> str:
    lines = [line for line in httpx.Response(200, content=body).iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    return text_of([json.loads(line.removeprefix("data: ")) for line in lines])


@pytest.mark.parametrize("api", [CompletionFormat, ChatFormat])
@pytest.mark.parametrize("read", [by_blocks, by_text_lines, by_httpx_sse, by_httpx_lines])
def test_any_text_comes_through_any_parser(tokenizer, api, read):
    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=4))
    @example([LINE_BREAKS, LINE_BREAKS])
    def holds(texts: list[str]) -> None:
        assert read(encoded(tokenizer, api, texts)) == "".join(texts)

    holds()


async def test_openai_reads_any_text(start_cluster, says):
    cluster = await start_cluster([], [FakeDecodePod(says(LINE_BREAKS + SENTENCE))])
    async with openai.AsyncOpenAI(base_url=f"{cluster.router.http_url}/v1", api_key="none") as client:
        stream = await client.completions.create(model="baton-demo", prompt="Hi", max_tokens=256, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == LINE_BREAKS + SENTENCE


def test_an_error_is_one_line():
    assert len(error_json(UnavailableError(LINE_BREAKS)).decode().splitlines()) == 1

"""/v1/messages as Anthropic's client uses it."""

from __future__ import annotations

import json

import anthropic
import pytest

from common.errors import UnavailableError
from router.testing import FakeDecodePod
from tests.unit.router.gateway.test_tools_http import ANSWER, HERMES, THINKS, start

MESSAGES = "/v1/messages"
__all__ = ["start"]
TOOL = {"name": "weather", "description": "Tells it.", "input_schema": {"type": "object"}}
ASKS = [{"role": "user", "content": "Weather?"}]
BODY = {"model": "baton-demo", "max_tokens": 300, "messages": ASKS, "tools": [TOOL]}


def anthropic_client(cluster, **options):
    return anthropic.AsyncAnthropic(base_url=cluster.router.http_url, api_key="none", max_retries=0, **options)


async def test_an_answer_whole_and_streamed_agree(start):
    cluster = await start(THINKS, ANSWER)
    async with anthropic_client(cluster) as client:
        whole = await client.messages.create(**BODY)
        async with client.messages.stream(**BODY) as stream:
            events = [event.type async for event in stream]
            streamed = await stream.get_final_message()
    for message in (whole, streamed):
        thinking, text, *calls = message.content
        assert (thinking.type, thinking.thinking) == ("thinking", "Hm.")
        assert (text.type, text.text) == ("text", "I look.")
        assert [(call.type, call.name, call.input) for call in calls] == [("tool_use", "weather", {"city": "Oslo"})] * 2
        assert (message.stop_reason, message.stop_sequence, message.model) == ("tool_use", None, "baton-demo")
        assert calls[0].id != calls[1].id
    assert (whole.usage.input_tokens, whole.usage.output_tokens) == (
        streamed.usage.input_tokens, streamed.usage.output_tokens,
    )  # fmt: skip
    assert [event for event in events if event.startswith(("message", "content_block_st"))] == [
        "message_start", *["content_block_start", "content_block_stop"] * 4, "message_delta", "message_stop",
    ]  # fmt: skip
    await cluster.until_quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_how_an_answer_ends(start, stream):
    cluster = await start(HERMES, "One two three")
    expected = {
        ("max_tokens", 1): ("max_tokens", None),
        ("stop_sequences", ("three", "two")): ("stop_sequence", "two"),
        ("stop_sequences", ()): ("end_turn", None),
    }
    async with anthropic_client(cluster) as client:
        for (name, value), ending in expected.items():
            body = {"model": "baton-demo", "max_tokens": 50, "messages": ASKS, name: value}
            if stream:
                async with client.messages.stream(**body) as events:
                    message = await events.get_final_message()
            else:
                message = await client.messages.create(**body)
            assert (message.stop_reason, message.stop_sequence) == ending


HISTORY = [
    {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Oslo"}},
        ],
    },
    {
        "role": "user",
        "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "rain"}]},
            {"type": "text", "text": "So?"},
        ],
    },
]


async def test_the_template_gets_the_chat(start, tokenizer):
    template = "{{ tools | tojson }}|{{ enable_thinking }}{# <tool_call> #}"
    cluster = await start(template + "{% for message in messages %}{{ '\n' }}{{ message | tojson }}{% endfor %}", "Hi")
    body = {**BODY, "messages": HISTORY, "system": [{"type": "text", "text": "Be brief."}], "max_tokens": 2}
    async with anthropic_client(cluster) as client:
        await client.messages.create(**body, thinking={"type": "disabled"}, tool_choice={"type": "auto"})
        count = await client.messages.count_tokens(
            **{name: value for name, value in body.items() if name != "max_tokens"}, thinking={"type": "disabled"}
        )
    ids = cluster.decode[0].submits[-1].request.prompt_token_ids
    assert count.input_tokens == len(ids)
    head, *lines = tokenizer.decode(ids, skip_special_tokens=False).splitlines()
    function = {"name": "weather", "description": "Tells it.", "parameters": {"type": "object"}}
    assert head == json.dumps([{"type": "function", "function": function}]) + "|False"
    call = {"id": "t1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    assert [json.loads(line) for line in lines] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "reasoning_content": "Hm.",
         "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "t1"},
        {"role": "user", "content": "So?"},
    ]  # fmt: skip


BAD = [
    ({"max_tokens": None}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [*ASKS, {"role": "assistant", "content": "I"}]}, "messages"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": [{"type": "tool_use", "input": {}}]}, *ASKS]}, "messages[0].content"),
    ({"tools": [{"name": "x", "type": "web_search_20250305"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "tool", "name": "other"}}, "tool_choice"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"stop_sequence": ["a"]}, "stop_sequence"),
    ({"temperature": 3}, "temperature"),
]


@pytest.mark.parametrize("settings", [{}, {"reasoning_parser": "none"}], ids=["no reasoning", "no parser"])
async def test_a_model_without_reasoning_keeps_any_budget(start, settings):
    cluster = await start(THINKS if settings else HERMES, "Hi", **settings)
    async with anthropic_client(cluster) as client:
        thinking = {"type": "enabled", "budget_tokens": 20}
        message = await client.messages.create(max_tokens=50, messages=ASKS, model="baton-demo", thinking=thinking)
    assert message.content[0].text == "Hi"
    assert cluster.decode[0].submits[-1].request.sampling.thinking_token_budget == 0
    chat = await cluster.post("/v1/chat/completions", messages=ASKS, thinking_token_budget=20)
    assert (chat.status_code, chat.json()["error"]["param"]) == (400, "thinking_token_budget")


async def test_errors_have_anthropics_form(start):
    cluster = await start(HERMES, "Hi")
    for method, path, status, kind, code in (
        ("GET", MESSAGES, 405, "invalid_request_error", "method_not_allowed"),
        ("DELETE", f"{MESSAGES}/count_tokens", 405, "invalid_request_error", "method_not_allowed"),
        ("POST", f"{MESSAGES}/batches", 404, "not_found_error", "not_found"),
    ):
        response = await cluster.client.request(method, path)
        body = response.json()
        assert (response.status_code, body["type"]) == (status, "error"), response.text
        assert (body["error"]["type"], body["error"]["code"]) == (kind, code)
    for fields, param in BAD:
        response = await cluster.post(MESSAGES, **{**BODY, **fields})
        body = response.json()
        assert (response.status_code, body["type"], body["error"]["param"]) == (400, "error", param), response.text
        assert body["error"]["type"] == "invalid_request_error"
    resumable = await cluster.client.post(MESSAGES, json=BODY, headers={"x-baton-resumable": "1"})
    assert (resumable.status_code, resumable.json()["error"]["param"]) == (400, "x-baton-resumable")
    async with anthropic_client(cluster) as client:
        with pytest.raises(anthropic.NotFoundError) as caught:
            await client.messages.create(**{**BODY, "model": "other"})
    assert caught.value.body["error"]["type"] == "not_found_error"


async def test_an_error_within_a_stream_is_an_event(start_cluster, says):
    pod = FakeDecodePod(says("One two three four five six"))
    cluster = await start_cluster([], [pod])
    pod.allowed = 2
    body = {"max_tokens": 50, "messages": ASKS, "stream": True}
    async with cluster.client.stream("POST", MESSAGES, json=body) as response:
        lines = response.aiter_lines()
        assert await anext(lines) == "event: message_start"
        next(iter(cluster.router.service._running.values())).fail(UnavailableError("gone"))
        rest = [line async for line in lines]
    assert rest[-3] == "event: error"
    error = json.loads(rest[-2].removeprefix("data: "))
    assert (error["type"], error["error"]["type"], error["error"]["message"]) == ("error", "overloaded_error", "gone")

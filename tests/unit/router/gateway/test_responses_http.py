"""/v1/responses as OpenAI's client uses it."""

from __future__ import annotations

import json

import pytest

from tests.unit.router.gateway.test_tools_http import ANSWER, HERMES, THINKS, openai_client, start

RESPONSES = "/v1/responses"
__all__ = ["start"]
TOOL = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": {"type": "object"}}
BODY = {"model": "baton-demo", "input": "Weather?", "tools": [TOOL]}


def checked(response):
    """What a response says, without what differs from request to request."""
    reasoning, message, *calls = response.output
    assert [part.text for part in reasoning.content] == ["Hm."]
    assert response.output_text == "I look."
    assert (message.role, message.status) == ("assistant", "completed")
    assert [(call.name, json.loads(call.arguments)) for call in calls] == [("weather", {"city": "Oslo"})] * 2
    assert calls[0].call_id != calls[1].call_id
    assert (response.status, response.store, response.tools[0].name) == ("completed", False, "weather")
    return response.usage


async def test_a_response_whole_and_streamed_agree(start):
    cluster = await start(THINKS, ANSWER)
    async with openai_client(cluster) as client:
        whole = await client.responses.create(**BODY, store=True)
        async with client.responses.stream(**BODY) as stream:
            events = [event async for event in stream]
            streamed = await stream.get_final_response()
    assert checked(whole) == checked(streamed)
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens < whole.usage.output_tokens
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events if not event.type.endswith("delta")]
    text = ["response.output_item.added", "response.content_part.added", "response.{}.done",
            "response.content_part.done", "response.output_item.done"]  # fmt: skip
    call = ["response.output_item.added", "response.function_call_arguments.done", "response.output_item.done"]
    assert kinds == [
        "response.created", "response.in_progress", *[kind.format("reasoning_text") for kind in text],
        *[kind.format("output_text") for kind in text], *call, *call, "response.completed",
    ]  # fmt: skip
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "I look."
    await cluster.until_quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_is_cut_off_is_incomplete(start, stream):
    cluster = await start(HERMES, "One two three")
    body = {"model": "baton-demo", "input": "Hi", "max_output_tokens": 1}
    async with openai_client(cluster) as client:
        if stream:
            response = [event async for event in await client.responses.create(**body, stream=True)][-1].response
        else:
            response = await client.responses.create(**body)
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert [item.status for item in response.output] == ["incomplete"]


async def test_the_template_gets_the_chat(start, tokenizer):
    template = "{{ tools | tojson }}|{{ reasoning_effort }}{# <tool_call> #}"
    cluster = await start(template + "{% for message in messages %}{{ '\n' }}{{ message | tojson }}{% endfor %}", "Hi")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ]
    async with openai_client(cluster) as client:
        await client.responses.create(
            **{**BODY, "input": items}, instructions="Be brief.", reasoning={"effort": "low"}, max_output_tokens=2
        )
    ids = cluster.decode[0].submits[-1].request.prompt_token_ids
    head, *lines = tokenizer.decode(ids, skip_special_tokens=False).splitlines()
    function = {"name": "weather", "description": "Tells it.", "parameters": {"type": "object"}}
    assert head == json.dumps([{"type": "function", "function": function}]) + "|low"
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    assert [json.loads(line) for line in lines] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "I look.", "reasoning": "Hm.", "reasoning_content": "Hm.",
         "tool_calls": [call]},
        {"role": "tool", "content": "rain", "tool_call_id": "c1"},
    ]  # fmt: skip


BAD = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"background": True}, "background"),
    ({"input": None}, "input"),
    ({"input": []}, "input"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": "function_call", "call_id": "x"}]}, "input[0].name"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tool_choice": {"type": "function", "name": "other"}}, "tool_choice"),
    ({"tool_choice": "sometimes"}, "tool_choice"),
    ({"tool_choice": {"type": "function", "function": {"name": "weather"}}}, "tool_choice"),
    ({"text": {"format": {"type": "xml"}}}, "text.format.type"),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"inputs": "x"}, "inputs"),
]


async def test_what_cannot_be_done_is_refused_by_name(start):
    cluster = await start(HERMES, "Hi")
    for fields, param in BAD:
        response = await cluster.post(RESPONSES, **{**BODY, **fields})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text

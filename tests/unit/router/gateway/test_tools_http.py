"""Tools and reasoning over HTTP: what clients send, what the template gets, what clients see."""

from __future__ import annotations

import json
import shutil

import openai
import pytest

from common.demo_model import demo_model_path
from common.tokenization import Tokenizer
from router.testing import FakeDecodePod, FakePrefillPod
from tests.unit.router.gateway.test_completions_http import events_of

CHAT = "/v1/chat/completions"
ASKS = [{"role": "user", "content": "Weather?"}]
SHOWS = "{{ tools | tojson }}{% for message in messages %}{{ message.content }}{% endfor %}"
HERMES, THINKS = SHOWS + "{# <tool_call> #}", SHOWS + "{# <tool_call> </think> #}"
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather", "description": "Tells it.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}  # fmt: skip
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
ANSWER = f"<think>\nHm.\n</think>\n\nI look.\n{CALL}\n{CALL}"


@pytest.fixture
def start(start_cluster, tmp_path, says):
    """Starts a cluster whose model has this chat template and always gives this answer."""

    async def with_template(template, answer, **settings):
        directory = tmp_path / "model"
        shutil.copytree(demo_model_path(), directory)
        (directory / "chat_template.jinja").write_text(template)
        reply = says(answer)
        pods = [FakePrefillPod(reply)], [FakeDecodePod(reply)]
        return await start_cluster(*pods, model=str(directory), served_model_name=["baton-demo"], **settings)

    return with_template


def openai_client(cluster):
    return openai.AsyncOpenAI(base_url=f"{cluster.router.http_url}/v1", api_key="none", max_retries=0)


async def test_calls_and_reasoning_whole_and_streamed_agree(start):
    cluster = await start(THINKS, ANSWER)
    request = {"model": "baton-demo", "messages": ASKS, "tools": [WEATHER], "seed": 7}
    async with openai_client(cluster) as client:
        whole = await client.chat.completions.create(**request)
        stream = client.chat.completions.stream(**request, stream_options={"include_usage": True})
        async with stream as events:
            streamed = await events.get_final_completion()
        several = await client.chat.completions.create(**request, n=2)
    for choice in (*whole.choices, *streamed.choices):
        message = choice.message
        assert (message.content, choice.finish_reason) == ("I look.", "tool_calls")
        assert message.reasoning == message.reasoning_content == "Hm."
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
        assert calls == [("weather", {"city": "Oslo"})] * 2
    ids = [call.id for choice in several.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 4
    assert all(call_id.startswith("call_") for call_id in ids)
    assert whole.usage == streamed.usage
    assert 0 < whole.usage.completion_tokens_details.reasoning_tokens < whole.usage.completion_tokens
    await cluster.until_quiet()


CODER = SHOWS + "{# <tool_call> <function=x> <parameter=y> </think> #}"
CODED = "<tool_call>\n<function=weather>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
HARMONY = SHOWS + "<|start|>assistant{# <|channel|>analysis<|message|> #}"
IN_MESSAGES = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    '<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}'
)


@pytest.mark.parametrize(
    ("template", "answer"), [(CODER, f"<think>\nHm.\n</think>\n\nI look.\n{CODED}"), (HARMONY, IN_MESSAGES)]
)
async def test_families_with_formats_of_their_own(start, template, answer):
    cluster = await start(template, answer)
    request = {"model": "baton-demo", "messages": ASKS, "tools": [WEATHER], "seed": 7}
    async with openai_client(cluster) as client:
        whole = await client.chat.completions.create(**request)
        async with client.chat.completions.stream(**request, stream_options={"include_usage": True}) as events:
            streamed = await events.get_final_completion()
    for choice in (*whole.choices, *streamed.choices):
        [call] = choice.message.tool_calls
        assert (choice.message.reasoning, choice.message.content) == ("Hm.", "I look.")
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Oslo"})
        assert choice.finish_reason == "tool_calls"
    assert whole.usage == streamed.usage
    assert 0 < whole.usage.completion_tokens_details.reasoning_tokens < whole.usage.completion_tokens


async def test_a_text_without_calls_is_the_same_with_tools(start):
    text = ' I look.\n\n<tool_call>{"name": "weather"'
    cluster = await start(HERMES, text)
    whole = (await cluster.post(CHAT, messages=ASKS, tools=[WEATHER])).json()["choices"][0]
    assert (whole["message"], whole["finish_reason"]) == (
        {"role": "assistant", "content": text, "refusal": None}, "stop",
    )  # fmt: skip
    events = events_of(await cluster.post(CHAT, messages=ASKS, tools=[WEATHER], stream=True))
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == text


async def test_what_the_template_gets(start):
    cluster = await start(HERMES, "Hi")
    tokenizer = Tokenizer.from_directory(demo_model_path())

    async def prompt(**fields):
        response = await cluster.post(CHAT, messages=ASKS, max_tokens=2, **fields)
        assert response.status_code == 200, response.text
        ids = cluster.decode[0].submits[-1].request.prompt_token_ids
        return tokenizer.decode(ids, skip_special_tokens=False).removesuffix("Weather?")

    assert json.loads(await prompt(tools=[WEATHER])) == [WEATHER]
    assert await prompt(tools=[WEATHER], tool_choice="none") == "null"
    assert await prompt(tools=[]) == "null"
    count = (await cluster.post("/tokenize", messages=ASKS, tools=[WEATHER])).json()["count"]
    await prompt(tools=[WEATHER], tool_choice="auto")
    assert count == len(cluster.decode[0].submits[-1].request.prompt_token_ids)


async def test_the_openai_client_sees_that_the_last_call_is_complete(start, tokenizer):
    cluster = await start(HERMES, CALL)
    limit = len(tokenizer.encode(CALL))  # the answer ends with the last token of the call
    request = {"messages": ASKS, "tools": [WEATHER], "max_tokens": limit}
    async with (
        openai_client(cluster) as client,
        client.chat.completions.stream(model="baton-demo", **request) as stream,
    ):
        done = [event async for event in stream if event.type == "tool_calls.function.arguments.done"]
    assert [json.loads(event.arguments) for event in done] == [{"city": "Oslo"}]
    events = events_of(await cluster.post(CHAT, **request, stream=True, logprobs=True, return_token_ids=True))
    choices = [event["choices"][0] for event in events]
    assert sum(len(choice.get("token_ids", ())) for choice in choices) == limit
    assert sum(len((choice["logprobs"] or {}).get("content") or ()) for choice in choices) == limit


async def test_fields_that_change_what_is_parsed(start):
    cluster = await start(THINKS, ANSWER)

    async def message(**fields):
        response = await cluster.post(CHAT, messages=ASKS, tools=[WEATHER], **fields)
        choice = response.json()["choices"][0]
        return choice["message"], choice["finish_reason"]

    answer, reason = await message(parallel_tool_calls=False)
    assert (len(answer["tool_calls"]), answer["content"], reason) == (1, "I look.", "tool_calls")
    answer, reason = await message(tool_choice="none")
    assert (answer["content"], reason, "tool_calls" in answer) == (f"I look.\n{CALL}\n{CALL}", "stop", False)
    answer, _ = await message(include_reasoning=False)
    assert ("reasoning" in answer, answer["content"]) == (False, "I look.")
    answer, _ = await message(separate_reasoning=False)
    assert (answer["content"], len(answer["tool_calls"])) == ("<think>\nHm.\n</think>\n\nI look.", 2)


async def test_a_resumed_stream_has_the_same_calls(start):
    cluster = await start(THINKS, ANSWER)
    body = {"messages": ASKS, "tools": [WEATHER], "seed": 7, "stream": True, "request_id": "one"}
    headers = {"x-baton-resumable": "1"}
    whole = (await cluster.client.post(CHAT, json=body, headers=headers)).text
    blocks = whole.split("\n\n")
    expected = [json.loads(block.partition("data: ")[2]) for block in blocks[:-2]]
    for number in range(1, len(blocks) - 3, 13):
        last_id = blocks[number].partition("\n")[0].removeprefix("id: ")
        rest = await cluster.client.post(CHAT, json=body, headers={"last-event-id": last_id})
        for event, other in zip(events_of(rest), expected[number + 1 :], strict=True):
            assert event["choices"] == other["choices"]


async def test_special_tokens_that_mark_calls_are_seen(start, tokenizer):
    cluster = await start(SHOWS + "{# [TOOL_CALLS] #}", "", tool_parser="mistral")
    special = {cluster.router.service.model(None).tokenizer._backend.token_to_id("<|im_start|>"): "[TOOL_CALLS]"}
    cluster.router.service.model(None).tokenizer._added.update(special)
    cluster.router.service.model(None).tokenizer.decode = lambda ids, **_: "".join(
        special.get(each) or tokenizer.decode([each]) for each in ids
    )
    ids = [*special, *tokenizer.encode('weather{"city": "Oslo"}'), tokenizer._backend.token_to_id("<|im_end|>")]
    for pod in (*cluster.prefill, *cluster.decode):
        pod.reply = lambda request: ids
    choice = (await cluster.post(CHAT, messages=ASKS, tools=[WEATHER])).json()["choices"][0]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"], len(call["id"])) == ({"name": "weather", "arguments": '{"city": "Oslo"}'}, 9)
    choice = (await cluster.post(CHAT, messages=ASKS)).json()["choices"][0]
    assert choice["message"]["content"] == 'weather{"city": "Oslo"}'


def deep(depth):
    parameters = json.loads('{"a":' * depth + "1" + "}" * depth)
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}


BAD = [
    ({"tools": 7}, "tools"),
    ({"tools": [{}]}, "tools[0]"),
    ({"tools": [WEATHER, {"type": "web_search"}]}, "tools[1].type"),
    ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f" * 257}}]}, "tools[0].function.name"),
    ({"tools": [WEATHER, WEATHER]}, "tools[1].function.name"),
    ({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}, "tools[0].function.parameters"),
    ({"tools": [WEATHER] * 513}, "tools"),
    ({"tools": [{"type": "function", "function": {"name": "f", "description": "x" * 2**19}}]}, "tools"),
    ({"tools": [deep(65)]}, "tools[0].function.parameters"),
    ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ({"tools": [WEATHER], "tool_choice": {"type": "allowed_tools"}}, "tool_choice"),
    ({"tool_choice": "required"}, "tool_choice"),
]


async def test_bad_tools_are_refused_by_name(start):
    cluster = await start(HERMES, "Hi")
    for fields, param in BAD:
        response = await cluster.post(CHAT, messages=ASKS, **fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert (await cluster.post(CHAT, messages=ASKS, tools=[deep(64)])).status_code == 200


async def test_a_million_tools_are_refused(start):
    cluster = await start(HERMES, "Hi", max_body_values=10**8)
    body = b'{"messages":[{"role":"user","content":"a"}],"tools":[' + b"{}," * 10**6 + b"{}]}"
    response = await cluster.client.post(CHAT, content=body, headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


async def test_tools_without_a_parser_are_refused(start):
    cluster = await start(HERMES, "Hi", tool_parser="none")
    response = await cluster.post(CHAT, messages=ASKS, tools=[WEATHER])
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
    assert (await cluster.post(CHAT, messages=ASKS, tools=[WEATHER], tool_choice="none")).status_code == 200

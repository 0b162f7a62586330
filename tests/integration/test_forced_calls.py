"""Calls that a client forces: a grammar lets the model write nothing else, on every pod, and the router finds them."""

from __future__ import annotations

import json

import anthropic
import httpx
import jsonschema_rs
import openai

from tests.integration.cluster import DEADLINE_S, running_cluster

TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
CITY = {"type": "string", "enum": ["Oslo", "Rome"]}
WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["city", "days"],
    "$defs": {"City": CITY},
}
ADD = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "City": {"$ref": "#/definitions/City"}},
    "required": ["a", "City"],
    "definitions": {"City": {"enum": [1, 2]}},
}
SCHEMAS = {"weather": WEATHER, "add": ADD, "now": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": schema}} for name, schema in SCHEMAS.items()] + [
    {"type": "function", "function": {"name": "plain"}}
]
ASKS = [{"role": "user", "content": "Weather in Oslo?"}]


def check(calls) -> None:
    """Each call is of a tool, with arguments that its schema allows."""
    assert calls
    for name, arguments in calls:
        assert jsonschema_rs.is_valid(SCHEMAS.get(name, {"type": "object"}), json.loads(arguments)), (name, arguments)


def named(name: str) -> dict:
    return {"type": "function", "function": {"name": name}}


async def test_forced_calls(tmp_path):
    async with (
        running_cluster(tmp_path, "llama", chat_template=TEMPLATE) as cluster,
        openai.AsyncOpenAI(base_url=f"{cluster.router.http_url}/v1", api_key="none", max_retries=0) as client,
    ):
        seen = set()
        cases = [("required", True), ("required", False), *((named(name), None) for name in SCHEMAS)]
        for seed, (choice, single) in enumerate(cases):
            body = {"model": "model", "messages": ASKS, "tools": TOOLS, "max_tokens": 160, "seed": seed}
            body["tool_choice"] = choice
            if single is not None:
                body["parallel_tool_calls"] = not single
            whole = (await client.chat.completions.create(**body)).choices[0]
            chunks = [chunk.choices[0] async for chunk in await client.chat.completions.create(**body, stream=True)]
            called = [(call.function.name, call.function.arguments) for call in whole.message.tool_calls]
            check(called)
            again = [call.function for chunk in chunks for call in chunk.delta.tool_calls or []]
            assert [(function.name, function.arguments) for function in again] == called
            assert chunks[-1].finish_reason == whole.finish_reason
            if single is not False:
                assert (len(called), whole.finish_reason, whole.message.content) == (1, "tool_calls", None)
            if not isinstance(choice, str):
                assert called[0][0] == choice["function"]["name"]
            seen |= {name for name, _ in called}
        assert seen >= set(SCHEMAS)


async def test_forced_calls_of_other_apis_and_what_is_refused(tmp_path):
    tool = {"name": "weather", "input_schema": WEATHER}
    async with (
        running_cluster(tmp_path, "llama", chat_template=TEMPLATE, num_prefill=0) as cluster,
        httpx.AsyncClient(base_url=cluster.router.http_url, timeout=DEADLINE_S) as http,
        openai.AsyncOpenAI(base_url=f"{cluster.router.http_url}/v1", api_key="none", max_retries=0) as client,
        anthropic.AsyncAnthropic(base_url=cluster.router.http_url, api_key="none", max_retries=0) as other,
    ):
        choice = {"type": "any", "disable_parallel_tool_use": True}
        message = await other.messages.create(
            model="model", max_tokens=160, messages=ASKS, tools=[tool], tool_choice=choice
        )
        (block,) = message.content
        assert (block.type, message.stop_reason) == ("tool_use", "tool_use")
        assert jsonschema_rs.is_valid(WEATHER, block.input)
        functions = [{"type": "function", "name": "weather", "parameters": WEATHER, "strict": True}]
        response = await client.responses.create(
            model="model", input="Hi", tools=functions, tool_choice={"type": "function", "name": "weather"}
        )
        (item,) = response.output
        check([(item.name, item.arguments)])
        response = await client.responses.create(
            model="model",
            input="Hi",
            max_output_tokens=160,
            text={"format": {"type": "json_schema", "name": "city", "schema": {"enum": ["Oslo", "Rome"]}}},
        )
        assert json.loads(response.output_text) in ("Oslo", "Rome")
        body = {"messages": ASKS, "tools": TOOLS, "tool_choice": "required"}
        long = {"type": "function", "function": {"name": "x", "parameters": {"title": "t" * 2**18}}}
        unknown = {
            "type": "function",
            "function": {"name": "x", "parameters": {"properties": {"a": {"type": "strin"}}}},
        }
        for fields, param in [
            ({"response_format": {"type": "json_object"}}, "tool_choice"),
            ({"tools": [long]}, "tools"),
            ({"tools": [unknown]}, "tools"),
        ]:
            answer = await http.post("/v1/chat/completions", json={**body, "max_tokens": 8, **fields})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text

"""Constrained answers through router, prefill pod, connector and decode pod: those of one pod alone, and valid."""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import nullcontext

import httpx
import jsonschema_rs
import pytest

from common.pb import common_pb2
from tests.integration.cluster import DEADLINE_S, Stream, running_cluster
from tests.redis_server import running_redis
from tests.tiny_models import prompt_of

PROMPT = "".join(chr(0x61 + token % 26) for token in prompt_of(37))  # several chunks
BOX = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2, "maxItems": 4},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "box": BOX,
    },
    "required": ["name", "tags", "size", "box"],
    "additionalProperties": False,  # or random weights write some without end
}
PATTERN = r"[a-f]{3,40}-\d{2}"
CHOICES = ["Paris", "Rome", 'Pa"ul\n']
LONG = r"([a-z]{5} ){40}"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
CONSTRAINTS = {
    "response_format": {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    "json": {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    "regex": {"structured_outputs": {"regex": PATTERN}},
    "choice": {"structured_outputs": {"choice": CHOICES}},
    "grammar": {"structured_outputs": {"grammar": 'root ::= "a" root "b" | "x"'}},
    "structural_tag": {
        "structured_outputs": {
            "structural_tag": {
                "type": "structural_tag",
                "format": {
                    "type": "tag",
                    "begin": "<call>",
                    "content": {"type": "json_schema", "json_schema": {"enum": [1, 2]}},
                    "end": "</call>",
                },
            }
        }
    },
    "json_object": {"response_format": {"type": "json_object"}, "max_tokens": 24},
    "calls": {  # a chat
        "tools": [{"type": "function", "function": {"name": name, "parameters": BOX}} for name in ("paint", "pack")],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    },
}
ENDLESS = ("response_format", "json_object")  # random weights may write much whitespace

EXPECTED: dict[str, list[tuple[str, str]]] = {}  # of a cluster without prefill pods, once


def is_valid(name: str, text: str) -> bool:
    match name:
        case "response_format" | "json":
            return jsonschema_rs.is_valid(SCHEMA, json.loads(text))
        case "json_object":
            return isinstance(json.loads(text), dict)
        case "calls":
            name, arguments = text.split(" ", 1)
            return name in ("paint", "pack") and jsonschema_rs.is_valid(BOX, json.loads(arguments))
        case "regex":
            return re.fullmatch(PATTERN, text) is not None
        case "choice":
            return text in CHOICES
        case "grammar":
            return re.fullmatch(r"(a*)x(b*)", text) is not None and text.count("a") == text.count("b")
        case _:
            return text in ("<call>1</call>", "<call>2</call>")


async def texts_of(client: httpx.AsyncClient, body: dict) -> list[tuple[str, str]]:
    """Text and finish reason of all choices; the stream and the whole answer are the same."""
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    whole = await client.post(path, json=body)
    assert whole.status_code == 200, whole.text
    choices = whole.json()["choices"]
    texts = ["" for _ in choices]
    async with client.stream("POST", path, json={**body, "stream": True}) as stream:
        async for line in stream.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    texts[choice["index"]] += text_of(choice)
    assert texts == [text_of(choice) for choice in choices]
    return [(text_of(choice), choice["finish_reason"]) for choice in choices]


def text_of(choice: dict) -> str:
    """Text of a choice or of a piece of it; of calls, their names and arguments."""
    if "text" in choice:
        return choice["text"]
    calls = (choice.get("message") or choice["delta"]).get("tool_calls") or []
    return "".join(f"{call['function']['name']} {call['function']['arguments']}" for call in calls)


async def all_answers(cluster) -> dict[str, list[tuple[str, str]]]:
    answers = {}
    async with httpx.AsyncClient(base_url=cluster.router.http_url, timeout=DEADLINE_S) as client:
        for name, fields in CONSTRAINTS.items():
            for n, sampling in ((1, {"temperature": 0}), (3, {"temperature": 1.0, "seed": 5})):
                prompt = {"messages": [{"role": "user", "content": PROMPT}]} if name == "calls" else {"prompt": PROMPT}
                body = {**prompt, "max_tokens": 160, "n": n, **sampling, **fields}
                answers[f"{name} {n}"] = await texts_of(client, body)
    return answers


@pytest.mark.parametrize(
    "connector", ["shared-storage", *(pytest.param(name, marks=pytest.mark.slow) for name in ("redis", "nixl"))]
)
async def test_constrained_answers_are_those_of_one_pod(tmp_path, connector):
    if not EXPECTED:
        colocated = running_cluster(tmp_path / "colocated", "llama", num_prefill=0, chat_template=TEMPLATE)
        async with colocated as cluster:
            EXPECTED.update(await all_answers(cluster))
    expected = EXPECTED
    for name, answers in expected.items():
        kind = name.split()[0]
        for text, reason in answers:
            assert reason == ("tool_calls" if kind == "calls" else "stop") or kind in ENDLESS, (name, text)
            assert text.lstrip().startswith("{") if reason == "length" else is_valid(kind, text), (name, text)
    with running_redis() if connector == "redis" else nullcontext() as redis:
        options = {"url": redis.url, "lookup_timeout_s": "60"} if redis is not None else {}
        options = {"connector": connector, "connector_options": options, "chat_template": TEMPLATE}
        async with running_cluster(tmp_path, "llama", **options) as cluster:
            assert await all_answers(cluster) == expected
            assert cluster.recomputed() == 0


async def test_a_constrained_answer_survives_migration_and_preemption(tmp_path):
    constraint = common_pb2.Constraint(kind=common_pb2.CONSTRAINT_KIND_REGEX, text=LONG)
    options = {"temperature": 0.0, "max_tokens": 300, "structured_outputs": constraint}
    prompts = [prompt_of(24, seed=seed) for seed in range(4)]
    async with running_cluster(tmp_path / "alone", "llama", num_prefill=0) as cluster:
        expected = await cluster.tokens(prompts, **options)
        assert all(re.fullmatch(LONG, bytes_of(cluster, tokens)) for tokens in expected)
    # No two fit the blocks of a decode pod at their full length.
    async with running_cluster(tmp_path, "llama", num_decode=3, decode_blocks=66) as cluster:
        streams = [Stream(cluster, prompt, options) for prompt in prompts]
        for stream in streams:
            await stream.reach(30)
        await cluster.decode.pop().stop()
        await asyncio.gather(*(stream.reading for stream in streams))
        assert [stream.tokens for stream in streams] == expected


def bytes_of(cluster, tokens) -> str:
    return cluster.router.service.model(None).tokenizer.decode(tokens)


REFUSED = [
    ({"regex": "(a[b"}, "position 5", "invalid_argument"),
    ({"json": {"type": "strin"}}, "strin", "invalid_argument"),
    ({"grammar": "root ::= foo"}, "line 1", "invalid_argument"),
    ({"grammar": 'root ::= (("a"? "a"?){1,40}){1,40} "z"'}, "too much time", "grammar_too_slow"),
    ({"structural_tag": {"format": {"type": "none"}}}, "", "invalid_argument"),
]


def error_of(response: httpx.Response) -> dict:
    assert response.status_code == 400, response.text
    return response.json()["error"]


async def test_what_cannot_be_compiled_is_refused_at_once(tmp_path):
    """Also if a prefill pod was to find out."""
    async with (
        running_cluster(tmp_path, "llama") as cluster,
        httpx.AsyncClient(base_url=cluster.router.http_url, timeout=DEADLINE_S) as client,
    ):
        for constraint, problem, code in REFUSED:
            for _ in range(2):  # the pods know the second one, and refuse it as they take it
                body = {"prompt": PROMPT, "structured_outputs": constraint}
                error = error_of(await client.post("/v1/completions", json=body))
                assert (error["param"], error["code"]) == ("structured_outputs", code), error
                assert problem in error["message"]
        body = {"prompt": PROMPT, "response_format": {"type": "structural_tag", "format": {"type": "none"}}}
        assert error_of(await client.post("/v1/completions", json=body))["param"] == "response_format"
        answer = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
        assert answer.status_code == 200
        assert len(cluster.router.cluster.ready_prefill()) == 1

"""What one request may hold, and for how long it holds up the others."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import pytest

from common.errors import JSON_DEPTH
from common.pb import inference_pb2, inference_pb2_grpc
from common.types import SamplingParams, constraint
from common.types.parameters import parameters_of
from router.dispatching import generation
from router.gateway import completions
from router.gateway.answering.encoded import EncodedList
from router.requests import bounds
from router.testing import FakeDecodePod

MAX_LAG_S = 0.1  # of CPU time; half of it on a core whose caches nothing else uses
MAX_TRIES = 3  # a neighbour that fills the processor's caches can double the time of one


@contextmanager
def lag_probe() -> Iterator[list[float]]:
    """Seconds of CPU that each callback of the event loop takes, but for garbage collection, which depends on what else
    the process holds."""
    spans: list[float] = []
    gc.disable()
    run = asyncio.Handle._run

    def timed(handle: asyncio.Handle) -> None:
        started = time.thread_time()
        run(handle)
        spans.append(time.thread_time() - started)

    asyncio.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield spans
    finally:
        gc.enable()
        asyncio.Handle._run = run  # type: ignore[method-assign]


async def least_lag(work) -> float:
    """Seconds of CPU of the longest callback while `work()` runs, in the best of a few tries."""
    longest: list[float] = []
    while not longest or (min(longest) >= MAX_LAG_S and len(longest) < MAX_TRIES):
        with lag_probe() as spans:
            await work()
        longest.append(max(spans))
    return min(longest)


@pytest.fixture
async def warm(pair):
    """A cluster that has served requests: imports and caches are made."""
    for path in ("/v1/chat/completions", "/v1/route/explain"):
        assert (await pair.post(path, **chat(max_tokens=1))).status_code in (200, 400)
    return pair


PARAMETERS = {name: field.parameter for name, field in parameters_of(SamplingParams).items()}
MOST = {name: parameter.max_entries for name, parameter in PARAMETERS.items() if parameter.max_entries}
BAD_WORDS = PARAMETERS["bad_words"]


def chat(**fields):
    return {"messages": [{"role": "user", "content": "Hi"}], **fields}


def nested(depth):
    """A schema that is so deep."""
    schema: dict = {}
    for _ in range(depth):
        schema = {"not": schema}
    return schema


def schema_format(schema):
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def message(**fields):
    return {"messages": [{"role": "user", "content": "Hi", **fields}]}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat(model="m" * (bounds.MAX_MODEL_CHARS + 1)), "model"),
        (chat(stop=["s"] * (bounds.MAX_STOPS + 1)), "stop"),
        (chat(stop="s" * (bounds.MAX_STOP_CHARS + 1)), "stop"),
        (chat(stop_token_ids=[5] * (MOST["stop_token_ids"] + 1)), "stop_token_ids"),
        (chat(allowed_token_ids=[5] * (MOST["allowed_token_ids"] + 1)), "allowed_token_ids"),
        (chat(bad_words=["w"] * (MOST["bad_words"] + 1)), "bad_words"),
        (chat(bad_words=["w" * (BAD_WORDS.max_chars + 1)]), "bad_words"),
        (chat(bad_words=["~" * BAD_WORDS.max_chars] * MOST["bad_words"]), "bad_words"),  # too many tokens in all
        (chat(logit_bias={str(token): 1 for token in range(MOST["logit_bias"] + 1)}), "logit_bias"),
        (chat(cache_salt="s" * (bounds.MAX_SALT_CHARS + 1)), "cache_salt"),
        (chat(session_id="s" * (bounds.MAX_SESSION_CHARS + 1)), "session_id"),
        (chat(user="s" * (bounds.MAX_SESSION_CHARS + 1)), "user"),
        (chat(metadata={str(key): "" for key in range(bounds.MAX_METADATA + 1)}), "metadata"),
        (chat(metadata={"k": "v" * (bounds.MAX_METADATA_CHARS + 1)}), "metadata[...]"),
        (chat(service_tier="t" * (bounds.MAX_NAME_CHARS + 1)), "service_tier"),
        (chat(chat_template_kwargs={"k": "v" * bounds.MAX_TEMPLATE_BYTES}), "chat_template_kwargs"),
        (chat(chat_template_kwargs=[1]), "chat_template_kwargs"),
        (chat(tools=[None] * (bounds.MAX_TOOLS + 1)), "tools"),
        (chat(tools=["t" * bounds.MAX_TOOLS_BYTES]), "tools"),
        (chat(structured_outputs={"json": {"enum": ["x" * 10**6]}}), "structured_outputs"),
        (chat(structured_outputs={"json": nested(80)}), "structured_outputs"),
        (
            chat(structured_outputs={"json": {"enum": [0] * (constraint.MAX_CONSTRAINT_VALUES + 1)}}),
            "structured_outputs",
        ),
        (chat(structured_outputs={"regex": "a" * (constraint.MAX_CONSTRAINT_BYTES + 1)}), "structured_outputs"),
        (chat(structured_outputs={"choice": ["a"] * (constraint.MAX_CHOICES + 1)}), "structured_outputs.choice"),
        (chat(response_format=schema_format(nested(80))), "response_format"),
        (chat(response_format=schema_format({"enum": ["é" * 70_000]})), "response_format"),
        (message(role="r" * (bounds.MAX_NAME_CHARS + 1)), "messages[0].role"),
        (message(name="n" * (bounds.MAX_NAME_CHARS + 1)), "messages[0].name"),
        (message(tool_calls=[[]] * 100), "messages[0].tool_calls"),
        (message(tool_calls=[[]] * 33_000), "messages[0].tool_calls"),
        (message(function_call={"a": [1] * 66_000}), "messages[0].function_call"),
        (chat(documents=[{}] * 33_000), "documents"),
        (chat(documents=[1]), "documents[0]"),
        (message(tool_call_id="n" * (bounds.MAX_NAME_CHARS + 1)), "messages[0].tool_call_id"),
        ({"messages": [{"role": "user"}] * (bounds.MAX_MESSAGES + 1)}, "messages"),
        (message(content=[{"type": "text", "text": ""}] * (bounds.MAX_CONTENT_PARTS + 1)), "messages"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_over_a_bound_is_refused_by_name(pair, body, param):
    response = await pair.post("/v1/chat/completions", **body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert len(response.content) < 1000


async def test_a_schema_of_any_depth_is_refused(pair):
    """Also one that is deeper than a JSON decoder recurses."""
    for depth in (200, 10_000, 100_000):
        schema = b'{"not":' * depth + b"{}" + b"}" * depth
        body = b'{"prompt": "x", "structured_outputs": {"json": ' + schema + b"}}"
        response = await pair.client.post("/v1/completions", content=body)
        assert response.status_code == 400, depth


DEEP = '{"a":' * 1500 + "1" + "}" * 1500
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": DEEP}}
LARGE = {"enum": ["x" * 10**6]}


@pytest.mark.parametrize(
    ("path", "body", "field", "limit"),
    [
        (
            "completions",
            {"prompt": "x", "structured_outputs": {"json": LARGE}},
            "structured_outputs",
            constraint.MAX_CONSTRAINT_BYTES,
        ),
        (
            "completions",
            {"prompt": "x", "response_format": schema_format(LARGE)},
            "response_format",
            constraint.MAX_CONSTRAINT_BYTES,
        ),
        (
            "chat/completions",
            {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
            "messages[0].tool_calls",
            JSON_DEPTH,
        ),
        (
            "responses",
            {"input": [{"type": "function_call", "call_id": "a", "name": "f", "arguments": DEEP}]},
            "input[0].arguments",
            JSON_DEPTH,
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_messages_name_the_field_and_the_limit(pair, path, body, field, limit):
    error = (await pair.post(f"/v1/{path}", **body)).json()["error"]
    assert error["param"] == field
    assert error["message"].startswith(field)
    assert re.search(rf"\b{limit}\b", error["message"]), error["message"]


async def test_levels_of_a_body(pair):
    def nested_body(depth):
        return b'{"prompt": "x", "max_tokens": 1, "kv_transfer_params": ' + b"[" * depth + b"]" * depth + b"}"

    headers = {"content-type": "application/json"}
    read = await pair.client.post("/v1/completions", content=nested_body(JSON_DEPTH - 1), headers=headers)
    assert read.json()["error"]["param"] == "kv_transfer_params"
    refused = await pair.client.post("/v1/completions", content=nested_body(10 * JSON_DEPTH), headers=headers)
    assert f"nested more than {JSON_DEPTH} levels" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"options": {"stop": ["s"] * (bounds.MAX_STOPS + 1)}}, "stop"),
        ({"options": {"stop_token_ids": [5] * (MOST["stop_token_ids"] + 1)}}, "stop_token_ids"),
        ({"options": {"bad_words": ["w"] * (MOST["bad_words"] + 1)}}, "bad_words"),
        ({"options": {"logit_bias": dict.fromkeys(range(MOST["logit_bias"] + 1), 1.0)}}, "logit_bias"),
        ({"chat": {"messages": [{"role": "user"}] * (bounds.MAX_MESSAGES + 1)}}, "chat"),
        ({"model": "m" * (bounds.MAX_MODEL_CHARS + 1)}, "model"),
        ({"cache_salt": "s" * (bounds.MAX_SALT_CHARS + 1)}, "cache_salt"),
        (
            {"options": {"structured_outputs": {"kind": 3, "text": "a" * (constraint.MAX_CONSTRAINT_BYTES + 1)}}},
            "structured_outputs",
        ),
        ({"options": {"structured_outputs": {"kind": 9, "text": "a"}}}, "structured_outputs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_grpc_has_the_same_bounds(pair, fields, param):
    prompt = {} if "chat" in fields else {"text": "Hi"}
    async with grpc.aio.insecure_channel(pair.router.grpc_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await inference_pb2_grpc.InferenceStub(channel).Generate(
                inference_pb2.GenerateRequest(**prompt, **fields), timeout=30
            )
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(caught.value.trailing_metadata())["baton-error-param"] == param


async def test_prompts_are_bounded_together_after_n(start_cluster):
    cluster = await start_cluster([], [FakeDecodePod(max_model_len=100)], max_request_tokens=120)
    prompt = [600] * 50
    assert (await cluster.post("/v1/completions", prompt=prompt, n=2, max_tokens=1)).status_code == 200
    for body in ({"prompt": prompt, "n": 3}, {"prompt": [prompt] * 3}):
        response = await cluster.post("/v1/completions", **body, max_tokens=1)
        assert response.status_code == 400
        assert "max_request_tokens" in response.json()["error"]["message"]
    one = await cluster.post("/v1/completions", prompt=[600] * 99, max_tokens=1)
    assert one.status_code == 200


@pytest.mark.parametrize("path", ["/v1/route/explain", "/v1/completions"])
async def test_a_route_is_asked_for_within_the_same_bounds(pair, path):
    asked = {"dry_run": True} if path == "/v1/completions" else {}
    response = await pair.post(path, prompt=["x"] * 60_000, **asked)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    assert (await pair.post(path, prompt=["x"] * 64, n=3, **asked)).status_code == 400
    assert len((await pair.post(path, prompt=["x"] * 64, n=2, **asked)).json()["data"]) == 64


MIB = 2**20
TEXT = "The sun is a star. " * 4
CHAT = [{"role": "user", "content": "x"}]
PATHS = {
    "system": "/v1/messages",
    "input": "/v1/responses",
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
}


def tool(name, num_values):
    return {"type": "function", "function": {"name": name, "parameters": {"enum": list(range(num_values))}}}


BODIES = {
    "token ids": {"prompt": [5] * 300_000},
    "many prompts": {"prompt": [[600] * 200] * 128, "max_tokens": 1},
    "many texts": {"prompt": [TEXT * 40] * 128, "max_tokens": 1},
    "many choices": {"prompt": [600] * 4000, "n": 128, "max_tokens": 1},
    "a long text": {"prompt": "é" * (3 * MIB)},
    "a text of commas": {"prompt": "," * (7 * MIB)},
    "prompts that are too many": {"prompt": ["x"] * 120_000},
    "stop token ids": {"prompt": "x", "stop_token_ids": [5] * 250_000},
    "stops": {"prompt": "x", "stop": ["s"] * 250_000},
    "metadata": {"prompt": "x", "metadata": {str(key): "" for key in range(120_000)}},
    "nested": {"prompt": "x", "logit_bias": [[]] * 120_000},
    "messages": {"messages": [{"role": "user", "content": "x"}] * bounds.MAX_MESSAGES},
    "too many messages": {"messages": [{"role": "u"}] * 120_000},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 60_000}]},
    "tools": {"messages": CHAT, "tools": [tool(str(number), 20) for number in range(bounds.MAX_TOOLS)]},
    "too many tools": {"messages": CHAT, "tools": [{}] * 120_000},
    "a tool of many values": {"messages": CHAT, "tools": [tool("f", 120_000)]},
    "forced calls": {"messages": CHAT, "tools": [tool("f", 19_000)], "tool_choice": "required"},
    "blocks": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 60_000}],
        "max_tokens": 1,
        "system": "",
    },
    "items": {"input": [{"content": [{"type": "input_text", "text": "x"}] * 20}] * 3_000},
    "unknown field": {"prompt": "x", "unknown": [[]] * 120_000},
    "names in calls": {"messages": [{"role": "assistant", "function_call": {str(key): 1 for key in range(250_000)}}]},
    "names in documents": {"messages": CHAT, "documents": [{str(key): 1 for key in range(250_000)}]},
    "results": {
        "system": "",
        "messages": [{"role": "user", "content": [{"type": "tool_result", "content": [{"type": "text"}] * 6}] * 8000}],
        "max_tokens": 1,
    },
    "many values": {"prompt": [5] * 3_000_000},
    "a schema": {"prompt": "x", "structured_outputs": {"json": {"enum": ["x" * 10**6]}}},
    "values of a schema": {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": [[]] * 100_000}},
    "a schema of quotes": {
        "prompt": "x",
        "structured_outputs": {"json": '"' + '\\"' * 60_000},
    },  # of which none ends it
    "a choice": {"prompt": "x", "structured_outputs": {"choice": ["a" * 20] * 4000}},
}


@pytest.mark.parametrize("name", BODIES)
async def test_no_body_holds_up_the_loop(warm, name):
    body = BODIES[name]
    paths = [path for field, path in PATHS.items() if field in body][:1]
    content = json.dumps(body, separators=(",", ":")).encode()

    async def ask(path):
        response = await warm.client.post(path, content=content, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400, 413), response.text[:300]

    for path in [*paths, "/v1/route/explain"]:
        assert await least_lag(lambda path=path: ask(path)) < MAX_LAG_S, path


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": TEXT * 4000, "return_token_strs": True}),
        ("/tokenize", {"prompt": "x" * (7 * MIB)}),
        ("/tokenize", BODIES["messages"]),
        ("/detokenize", {"tokens": [600] * 130_000}),
        ("/detokenize", {"tokens": [600] * 250_000}),
    ],
    ids=["a text", "a long text", "a chat", "ids", "too many ids"],
)
async def test_no_tokenizing_holds_up_the_loop(start_cluster, path, body):
    cluster = await start_cluster([], [FakeDecodePod(max_model_len=131_072)])
    content = json.dumps(body).encode()

    async def ask():
        response = await cluster.client.post(path, content=content, headers={"content-type": "application/json"})
        assert response.status_code in (200, 400), response.text[:300]

    await ask()  # caches are made
    assert await least_lag(ask) < MAX_LAG_S


@pytest.mark.parametrize(
    "request_",
    [
        inference_pb2.GenerateRequest(chat={"messages": [{}] * 500_000}),
        inference_pb2.GenerateRequest(tokens={"token_ids": [5] * 1_000_000}),
        inference_pb2.GenerateRequest(text="x", options={"stop_token_ids": [5] * 1_000_000}),
    ],
    ids=["messages", "tokens", "stops"],
)
async def test_no_message_holds_up_the_loop(warm, request_):
    async with grpc.aio.insecure_channel(warm.router.grpc_address) as channel:
        content = request_.SerializeToString()
        call = channel.unary_unary("/baton.v1.Inference/Generate")

        async def ask():
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(content, timeout=60)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

        assert await least_lag(ask) < MAX_LAG_S


@pytest.mark.parametrize("stream", [False, True])
async def test_no_answer_holds_up_the_loop(warm, stream):
    body = chat(max_tokens=2000, logprobs=True, top_logprobs=20, stream=stream)

    async def ask():
        assert (await warm.post("/v1/chat/completions", **body)).status_code == 200

    assert await least_lag(ask) < MAX_LAG_S


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", chat(logprobs=True, top_logprobs=19, n=8, max_tokens=2**15 // 10), "top_logprobs"),
        ("/v1/completions", {"prompt": ["a"] * 8, "logprobs": 19, "n": 2, "max_tokens": 2**14 // 10}, "logprobs"),
    ],
)
async def test_log_probabilities_are_bounded_over_all_choices(pair, path, body, param):
    refused = await pair.post(path, **{**body, "max_tokens": body["max_tokens"] + 1})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == param


async def test_constraints_and_bad_words_are_read_once_for_all_prompts(pair, monkeypatch):
    tokenizer, spelled, checked = pair.router.service.model(None).tokenizer, [], []
    encode, check_shape = tokenizer.encode, constraint.check_json_shape
    monkeypatch.setattr(tokenizer, "encode", lambda text, **more: spelled.append(text) or encode(text, **more))
    monkeypatch.setattr(
        constraint, "check_json_shape", lambda *encoded: checked.append(encoded) or check_shape(*encoded)
    )
    schema = {"enum": ["once"]}
    await pair.complete(prompt=["x"] * 32, max_tokens=1, structured_outputs={"json": schema}, bad_words=["onceword"])
    assert len(checked) == 1
    assert spelled.count("onceword") == spelled.count(" onceword") == 1


async def test_a_prompt_is_spelled_once_for_all_choices(pair, monkeypatch):
    tokenizer, spelled = pair.router.service.model(None).tokenizer, []
    decode = tokenizer.decode
    monkeypatch.setattr(tokenizer, "decode", lambda ids, **more: spelled.append(list(ids)) or decode(ids, **more))
    prompt = [300] * 3000
    answer = await pair.complete(prompt=prompt, echo=True, n=16, max_tokens=1)
    assert len({choice["text"] for choice in answer["choices"]}) == 1
    assert spelled.count(prompt) == 1


@pytest.mark.parametrize(
    ("body", "most"),
    [
        ({"prompt": [600] * 60_000, "n": 16}, 3),
        ({"prompt": [600], "n": 32, "allowed_token_ids": list(range(8192))}, 3),
        ({"prompt": [600], "n": 32, "logit_bias": {str(number): 1 for number in range(8192)}}, 3),
        ({"prompt": [600], "n": 64}, 16),
    ],
    ids=["a prompt", "allowed tokens", "biases", "none"],
)
async def test_large_requests_are_dispatched_few_at_a_time(start_cluster, monkeypatch, body, most):
    cluster = await start_cluster([], [FakeDecodePod(max_model_len=131_072, vocab_size=10_000)])
    turn, dispatched = 0, Counter()
    open_legs = generation.open_legs

    def open_and_count(*arguments):
        dispatched[turn] += 1
        return open_legs(*arguments)

    async def count_turns():
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(generation, "open_legs", open_and_count)
    counting = asyncio.create_task(count_turns())
    await cluster.complete(**body, max_tokens=1)
    counting.cancel()
    assert dispatched.total() == body["n"]
    assert max(dispatched.values()) <= most


async def test_token_ids_of_a_prompt_are_encoded_once_for_all_choices(pair, monkeypatch):
    encoded = []

    def encode(entries=()):
        encoded.append(list(entries))
        return EncodedList(entries)

    monkeypatch.setattr(completions, "EncodedList", encode)
    prompts = [[300] * 3000, [301] * 3000]
    answer = await pair.complete(prompt=prompts, return_token_ids=True, n=8, max_tokens=1)
    assert [choice["prompt_token_ids"] for choice in answer["choices"]] == [prompts[0]] * 8 + [prompts[1]] * 8
    assert sorted(filter(None, encoded)) == prompts


FIELDS = {
    "unknown": b"{" + b",".join(b'"f%d":1' % number for number in range(200_000)) + b"}",
    "repeated": b"{" + b",".join([b'"prompt":"x"'] * 100_000) + b"}",
}


@pytest.mark.parametrize("body", FIELDS.values(), ids=FIELDS)
@pytest.mark.parametrize("path", ["/v1/route/explain", "/tokenize"])
async def test_many_fields_hold_up_nothing(warm, path, body):

    async def ask():
        answer = await warm.client.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == 400

    assert await least_lag(ask) < MAX_LAG_S


PAGES = ["/health", "/metrics", "/v1/models", "/version", "/openapi.json", "/docs", "/nothing"]


@pytest.mark.parametrize("path", PAGES)
async def test_no_page_holds_up_the_loop(warm, path):
    assert await least_lag(lambda: warm.client.get(path)) < MAX_LAG_S

"""What a client does wrong: an OpenAI-style error that names it, and nothing started."""

from __future__ import annotations

import pytest
import pytest_asyncio

from router.gateway.openai.completion_bodies import CompletionBody
from router.testing import FakeDecodePod
from tests.unit.router.router_cluster import run_cluster

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_cluster():
    decode = FakeDecodePod(max_model_len=64)
    async with run_cluster(decode=[decode], max_body_bytes=4096, max_choices=4) as cluster:
        await cluster.until_ready()
        yield cluster


@pytest.fixture
def cluster(shared_cluster):
    yield shared_cluster
    clients = [each for each in shared_cluster.decode[0].submits if not each.request.request_id.startswith("canary-")]
    assert clients == []
    assert shared_cluster.router.service._running == {}


def error_of(response, status, code="invalid_argument"):
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == code
    return error


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "application/jsonx"])
async def test_what_a_browser_would_post_unasked_is_refused(cluster, content_type):
    response = await cluster.client.post(TEXT, content=b'{"prompt": "Hi"}', headers={"content-type": content_type})
    assert error_of(response, 400)["param"] == "content-type"


@pytest.mark.parametrize("body", [b"{", b"", b"\xff", b'{"model": "a",}', b'{"temperature": NaN}'])
@pytest.mark.parametrize("path", [TEXT, CHAT])
async def test_invalid_json(cluster, path, body):
    error = error_of(await cluster.client.post(path, content=body), 400)
    assert "not valid JSON" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (TEXT, {}, "prompt"),
        (TEXT, {"prompt": ""}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": ["a", [1]]}, "prompt"),
        (TEXT, {"prompt": ["a", ""]}, "prompt[1]"),
        (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
        (TEXT, {"prompt": "a", "max_tokens": "many"}, "max_tokens"),
        (TEXT, {"prompt": "a", "max_tokens": 64}, "prompt"),
        (TEXT, {"prompt": [5] * 64}, "prompt"),
        (TEXT, {"prompt": "a", "temperature": -0.1}, "temperature"),
        (TEXT, {"prompt": "a", "temperature": 2.1}, "temperature"),
        (TEXT, {"prompt": "a", "top_p": 0}, "top_p"),
        (TEXT, {"prompt": "a", "top_k": -2}, "top_k"),
        (TEXT, {"prompt": "a", "top_k": 2**32}, "top_k"),
        (TEXT, {"prompt": "a", "min_p": 1.5}, "min_p"),
        (TEXT, {"prompt": "a", "seed": -(2**63) - 1}, "seed"),
        (TEXT, {"prompt": "a", "seed": 2**64}, "seed"),
        (TEXT, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (TEXT, {"prompt": "a", "logprobs": 21, "echo": True}, "logprobs"),
        (TEXT, {"prompt": "a", "prompt_logprobs": 21}, "prompt_logprobs"),
        (TEXT, {"prompt": "a", "prompt_logprobs": -1}, "prompt_logprobs"),
        (TEXT, {"prompt": "a", "logit_bias": {"a": 1}}, "logit_bias"),
        (TEXT, {"prompt": "a", "logit_bias": {"5": 101}}, "logit_bias"),
        (TEXT, {"prompt": "a", "logit_bias": [5]}, "logit_bias"),
        (TEXT, {"prompt": "a", "allowed_token_ids": ["5"]}, "allowed_token_ids[0]"),
        (TEXT, {"prompt": "a", "allowed_token_ids": [5], "min_tokens": 1, "stop_token_ids": [5]}, "allowed_token_ids"),
        (TEXT, {"prompt": "a", "bad_words": [""]}, "bad_words"),
        (TEXT, {"prompt": "a", "bad_words": [" \n"]}, "bad_words"),
        (TEXT, {"prompt": "a", "bad_words": "word"}, "bad_words"),
        (TEXT, {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        (TEXT, {"prompt": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        (TEXT, {"prompt": [5] * 64, "truncate_prompt_tokens": 64}, "prompt"),
        (TEXT, {"prompt": "a", "thinking_token_budget": 5}, "thinking_token_budget"),
        (TEXT, {"prompt": "a", "thinking_token_budget": -2}, "thinking_token_budget"),
        (CHAT, {"messages": HELLO, "max_tokens": 0, "prompt_logprobs": None}, "max_tokens"),
        (
            CHAT,
            {"messages": HELLO, "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "content": ""}], "continue_final_message": True},
            "continue_final_message",
        ),
        (TEXT, {"prompt": "a", "min_tokens": 17}, "min_tokens"),
        (TEXT, {"prompt": "a", "n": 0}, "n"),
        (TEXT, {"prompt": "a", "n": 5}, "n"),
        (TEXT, {"prompt": ["a"] * 3, "n": 2}, "n"),
        (TEXT, {"prompt": "a", "best_of": 0}, "best_of"),
        (TEXT, {"prompt": "a", "best_of": 1, "n": 2}, "best_of"),
        (TEXT, {"prompt": ["a"] * 3, "best_of": 2}, "best_of"),
        (CHAT, {"messages": HELLO, "best_of": 5}, "best_of"),
        (TEXT, {"prompt": "a", "stop": ""}, "stop"),
        (TEXT, {"prompt": "a", "stop": ["x"] * 17}, "stop"),
        (TEXT, {"prompt": "a", "stop": [1]}, "stop[0]"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"),
        (TEXT, {"prompt": "a", "typo": 1}, "typo"),
        (TEXT, {"prompt": "a", "stream_options": {"typo": 1}}, "stream_options.typo"),
        (TEXT, {"prompt": "a", "priority": 2**31}, "priority"),
        (TEXT, {"prompt": "a", "request_id": "a b"}, "request_id"),
        (TEXT, {"prompt": "a", "cache_salt": "x" * 257}, "cache_salt"),
        (TEXT, {"prompt": "a", "kv_failure_policy": "retry"}, "kv_failure_policy"),
        (TEXT, {"prompt": "a", "kv_failure_policy": 1}, "kv_failure_policy"),
        (CHAT, {"messages": HELLO, "kv_failure_policy": ""}, "kv_failure_policy"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"content": "a"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        (CHAT, {"messages": HELLO, "tools": [{}]}, "tools[0]"),
        (CHAT, {"messages": HELLO, "response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 200}]}, "messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_the_field_at_fault_is_named(cluster, path, body, param, stream):
    error = error_of(await cluster.post(path, **body, stream=stream), 400)
    assert error["param"] == param
    assert param.split("[")[0].split(".")[0] in error["message"]
    assert error["type"] == "invalid_request_error"


async def test_a_ranking_is_not_streamed(cluster):
    error = error_of(await cluster.post(TEXT, prompt="a", best_of=2, stream=True), 400)
    assert (error["param"], "stream" in error["message"]) == ("best_of", True)


SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}}}
TOOL = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (TEXT, {"structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (TEXT, {"response_format": SCHEMA}, "response_format"),
        (TEXT, {"response_format": {"type": "xml"}}, "response_format.type"),
        (TEXT, {"vllm_xargs": {"a": 1}}, "vllm_xargs"),
        (CHAT, {"response_format": SCHEMA}, "response_format"),
        (CHAT, {"tools": [TOOL]}, "tools"),
        (CHAT, {"tools": [TOOL], "tool_choice": "required"}, "tools"),
    ],
)
async def test_what_cannot_be_searched_for_is_refused_by_name(cluster, path, fields, param):
    prompt = {"prompt": "a"} if path == TEXT else {"messages": HELLO}
    error = error_of(await cluster.post(path, **prompt, **fields, use_beam_search=True), 400)
    assert error["param"] == param


@pytest.mark.parametrize("token_id", [-1, 2048, 2**33])
async def test_token_ids_outside_the_vocabulary(cluster, token_id):
    error = error_of(await cluster.post(TEXT, prompt=[5, token_id]), 400)
    assert error["param"] == "prompt"
    assert str(token_id) in error["message"]
    error = error_of(await cluster.post(TEXT, prompt="a", stop_token_ids=[token_id]), 400)
    assert error["param"] == "stop_token_ids"
    error = error_of(await cluster.post(TEXT, prompt="a", allowed_token_ids=[token_id]), 400)
    assert error["param"] == "allowed_token_ids"
    error = error_of(await cluster.post(TEXT, prompt="a", logit_bias={str(token_id): 1}), 400)
    assert error["param"] == "logit_bias"


async def test_unknown_model(cluster):
    for path, body in [(TEXT, {"prompt": "a"}), (CHAT, {"messages": HELLO})]:
        error = error_of(await cluster.post(path, model="gpt-9", **body), 404, "not_found")
        assert error["param"] == "model"
        assert "baton-demo" in error["message"]
    error_of(await cluster.client.get("/v1/models/gpt-9"), 404, "not_found")


async def test_prompts_are_counted_before_they_are_looked_at(cluster, monkeypatch):
    monkeypatch.setattr(CompletionBody, "prompts", lambda body: pytest.fail("the limit is checked too late"))
    error = error_of(await cluster.post(TEXT, prompt=["a"] * 500), 400)
    assert error["param"] == "n"


async def test_too_large_a_body(cluster):
    error_of(await cluster.post(TEXT, prompt="x" * 5000), 413, "too_large")

    async def endless():
        for _ in range(100):
            yield b"x" * 1000

    error_of(await cluster.client.post(TEXT, content=endless()), 413, "too_large")


@pytest.mark.parametrize("rest", [b'b"}', b'"}', b'\\n", "max_tokens": 3}', b'\\u0041"}'])
@pytest.mark.parametrize("half", [b"\\ud800", b"\\uDC00"])
async def test_lone_surrogates_are_not_text(cluster, half, rest):
    error = error_of(await cluster.client.post(TEXT, content=b'{"prompt": "a' + half + rest), 400)
    assert "surrogate pair" in error["message"]


async def test_a_body_that_is_nested_too_deep(cluster):
    body = b'{"messages": [], "tools": ' + b"[" * 1900 + b"]" * 1900 + b"}"
    error = error_of(await cluster.client.post(CHAT, content=body), 400)
    assert "nested" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (TEXT, b'{"prompt": "a", "n": 1, "n": 3}'),
        (CHAT, b'{"messages": [{"role": "user", "content": "a"}], "\\u006e": 1, "stop": "{", "n": 1}'),
        ("/tokenize", b'{"prompt": "a", "prompt": "b"}'),
    ],
)
async def test_a_field_that_is_given_twice(cluster, path, body):
    error = error_of(await cluster.client.post(path, content=body), 400)
    assert error["message"] == f"{error['param']} is given more than once"
    assert error["param"] in ("n", "prompt")


async def test_no_such_route(cluster):
    error_of(await cluster.client.get("/v2/nothing"), 404, "not_found")
    response = await cluster.client.get(TEXT)
    error_of(response, 405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


async def test_errors_are_counted(cluster):
    def counts():
        return [
            cluster.metric("baton_router_request_errors_total", code=code) for code in ("invalid_argument", "not_found")
        ]

    before = counts()
    await cluster.post(TEXT, prompt="")
    await cluster.post(TEXT, prompt="a", model="gpt-9")
    assert counts() == [count + 1 for count in before]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, b'{"messages": [{"role": "assistant", "tool_calls": [%b]}]}', "messages[0].tool_calls"),
        (CHAT, b'{"messages": [{"role": "assistant", "function_call": %b}]}', "messages[0].function_call"),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "documents": [{"a": %b}]}', "documents[0]"),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "tool_choice": %b}', "tool_choice"),
        ("/v1/responses", b'{"input": "x", "tools": [{"type": "function", "name": "f", "parameters": {"a": %b}}]}', ""),
        (CHAT, b'{"messages": [{"role": "user", "content": "x"}], "function_call": %b}', "function_call"),
    ],
)
@pytest.mark.parametrize("value", [b'"\xff"', b"1e999"])
async def test_what_cannot_be_decoded_of_fields_that_are_kept_as_they_were_sent(cluster, path, body, param, value):
    headers = {"content-type": "application/json"}
    response = await cluster.client.post(path, content=body % value, headers=headers)
    error = error_of(response, 400)
    if value == b"1e999":
        assert (error["param"] or "").startswith(param)
    else:
        assert "utf-8" in error["message"]

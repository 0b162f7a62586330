"""POST /tokenize and POST /detokenize, as clients of vLLM use them."""

from __future__ import annotations

import threading

import pytest

from router.security.config import SecurityConfig
from router.security.keys import digest_of
from router.testing import FakeDecodePod

MESSAGES = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]


@pytest.fixture
async def small(start_cluster):
    """A cluster whose model has a context of 64 tokens."""
    return await start_cluster([], [FakeDecodePod(max_model_len=64)])


def error_of(response, status, param):
    assert response.status_code == status, response.text
    assert response.json()["error"]["param"] == param
    return response.json()["error"]["message"]


async def test_a_text(pair, tokenizer):
    response = await pair.post("/tokenize", model="baton-demo", prompt="Hello 日本")
    ids = tokenizer.encode("Hello 日本")
    assert response.json() == {"count": len(ids), "max_model_len": 4096, "tokens": ids, "token_strs": None}
    assert response.headers["x-request-id"].startswith("tokenize-")


async def test_tokens_are_those_that_a_chat_would_have(pair, tokenizer):
    chat = {"messages": MESSAGES, "chat_template_kwargs": {"x": 1}}
    tokens = (await pair.post("/tokenize", **chat)).json()["tokens"]
    await pair.post("/v1/chat/completions", **chat, max_tokens=1)
    assert tokens == list(pair.decode[0].submits[0].request.prompt_token_ids)
    shorter = (await pair.post("/tokenize", **chat, add_generation_prompt=False)).json()["tokens"]
    assert shorter == tokenizer.encode(
        tokenizer.render_chat(MESSAGES, add_generation_prompt=False), add_special_tokens=False
    )
    assert len(shorter) < len(tokens)


async def test_token_strings_are_those_of_the_vocabulary(pair, tokenizer):
    answer = (await pair.post("/tokenize", prompt="Hi there", return_token_strs=True)).json()
    vocab = tokenizer._backend.get_vocab()
    assert [vocab[piece] for piece in answer["token_strs"]] == answer["tokens"]


@pytest.mark.parametrize("text", ["Hi 日本 😀", "", "<|im_start|>user\nHi<|im_end|>\n"])
async def test_what_was_tokenized_can_be_read_again(pair, text):
    tokens = (await pair.post("/tokenize", prompt=text, add_special_tokens=False)).json()["tokens"]
    assert (await pair.post("/detokenize", tokens=tokens)).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param", "problem"),
    [
        ("/tokenize", {}, "prompt", "required"),
        ("/tokenize", {"prompt": ["a"]}, "prompt", "expected `str`"),
        ("/tokenize", {"prompt": "a", "add_special_token": True}, "add_special_token", "did you mean add_special"),
        ("/tokenize", {"messages": MESSAGES, "document": []}, "document", "did you mean documents?"),
        ("/tokenize", {"messages": []}, "messages", "empty"),
        ("/tokenize", {"messages": MESSAGES, "tools": [{}]}, "tools[0]", "missing required field `type`"),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": 5}, "chat_template_kwargs", "expected"),
        ("/tokenize", {"prompt": "ab " * 65}, "prompt", "more than the limit of 64"),
        ("/tokenize", {"prompt": "a" * 100_000}, "prompt", "more than a context of 64 tokens holds"),
        ("/detokenize", {}, "tokens", "required"),
        ("/detokenize", {"tokens": [1], "token": 1}, "token", "did you mean tokens?"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]", "expected `int`"),
        ("/detokenize", {"tokens": [5] * 65}, "tokens", "more than the limit of 64"),
    ],
)
async def test_what_is_wrong_is_named(small, path, body, param, problem):
    assert problem in error_of(await small.post(path, **body), 400, param)


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_an_unknown_model(small, path):
    body = {"prompt": "a"} if path == "/tokenize" else {"tokens": [5]}
    error_of(await small.post(path, **body, model="other"), 404, "model")


@pytest.mark.parametrize("token_id", [-1, 2048, 2**33])
async def test_ids_outside_the_vocabulary(small, token_id):
    assert "vocabulary" in error_of(await small.post("/detokenize", tokens=[5, token_id]), 400, "tokens")


async def test_a_context_that_is_not_known(start_cluster):
    cluster = await start_cluster()
    await cluster.decode[0].stop()
    await cluster.until(lambda: not cluster.router.cluster.can_serve)
    assert (await cluster.post("/tokenize", prompt="a")).status_code == 503


async def test_bodies_have_the_bounds_of_generations(start_cluster):
    cluster = await start_cluster([], [FakeDecodePod(max_model_len=64)], max_body_values=4200)
    assert (await cluster.post("/detokenize", tokens=[5] * 5000)).status_code == 413
    headers = {"content-type": "text/plain"}
    error_of(await cluster.client.post("/tokenize", content=b'{"prompt": "a"}', headers=headers), 400, "content-type")


async def test_calls_need_a_key_and_count_towards_its_quota(start_cluster, tmp_path):
    keys = tmp_path / "keys.yaml"
    digest = digest_of("alice-secret-key-0123456789").hex()
    keys.write_text(f"- {{name: alice, hash: 'sha256:{digest}', tokens_per_minute: 4}}\n")
    cluster = await start_cluster(security=SecurityConfig(api_keys_file=str(keys)))
    assert (await cluster.post("/tokenize", prompt="a")).status_code == 401
    cluster.client.headers["x-api-key"] = "alice-secret-key-0123456789"
    count = (await cluster.post("/tokenize", prompt="one two three four five six")).json()["count"]
    assert cluster.metric("baton_router_tenant_tokens_total", tenant="alice") == count > 4
    refused = await cluster.post("/detokenize", tokens=[5])
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "resource_exhausted")


async def test_long_inputs_leave_the_event_loop(start_cluster, monkeypatch):
    cluster = await start_cluster([], [FakeDecodePod(max_model_len=100_000)])
    tokenizer, threads = cluster.router.service.model(None).tokenizer, {}

    def watch(name):
        work = getattr(tokenizer, name)

        def watched(*args, **kwargs):
            threads[name] = threading.current_thread()
            return work(*args, **kwargs)

        monkeypatch.setattr(tokenizer, name, watched)

    for name in ("encode", "pieces", "decode_long"):
        watch(name)
    tokens = (await cluster.post("/tokenize", prompt="ab " * 20_000, return_token_strs=True)).json()["tokens"]
    await cluster.post("/detokenize", tokens=tokens)
    assert set(threads) == {"encode", "pieces", "decode_long"}
    assert threading.main_thread() not in threads.values()

"""The clients of the package `baton`, against routers over fake pods."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

import baton
from baton import AsyncClient, Client, SamplingParams
from baton.answers import FinishReason
from baton.errors import (
    BatonError,
    ConflictError,
    DeadlineExceededError,
    InvalidRequestError,
    UnauthenticatedError,
    UnavailableError,
    UnknownModelError,
    UnreachableError,
)
from baton.requests import Options, chat_request, text_request
from common.errors import ConfigError
from common.types.parameters import parameters_of
from router.config import RouterConfig
from router.runtime import Router
from router.security.config import SecurityConfig
from router.security.keys import digest_of
from router.testing import FakeDecodePod

ANSWER = "Paris is big. 日本 😀"
CHAT = [{"role": "user", "content": "Where?"}]


class Threaded:
    """A Client whose calls are made on other threads."""

    def __init__(self, client):
        self._client = client

    def __getattr__(self, name):
        method = getattr(self._client, name)
        if not name.startswith("stream"):
            return lambda *args, **kwargs: asyncio.to_thread(method, *args, **kwargs)

        async def stream(*args, **kwargs):
            pieces = method(*args, **kwargs)
            try:
                while (piece := await asyncio.to_thread(next, pieces, None)) is not None:
                    yield piece
            finally:
                await asyncio.to_thread(pieces.close)

        return stream


@asynccontextmanager
async def connected(kind, *args, **options):
    if kind is AsyncClient:
        async with AsyncClient(*args, **options) as client:
            yield client
    else:
        with Client(*args, **options) as client:
            yield Threaded(client)


kinds = pytest.mark.parametrize("kind", [Client, AsyncClient])


@pytest.fixture
async def cluster(start_cluster, says):
    return await start_cluster(decode=[FakeDecodePod(says(ANSWER))])


@kinds
async def test_answers_are_those_of_http(start_cluster, kind):
    cluster = await start_cluster()  # tokens by the seed
    http = await cluster.complete(prompt="Hello", n=2, seed=5, max_tokens=6, logprobs=1)
    chat = (await cluster.post("/v1/chat/completions", messages=CHAT, seed=5, max_tokens=6)).json()
    async with connected(kind, cluster.router.grpc_address) as client:
        answer = await client.generate("Hello", n=2, seed=5, max_tokens=6, num_logprobs=1)
        streamed = [piece async for piece in client.stream("Hello", n=2, seed=5, max_tokens=6)]
        told = await client.chat(CHAT, SamplingParams(seed=5, max_tokens=6))
        chatted = [piece async for piece in client.stream_chat(CHAT, seed=5, max_tokens=6)]
    texts = [choice["text"] for choice in http["choices"]]
    assert [choice.text for choice in answer.choices] == texts
    assert ["".join(piece.text for piece in streamed if piece.index == index) for index in (0, 1)] == texts
    assert [each.sampled for each in answer.choices[0].logprobs] == pytest.approx(
        http["choices"][0]["logprobs"]["token_logprobs"], abs=1e-5
    )
    assert answer.usage.completion_tokens == http["usage"]["completion_tokens"] == 12
    assert [piece.finish_reason for piece in streamed if piece.finish_reason] == [FinishReason.LENGTH] * 2
    assert told.text == "".join(piece.text for piece in chatted) == chat["choices"][0]["message"]["content"]


@kinds
async def test_tokens_models_and_routes(cluster, kind, tokenizer):
    async with connected(kind, cluster.router.grpc_address) as client:
        ids = await client.tokenize("Hello you")
        assert ids == tokenizer.encode("Hello you")
        assert await client.detokenize(ids) == "Hello you"
        assert len(await client.tokenize(CHAT)) > len(await client.tokenize("Where?"))
        assert [model.name for model in await client.models()] == ["baton-demo"]
        assert (await client.explain(ids))["data"][0]["num_prompt_tokens"] == len(ids)


@asynccontextmanager
async def two_routers(pod):
    """Over the same pod; each with how to end it."""
    config = RouterConfig(port=0, grpc_port=0, shutdown_grace_s=0.0, decode=[pod.address])
    async with AsyncExitStack() as first, AsyncExitStack() as second:
        routers = [await stack.enter_async_context(Router(config).running()) for stack in (first, second)]
        for router in routers:
            while router.service.unavailable_reason:
                await router.cluster._changed.wait()
        yield routers, first.aclose


@kinds
async def test_a_stream_outlives_its_router(says, kind):
    pod = FakeDecodePod(says(ANSWER))
    pod.allowed = 3
    async with (
        pod,
        two_routers(pod) as (routers, end_first),
        connected(kind, [router.grpc_address for router in routers]) as client,
    ):
        text, num_tokens = "", 0
        async for piece in client.stream("Hello", n=2):
            text += piece.text if piece.index == 0 else ""
            num_tokens += len(piece.token_ids)
            if num_tokens == 6:
                await end_first()
                await pod.allow(None)
        assert text == ANSWER
        assert (await client.generate("Hello")).text == ANSWER  # its first address is still there


@kinds
async def test_leaving_a_stream_ends_its_generation(cluster, kind):
    cluster.decode[0].allowed = 2
    async with connected(kind, cluster.router.grpc_address) as client:
        pieces = client.stream("Hello")
        await anext(pieces)
        await pieces.aclose()
        await cluster.until_quiet()


@kinds
async def test_abort(cluster, kind):
    cluster.decode[0].allowed = 2
    async with connected(kind, cluster.router.grpc_address) as client:
        answer = asyncio.create_task(client.generate("Hello", request_id="mine"))
        await cluster.decode[0].until(lambda: cluster.decode[0].submits)
        assert await client.abort("mine")
        assert (await answer).choices[0].finish_reason is FinishReason.ABORT
        assert not await client.abort("mine")


@kinds
async def test_errors_say_what_is_wrong_and_are_not_repeated(cluster, kind):
    async with connected(kind, cluster.router.grpc_address) as client:
        for error, param, request in [
            (InvalidRequestError, "temperature", {"temperature": 3}),
            (InvalidRequestError, "temperature", {"temperature": 1, "params": SamplingParams()}),
            (InvalidRequestError, "n", {"n": 10_000}),
            (InvalidRequestError, "timeout_s", {"timeout_s": 0}),
            (UnknownModelError, "model", {"model": "gpt-9"}),
        ]:
            with pytest.raises(error) as caught:
                await client.generate("Hello", **request)
            assert caught.value.param == param
        with pytest.raises(InvalidRequestError, match="nonsense"):
            await client.generate("Hello", nonsense=1)
        with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.image is not a field"):
            await client.chat([{"role": "user", "image": "x"}])
        cluster.decode[0].allowed = 0
        with pytest.raises(DeadlineExceededError):
            await client.generate("Hello", timeout_s=0.2)
    assert cluster.metric("baton_router_request_errors_total", code="invalid_argument") == 2


@pytest.mark.parametrize(
    ("request_", "param"),
    [
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": [1]}, "temperature"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"structured_outputs": {"choice": ["a"]}}, "structured_outputs"),
        ({"logit_bias": 5}, "logit_bias"),
        ({"vllm_xargs": 5}, "vllm_xargs"),
        ({"bad_words": "abc"}, "bad_words"),
        ({"stop": 5}, "stop"),
        ({"n": -1}, "n"),
        ({"priority": 10**20}, "priority"),
        ({"cache_salt": "\ud800"}, "cache_salt"),
        ({"temprature": 1}, "temprature"),
    ],
)
def test_what_fits_no_field_is_refused_by_name(request_, param):
    with pytest.raises(InvalidRequestError) as caught:
        text_request("Hello", None, **request_)
    assert caught.value.param == param
    assert caught.value.message.startswith(param)


@pytest.mark.parametrize("prompt", ["\ud800", 5, [1.5], [-1]])
def test_a_prompt_is_text_or_token_ids(prompt):
    with pytest.raises(InvalidRequestError, match="prompt must be"):
        text_request(prompt, None)


@pytest.mark.parametrize("messages", ["hi", [5], [{"role": "user", "content": 5}], [{"role": "user\ud800"}]])
def test_a_message_is_a_mapping_of_texts(messages):
    with pytest.raises(InvalidRequestError) as caught:
        chat_request(messages, None)
    assert caught.value.param == "messages[0]"


@kinds
async def test_adapters_are_loaded_listed_and_unloaded(start_cluster, kind):
    pod = FakeDecodePod()
    pod.adapters = {"/a": b"a" * 32, "/b": b"b" * 32}
    cluster = await start_cluster(decode=[pod])
    async with connected(kind, cluster.router.grpc_address) as client:
        await client.load_adapter("polite", "/a")
        base, adapter = await client.models()
        assert (adapter.name, adapter.parent, base.parent) == ("polite", base.name, "")
        await client.generate("Hello", max_tokens=1, model="polite")
        assert pod.submits[-1].request.adapter == b"a" * 32
        with pytest.raises(ConflictError):
            await client.load_adapter("polite", "/b")
        await client.load_adapter("polite", "/b", in_place=True, model=base.name)
        with pytest.raises(InvalidRequestError) as refused:
            await client.load_adapter("terse", "/nowhere")
        assert refused.value.param == "lora_path"
        await client.unload_adapter("polite")
        assert [each.name for each in await client.models()] == [base.name]
        with pytest.raises(UnknownModelError):
            await client.unload_adapter("polite")


@kinds
async def test_keys_and_unreachable_routers(start_cluster, kind, monkeypatch):
    monkeypatch.setenv("BATON_API_KEYS", f"alice:sha256:{digest_of('k' * 32).hex()}")
    cluster = await start_cluster(security=SecurityConfig())
    async with connected(kind, cluster.router.grpc_address, api_key="k" * 32) as client:
        await client.generate("Hello", max_tokens=1)
    async with connected(kind, cluster.router.grpc_address) as client:
        with pytest.raises(UnauthenticatedError):
            await client.generate("Hello", max_tokens=1)
    async with connected(kind, "127.0.0.1:1", max_attempts=2) as client:
        with pytest.raises(UnreachableError, match=r"no answer from 127.0.0.1:1: .*refused"):
            await client.models()


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"address": "http://127.0.0.1:9000"}, "address"),
        ({"address": []}, "address"),
        ({"timeout_s": 0}, "timeout_s"),
        ({"max_attempts": 0}, "max_attempts"),
        ({"tls_ca": "/no/such/file"}, "tls_ca"),
    ],
)
def test_bad_settings_are_named(options, param):
    with pytest.raises(ConfigError) as caught:
        Client(**options)
    assert caught.value.param == param


def test_options_are_the_table_of_sampling_parameters():
    given = {name for name, field in parameters_of(SamplingParams).items() if field.parameter.option_tag is not None}
    assert set(Options.__annotations__) == given


def test_the_package_has_few_names_and_no_torch():
    code = "import sys, baton; assert 'torch' not in sys.modules; print(*baton.__all__)"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert sorted(out.split()) == ["AsyncClient", "Client", "LLM", "LoRARequest", "SamplingParams"]
    from common.engine.llm import LLM, LoRARequest

    assert (baton.LLM, baton.LoRARequest) == (LLM, LoRARequest)
    with pytest.raises(AttributeError, match="nonsense"):
        _ = baton.nonsense
    assert issubclass(UnavailableError, BatonError)

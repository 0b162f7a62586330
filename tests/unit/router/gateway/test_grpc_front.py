"""The public gRPC API."""

from __future__ import annotations

import asyncio
import json
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from common.pb import common_pb2, inference_pb2, inference_pb2_grpc
from common.rpc.errors import from_rpc_error
from router.gateway.grpc import servicer as grpc_servicer
from router.testing import FakeDecodePod, FakePrefillPod


@pytest.fixture
async def cluster(start_cluster, says):
    reply = says("Paris is big. 日本 😀")
    return await start_cluster([FakePrefillPod(reply)], [FakeDecodePod(reply)])


@pytest.fixture
async def channel(cluster):
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        yield channel


@pytest.fixture
def stub(channel):
    return inference_pb2_grpc.InferenceStub(channel)


def request(**options):
    return inference_pb2.GenerateRequest(text="Hello", options=inference_pb2.GenerateOptions(**options))


async def test_whole_and_streamed_agree(stub, cluster):
    whole = await stub.Generate(request(num_logprobs=1), timeout=30)
    chunks = [chunk async for chunk in stub.GenerateStream(request(num_logprobs=1), timeout=30)]
    (choice,) = whole.choices
    assert choice.text == "".join(chunk.text for chunk in chunks) == "Paris is big. 日本 😀"
    assert list(choice.token_ids) == [token_id for chunk in chunks for token_id in chunk.token_ids]
    assert len(choice.logprobs) == len(choice.token_ids) == whole.usage.completion_tokens
    assert choice.finish_reason == chunks[-1].finish_reason == common_pb2.FINISH_REASON_STOP
    assert chunks[-1].usage == whole.usage
    assert {chunk.finish_reason for chunk in chunks[:-1]} == {common_pb2.FINISH_REASON_UNSPECIFIED}
    starts = [chunk.start_index for chunk in chunks if chunk.token_ids]
    assert starts == sorted(set(starts))


async def test_prompts_of_every_form(stub, cluster, tokenizer):
    message = inference_pb2.ChatMessage(role="user", content="Hello")
    forms = [
        (inference_pb2.GenerateRequest(text="Hello"), tokenizer.encode("Hello")),
        (inference_pb2.GenerateRequest(tokens=inference_pb2.TokenPrompt(token_ids=[5, 6])), [5, 6]),
        (
            inference_pb2.GenerateRequest(chat=inference_pb2.ChatPrompt(messages=[message])),
            tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": "Hello"}])),
        ),
    ]
    for form, ids in forms:
        await stub.Generate(form, timeout=30)
        assert list(cluster.decode[0].submits[-1].request.prompt_token_ids) == ids


@pytest.mark.parametrize("policy", [common_pb2.KV_FAILURE_POLICY_RECOMPUTE, common_pb2.KV_FAILURE_POLICY_FAIL])
async def test_the_kv_failure_policy_reaches_the_decode_pod(stub, cluster, policy):
    await stub.Generate(inference_pb2.GenerateRequest(text="a", kv_failure_policy=policy), timeout=30)
    assert cluster.decode[0].submits[0].kv_failure_policy == policy


@pytest.mark.parametrize(
    ("bad", "status", "code", "param"),
    [
        (inference_pb2.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", "prompt"),
        (inference_pb2.GenerateRequest(text=""), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", "text"),
        (request(temperature=3), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", "temperature"),
        (request(max_tokens=5000), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", "text"),
        (request(stop=[""]), grpc.StatusCode.INVALID_ARGUMENT, "INVALID_ARGUMENT", "stop"),
        (
            inference_pb2.GenerateRequest(text="a", kv_failure_policy=9),
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_ARGUMENT",
            "kv_failure_policy",
        ),
        (inference_pb2.GenerateRequest(text="a", model="gpt-9"), grpc.StatusCode.NOT_FOUND, "NOT_FOUND", "model"),
        (
            inference_pb2.GenerateRequest(tokens=inference_pb2.TokenPrompt(token_ids=[2048])),
            grpc.StatusCode.INVALID_ARGUMENT,
            "INVALID_ARGUMENT",
            "tokens",
        ),
    ],
)
async def test_errors_are_statuses_that_name_the_field(stub, cluster, bad, status, code, param):
    with pytest.raises(grpc.aio.AioRpcError) as unary:
        await stub.Generate(bad, timeout=30)
    with pytest.raises(grpc.aio.AioRpcError) as streamed:
        [chunk async for chunk in stub.GenerateStream(bad, timeout=30)]
    for caught in (unary.value, streamed.value):
        error = from_rpc_error(caught)
        assert (caught.code(), error.code.name, error.param) == (status, code, param)
    assert cluster.decode[0].submits == []


async def test_abort_ends_a_generation_with_what_there_is(stub, cluster):
    cluster.decode[0].allowed = 2
    message = request()
    message.request_id = "mine"
    answer = asyncio.ensure_future(stub.Generate(message, timeout=30))
    await cluster.decode[0].until(lambda: cluster.decode[0].submits)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(message, timeout=30)
    assert "mine" in caught.value.details()
    assert (await stub.Abort(inference_pb2.AbortRequest(request_id="mine"), timeout=30)).found
    assert (await answer).choices[0].finish_reason == common_pb2.FINISH_REASON_ABORT
    await cluster.decode[0].until(lambda: cluster.decode[0].aborts)
    assert not (await stub.Abort(inference_pb2.AbortRequest(request_id="mine"), timeout=30)).found
    await cluster.until_quiet()


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
async def test_cancelling_the_call_ends_both_legs(stub, cluster, method):
    cluster.decode[0].allowed = 0
    cluster.prefill[0].may_answer.clear()
    call = getattr(stub, method)(request(), timeout=60)
    await cluster.decode[0].until(lambda: cluster.decode[0].submits)
    await cluster.prefill[0].until(lambda: cluster.prefill[0].prefills)
    call.cancel()
    await cluster.decode[0].until(lambda: cluster.decode[0].aborts)
    await cluster.prefill[0].until(lambda: cluster.prefill[0].num_cancelled)
    await cluster.router.service._idle.wait()
    await cluster.until_quiet()


@asynccontextmanager
async def unread_stream(cluster):
    """A call that the router cannot finish writing, because its client reads no more than the first chunk."""
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]  # a small window that stays small
    async with grpc.aio.insecure_channel(cluster.router.grpc_address, options=options) as channel:
        message = request(num_logprobs=20, max_tokens=1000)  # 280 kB
        call = inference_pb2_grpc.InferenceStub(channel).GenerateStream(message, timeout=60)
        await call.read()
        await cluster.decode[0].until(lambda: not cluster.decode[0].live)
        yield call


async def read_to_end(call):
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_call_cancelled_while_it_is_written_is_nothing_special(start_cluster, caplog):
    cluster = await start_cluster()
    async with unread_stream(cluster) as call:
        assert cluster.router.service._running
        call.cancel()
        await asyncio.wait_for(cluster.router.service._idle.wait(), 30)
    assert [record.message for record in caplog.records if record.levelname not in ("DEBUG", "INFO")] == []
    await cluster.until_quiet()


async def test_a_client_that_stops_reading_is_given_up(start_cluster, monkeypatch):
    monkeypatch.setattr(grpc_servicer, "_LAST_CHUNK_S", 0.1)
    cluster = await start_cluster(request_timeout_s=3.0)
    async with unread_stream(cluster) as call:
        await asyncio.wait_for(cluster.router.service._idle.wait(), 30)
        assert cluster.metric("baton_router_request_errors_total", code="deadline_exceeded") == 1
        with pytest.raises(grpc.aio.AioRpcError, match="stopped reading"):
            await asyncio.wait_for(read_to_end(call), 30)
    await cluster.until_quiet()


async def test_an_unforeseen_failure_is_counted_and_logged(stub, cluster, monkeypatch, caplog):
    async def fail(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(cluster.router.service.model(""), "prepare", fail)
    with pytest.raises(grpc.aio.AioRpcError, match="the log of the process that answered") as caught:
        await stub.Generate(inference_pb2.GenerateRequest(text="a"), timeout=30)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert cluster.metric("baton_router_request_errors_total", code="internal") == 1
    assert "ZeroDivisionError" in caplog.text


async def test_several_choices_are_those_of_http(start_cluster, tokenizer):
    """Whole, streamed and over HTTP: the same choices, and the prompt counts once."""
    cluster = await start_cluster([FakePrefillPod()], [FakeDecodePod()])  # answers of random tokens, by the seed
    body = {"prompt": "Hello", "n": 3, "seed": 7, "max_tokens": 5}
    http = (await cluster.client.post("/v1/completions", json=body)).json()
    message = inference_pb2.GenerateRequest(
        text="Hello", n=3, options=inference_pb2.GenerateOptions(seed=7, max_tokens=5)
    )
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        whole = await stub.Generate(message, timeout=30)
        chunks = [chunk async for chunk in stub.GenerateStream(message, timeout=30)]
    texts = [choice["text"] for choice in http["choices"]]
    assert [choice.text for choice in whole.choices] == texts
    assert ["".join(c.text for c in chunks if c.index == index) for index in range(3)] == texts
    assert whole.usage.prompt_tokens == http["usage"]["prompt_tokens"] == len(tokenizer.encode("Hello"))
    assert whole.usage.completion_tokens == http["usage"]["completion_tokens"]
    assert sum(chunk.usage.completion_tokens for chunk in chunks) == whole.usage.completion_tokens


async def test_an_abort_ends_all_choices(stub, cluster):
    cluster.decode[0].allowed = 2
    message = request()
    message.request_id, message.n = "mine", 2
    answer = asyncio.ensure_future(stub.Generate(message, timeout=30))
    await cluster.decode[0].until(lambda: len(cluster.decode[0].submits) == 2)
    assert (await stub.Abort(inference_pb2.AbortRequest(request_id="mine"), timeout=30)).found
    assert [choice.finish_reason for choice in (await answer).choices] == 2 * [common_pb2.FINISH_REASON_ABORT]
    await cluster.until_quiet()


@pytest.mark.parametrize("n", [1, 2])
async def test_a_broken_stream_goes_on_after_its_event_id(stub, cluster, n):
    """Cut after each chunk in turn, and resumed: what comes then is what was missing."""
    message = request(num_logprobs=1, seed=3)
    message.resumable, message.n = True, n
    expected = dict.fromkeys(range(n), "Paris is big. 日本 😀")
    num_chunks = len([chunk async for chunk in stub.GenerateStream(message, timeout=30)])
    for num_read in range(1, num_chunks):
        texts = dict.fromkeys(range(n), "")
        event_id = ""
        for limit in (num_read, None):
            message.last_event_id = event_id
            call = stub.GenerateStream(message, timeout=30)
            num_taken = 0
            async for chunk in call:
                texts[chunk.index] += chunk.text
                event_id = chunk.event_id
                num_taken += 1
                if num_taken == limit:
                    break
            call.cancel()
        assert texts == expected
        message.last_event_id = ""
    await cluster.until_quiet()


async def test_what_cannot_be_resumed_is_refused(stub, cluster):
    message = request(seed=3)
    message.resumable = True
    (*_, last) = [chunk async for chunk in stub.GenerateStream(message, timeout=30)]
    other = request(seed=3, max_tokens=3)
    for change, param in [
        (inference_pb2.GenerateRequest(last_event_id="rubbish"), "Last-Event-ID"),
        (inference_pb2.GenerateRequest(last_event_id=last.event_id, n=2), "Last-Event-ID"),
        (inference_pb2.GenerateRequest(last_event_id=last.event_id, options=other.options), "Last-Event-ID"),
    ]:
        changed = inference_pb2.GenerateRequest()
        changed.CopyFrom(message)
        changed.MergeFrom(change)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [chunk async for chunk in stub.GenerateStream(changed, timeout=30)]
        assert (caught.value.code(), from_rpc_error(caught.value).param) == (grpc.StatusCode.INVALID_ARGUMENT, param)
    beams = inference_pb2.GenerateRequest(text="a", use_beam_search=True)
    with pytest.raises(grpc.aio.AioRpcError, match="use_beam_search is for Generate"):
        [chunk async for chunk in stub.GenerateStream(beams, timeout=30)]
    with pytest.raises(grpc.aio.AioRpcError, match="best_of greater than n is for Generate"):
        [chunk async for chunk in stub.GenerateStream(inference_pb2.GenerateRequest(text="a", best_of=2), timeout=30)]
    with pytest.raises(grpc.aio.AioRpcError, match=r"best_of must be at least n \(3\)"):
        await stub.Generate(inference_pb2.GenerateRequest(text="a", n=3, best_of=2), timeout=30)
    with pytest.raises(grpc.aio.AioRpcError, match="resumable is for GenerateStream"):
        await stub.Generate(message, timeout=30)


async def test_the_context_is_not_known_without_a_decode_pod(start_cluster):
    cluster = await start_cluster()
    await cluster.decode[0].stop()
    await cluster.until(lambda: not cluster.router.cluster.can_serve)
    async with grpc.aio.insecure_channel(cluster.router.grpc_address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        listed = await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=30)
        assert [card.max_model_len for card in listed.models] == [0]
        for call, message in (
            (stub.Tokenize, inference_pb2.TokenizeRequest(text="Hello")),
            (stub.Detokenize, inference_pb2.DetokenizeRequest(token_ids=[5])),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(message, timeout=30)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_tokenize_and_detokenize(stub, tokenizer):
    messages = [inference_pb2.ChatMessage(role="user", content="Hello")]
    told = await stub.Tokenize(inference_pb2.TokenizeRequest(text="Hello you"), timeout=30)
    assert (list(told.token_ids), told.max_model_len) == (tokenizer.encode("Hello you"), 4096)
    chat = inference_pb2.TokenizeRequest(chat=inference_pb2.ChatPrompt(messages=messages))
    rendered = tokenizer.render_chat([{"role": "user", "content": "Hello"}])
    assert list((await stub.Tokenize(chat, timeout=30)).token_ids) == tokenizer.encode(rendered)
    text = (await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=told.token_ids), timeout=30)).text
    assert text == "Hello you"
    for call, bad, param in [
        (stub.Tokenize, inference_pb2.TokenizeRequest(), "prompt"),
        (stub.Detokenize, inference_pb2.DetokenizeRequest(token_ids=[2048]), "token_ids"),
        (stub.Tokenize, inference_pb2.TokenizeRequest(text="a", model="gpt-9"), "model"),
    ]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(bad, timeout=30)
        assert from_rpc_error(caught.value).param == param


async def test_explain_is_that_of_http(stub, cluster):
    route = json.loads((await stub.Explain(request(), timeout=30)).json)
    http = (await cluster.client.post("/v1/route/explain", json={"prompt": "Hello"})).json()
    assert [leg["chosen"] for leg in route["data"][0]["legs"]] == [leg["chosen"] for leg in http["data"][0]["legs"]]
    assert cluster.decode[0].submits == []


@pytest.mark.parametrize(
    ("chat", "param"),
    [
        (inference_pb2.ChatPrompt(), "chat"),
        (inference_pb2.ChatPrompt(messages=[{"role": "x" * 300}]), "chat.messages"),
        (inference_pb2.ChatPrompt(messages=[{"role": "user"}], chat_template_kwargs="[1]"), "chat_template_kwargs"),
    ],
)
async def test_bad_chats_are_refused_by_field(stub, chat, param):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Generate(inference_pb2.GenerateRequest(chat=chat), timeout=30)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert param in from_rpc_error(caught.value).param


async def test_models_and_reflection_and_health(stub, channel, cluster):
    (model,) = (await stub.ListModels(inference_pb2.ListModelsRequest(), timeout=30)).models
    assert (model.name, model.max_model_len) == ("baton-demo", 4096)

    async def one():
        yield reflection_pb2.ServerReflectionRequest(list_services="")

    reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
    (listed,) = [each async for each in reflection.ServerReflectionInfo(one(), timeout=30)]
    names = {service.name for service in listed.list_services_response.service}
    assert {"baton.v1.Inference", "grpc.health.v1.Health"} <= names

    watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
    statuses = aiter(watch)
    while (await anext(statuses)).status != health_pb2.HealthCheckResponse.SERVING:
        pass
    await cluster.decode[0].stop()
    assert (await anext(statuses)).status == health_pb2.HealthCheckResponse.NOT_SERVING
    watch.cancel()

"""The HTTP API as clients use it: the `openai` package, and raw bytes where it hides something."""

from __future__ import annotations

import json

import openai
import pytest
import transformers

from common.demo_model import demo_model_path
from router.testing import FakeDecodePod, FakePrefillPod, fixed_reply


@pytest.fixture
async def spoken(start_cluster, says):
    """A cluster that answers everything with the same sentence."""
    reply = says("Paris is big. 日本 😀 END of it")
    return await start_cluster([FakePrefillPod(reply)], [FakeDecodePod(reply)])


SENTENCE = "Paris is big. 日本 😀 END of it"


def openai_client(cluster):
    return openai.AsyncOpenAI(base_url=f"{cluster.router.http_url}/v1", api_key="none", max_retries=0)


def events_of(response):
    data = [line.removeprefix("data: ") for line in response.text.split("\n") if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(each) for each in data[:-1]]


async def test_completion_whole_and_streamed_agree(spoken):
    async with openai_client(spoken) as client:
        whole = await client.completions.create(model="baton-demo", prompt="Hi", max_tokens=64, temperature=0)
        stream = await client.completions.create(
            model="baton-demo", prompt="Hi", max_tokens=64, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].text == SENTENCE
    assert whole.choices[0].finish_reason == "stop"
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == SENTENCE
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens
    await spoken.until_quiet()


async def test_chat_whole_and_streamed_agree(spoken, tokenizer):
    messages = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]
    async with openai_client(spoken) as client:
        whole = await client.chat.completions.create(model="baton-demo", messages=messages)
        stream = await client.chat.completions.create(model="baton-demo", messages=messages, stream=True)
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].message.content == SENTENCE
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SENTENCE
    rendered = tokenizer.render_chat([{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}])
    submitted = spoken.decode[0].submits[0].request
    assert list(submitted.prompt_token_ids) == tokenizer.encode(rendered, add_special_tokens=False)
    assert submitted.sampling.max_tokens == 4096 - len(submitted.prompt_token_ids)


async def test_no_chunk_has_half_a_character(spoken):
    response = await spoken.post("/v1/completions", prompt="Hi", max_tokens=64, stream=True)
    texts = [event["choices"][0]["text"] for event in events_of(response)]
    assert not any("\ufffd" in text for text in texts)
    assert any("日" in text for text in texts)


@pytest.mark.parametrize("stop", ["END", ["nothing", "END of"], [". ", "big"]])
@pytest.mark.parametrize("stream", [False, True])
async def test_stop_strings_end_the_answer_on_all_pods(spoken, stop, stream):
    response = await spoken.post("/v1/completions", prompt="Hi", max_tokens=64, stop=stop, stream=stream)
    if stream:
        choices = [event["choices"][0] for event in events_of(response)]
    else:
        choices = response.json()["choices"]
    expected = "Paris is " if "big" in stop else "Paris is big. 日本 😀 "
    assert "".join(choice["text"] for choice in choices) == expected
    assert choices[-1]["finish_reason"] == "stop"
    assert spoken.metric("baton_router_request_success_total", finished_reason="stop") == 1
    assert spoken.metric("baton_router_request_errors_total", code="cancelled") == 0
    await spoken.until_quiet()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_choices_say_what_stopped_them_and_which_tokens_they_are(spoken, tokenizer, path):
    body = {
        "/v1/completions": {"prompt": "Hi"},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    }
    body = {**body[path], "max_tokens": 64, "return_token_ids": True}
    big = tokenizer.encode(SENTENCE)[2]
    for changes, stop_reason, text in [
        ({}, None, SENTENCE),  # the model's own end
        ({"stop": ["zzz", " END"]}, " END", SENTENCE.partition(" END")[0]),
        ({"stop": "END", "include_stop_str_in_output": True}, "END", SENTENCE.partition(" of")[0]),
        ({"stop_token_ids": [big]}, big, None),
    ]:
        spoken.decode[0].reply = spoken.prefill[0].reply = fixed_reply(
            [*tokenizer.encode(SENTENCE), tokenizer._backend.token_to_id("<|im_end|>")]
            if stop_reason != big
            else tokenizer.encode(SENTENCE)[:3]
        )
        whole = (await spoken.post(path, **body, **changes)).json()
        (choice,) = whole["choices"]
        assert choice["stop_reason"] == stop_reason
        assert choice["finish_reason"] == "stop"
        said = choice["text"] if "text" in choice else choice["message"]["content"]
        assert text in (None, said)
        prompt_token_ids = whole.get("prompt_token_ids", choice.get("prompt_token_ids"))
        assert prompt_token_ids == list(spoken.decode[0].submits[-1].request.prompt_token_ids)
        events = events_of(await spoken.post(path, **body, **changes, stream=True))
        streamed = [each["choices"][0] for each in events]
        assert [token for each in streamed for token in each.get("token_ids", [])] == choice["token_ids"]
        assert streamed[-1]["stop_reason"] == stop_reason
        assert events[0].get("prompt_token_ids", streamed[0].get("prompt_token_ids")) == prompt_token_ids


async def test_a_chat_goes_on_with_its_last_message(spoken, tokenizer):
    """As of transformers, and the answer is spelled as it follows that text."""
    reference = transformers.AutoTokenizer.from_pretrained(demo_model_path())
    for content in ("The capital", "The capital  "):
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": content}]
        answer = await spoken.post("/v1/chat/completions", messages=messages, continue_final_message=True)
        assert answer.json()["choices"][0]["message"]["content"] == SENTENCE
        expected = reference.apply_chat_template(messages, continue_final_message=True, return_dict=False)
        assert list(spoken.decode[0].submits[-1].request.prompt_token_ids) == expected
        tokens = await spoken.post("/tokenize", messages=messages, continue_final_message=True)
        assert tokens.json()["tokens"] == expected


async def test_stop_strings_do_not_count_before_min_tokens(spoken):
    body = await spoken.complete(prompt="Hi", max_tokens=64, stop="i", min_tokens=6)
    assert len(body["choices"][0]["text"]) > len("Par")
    assert body["usage"]["completion_tokens"] >= 6


async def test_prompts_of_every_form(pair, tokenizer):
    ids = tokenizer.encode("Hello there")
    for prompt, num_choices in [("Hello there", 1), (ids, 1), (["Hello there", "Hi"], 2), ([ids, ids, ids], 3)]:
        body = await pair.complete(prompt=prompt, max_tokens=3)
        assert [choice["index"] for choice in body["choices"]] == list(range(num_choices))
        assert {choice["finish_reason"] for choice in body["choices"]} == {"length"}
    assert all(list(each.request.prompt_token_ids) == ids for each in pair.decode[0].submits[-3:])


async def test_choices_of_several_prompts_without_a_seed_have_seeds_in_a_row(pair):
    await pair.complete(prompt=["a", "b", "c"], max_tokens=2, n=2)
    seeds = {each.request.sampling.seed for each in pair.decode[0].submits}
    assert any(seeds == {(first + index) % 2**64 for index in range(6)} for first in seeds)


async def test_choices_differ_in_seed_and_count_the_prompt_once(pair):
    one = await pair.complete(prompt="Hello", max_tokens=4, seed=2**64 - 1)
    body = await pair.complete(prompt="Hello", max_tokens=4, n=3, seed=2**64 - 1)
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == one["usage"]["prompt_tokens"]
    assert body["usage"]["completion_tokens"] == 12
    assert sorted(each.request.sampling.seed for each in pair.decode[0].submits[1:]) == [0, 1, 2**64 - 1]
    stream = await pair.post(
        "/v1/chat/completions", messages=[{"role": "user", "content": "a"}], max_tokens=4, n=2, stream=True
    )
    by_index = {0: "", 1: ""}
    for event in events_of(stream):
        by_index[event["choices"][0]["index"]] += event["choices"][0]["delta"]["content"]
    assert by_index[0] == by_index[1] != ""


async def test_echo_precedes_the_answer(spoken, tokenizer):
    body = await spoken.complete(prompt="Hi there:", max_tokens=64, echo=True)
    assert body["choices"][0]["text"] == "Hi there:" + SENTENCE
    stream = await spoken.post(
        "/v1/completions", prompt=tokenizer.encode("Hi there:"), max_tokens=64, echo=True, stream=True
    )
    assert "".join(event["choices"][0]["text"] for event in events_of(stream)) == "Hi there:" + SENTENCE


async def test_logprobs_of_completions(pair, tokenizer):
    body = await pair.complete(prompt="Hello", max_tokens=3, logprobs=2)
    choice, ids = body["choices"][0], list(pair.decode[0].reply(pair.decode[0].submits[0].request))
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == [tokenizer.token_text(token_id) for token_id in ids]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert all(-0.5 in top.values() and len(top) <= 3 for top in logprobs["top_logprobs"])
    assert logprobs["text_offset"][0] == 0
    assert [len(values) for values in logprobs.values()] == [3] * 4
    streamed = events_of(await pair.post("/v1/completions", prompt="Hello", max_tokens=3, logprobs=2, stream=True))
    assert [token for event in streamed for token in event["choices"][0]["logprobs"]["tokens"]] == logprobs["tokens"]


async def test_logprobs_of_chat(pair, tokenizer):
    messages = [{"role": "user", "content": "Hello"}]
    async with openai_client(pair) as client:
        answer = await client.chat.completions.create(
            model="baton-demo", messages=messages, max_tokens=3, logprobs=True, top_logprobs=2
        )
        plain = await client.chat.completions.create(model="baton-demo", messages=messages, max_tokens=3, logprobs=True)
    content = answer.choices[0].logprobs.content
    assert [bytes(each.bytes).decode("utf-8", "replace") for each in content] == [each.token for each in content]
    assert all(each.logprob == -0.5 and len(each.top_logprobs) == 2 for each in content)
    assert all(each.top_logprobs == [] for each in plain.choices[0].logprobs.content)


async def test_extensions_reach_the_pod(pair):
    await pair.complete(
        prompt="Hello", max_tokens=5, temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=0.2, frequency_penalty=-0.2, min_tokens=2, stop_token_ids=[7], ignore_eos=True, seed=5,
        priority=-3, cache_salt="tenant", user="somebody", logit_bias={},
    )  # fmt: skip
    for request in (pair.decode[0].submits[0].request, pair.prefill[0].prefills[0].request):
        sampling = request.sampling
        assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.1)
        assert (sampling.max_tokens, sampling.min_tokens, list(sampling.stop_token_ids)) == (5, 2, [7])
        assert (sampling.ignore_eos, sampling.seed, sampling.repetition_penalty) == (True, 5, 1.1)
        assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, -0.2)
        assert (request.priority, request.cache_salt) == (-3, "tenant")


async def test_cached_tokens_are_reported(pair):
    pair.prefill[0].num_cached_tokens = pair.decode[0].num_cached_tokens = 2
    body = await pair.complete(prompt="Hello there you", max_tokens=2)
    assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 2


async def test_default_limits(pair):
    await pair.complete(prompt="Hello")
    assert pair.decode[0].submits[-1].request.sampling.max_tokens == 16
    await pair.complete(prompt=[5] * 4090)
    assert pair.decode[0].submits[-1].request.sampling.max_tokens == 6
    await pair.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], max_completion_tokens=9)
    assert pair.decode[0].submits[-1].request.sampling.max_tokens == 9


async def test_status_pages(pair):
    async with openai_client(pair) as client:
        models = await client.models.list()
        assert [model.id for model in models.data] == ["baton-demo"]
        assert (await client.models.retrieve("baton-demo")).max_model_len == 4096
    await pair.complete(prompt="Hello", max_tokens=4)
    metrics = (await pair.client.get("/metrics")).text
    model = 'model_name="baton-demo"'
    assert f'baton_router_request_success_total{{finished_reason="length",{model}}} 1.0' in metrics
    assert f"baton_router_time_to_first_token_seconds_count{{{model}}} 1.0" in metrics
    assert f"baton_router_inter_token_latency_seconds_count{{{model}}} 3.0" in metrics
    assert f"baton_router_generation_tokens_total{{{model}}} 4.0" in metrics
    assert f'baton_router_dispatch_total{{{model},prefill="remote",reason="planned"}} 1.0' in metrics
    version = (await pair.client.get("/version")).json()
    assert version["version"]
    assert pair.router.grpc_address == f"127.0.0.1:{version['grpc_port']}"
    assert (await pair.client.get("/health")).json()["status"] == "ok"
    paths = (await pair.client.get("/openapi.json")).json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions"} <= set(paths)


async def test_beam_search_takes_fields_that_ask_for_nothing(start_cluster):
    cluster = await start_cluster()
    idle = {"response_format": {"type": "text"}, "structured_outputs": None}
    for path, fields in (
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "tools": []}),
    ):
        response = await cluster.post(path, **fields, **idle, use_beam_search=True, max_tokens=1)
        assert response.status_code == 200, response.text

"""Biases and masks choose the tokens that `transformers` chooses, on whatever pod, from the first token on."""

from __future__ import annotations

import grpc
import httpx
import pytest
import torch

from common.engine.llm import LLM
from common.errors import BatonError
from common.pb import inference_pb2
from common.rpc.errors import from_rpc_error
from common.types import SamplingParams
from tests.integration.cluster import DEADLINE_S, Cluster, Stream, running_cluster
from tests.tiny_models import prompt_of, reference_generate, reference_model, tiny_model_dir

MODEL = "llama"
MAX_TOKENS = 10
PROMPT = prompt_of(21)


def reference(*, every: bool = False, **how: object) -> list:
    prompt = torch.tensor([PROMPT])
    with torch.inference_mode():
        output = reference_model(tiny_model_dir(MODEL)).generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=MAX_TOKENS, do_sample=False, pad_token_id=0,
            **how,
        )  # fmt: skip
    if every:  # without the padding
        return [[token for token in row if token] for row in output[:, len(PROMPT) :].tolist()]
    return output[0, len(PROMPT) :].tolist()


def rules() -> list[tuple[dict[str, object], list[int]]]:
    """Parameters, and the tokens that follow from them. Each changes the first token."""
    plain = reference_generate(tiny_model_dir(MODEL), PROMPT, MAX_TOKENS)
    without_first = reference(bad_words_ids=[[plain[0]]])
    allowed = sorted({(plain[0] + 1 + 7 * step) % 250 for step in range(20)} - {plain[0]})
    phrase = without_first[2:4]
    biases = dict.fromkeys(allowed, 1.5) | {plain[0]: -2.0}
    return [
        ({"bad_word_token_ids": ((plain[0],),)}, without_first),
        (
            {"bad_word_token_ids": ((plain[0],), tuple(phrase))},
            reference(bad_words_ids=[[plain[0]], phrase]),
        ),
        ({"allowed_token_ids": tuple(allowed)}, reference(prefix_allowed_tokens_fn=lambda *_: allowed)),
        (
            {"logit_bias": biases},
            reference(sequence_bias=[[[token_id], bias] for token_id, bias in biases.items()]),
        ),
    ]


def test_offline():
    with LLM(tiny_model_dir(MODEL), block_size=4, num_blocks=64, num_threads=1) as llm:
        for given, expected in rules():
            params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, **given)
            assert llm.generate([PROMPT], params, use_tqdm=False)[0].token_ids == expected
        expected = reference(num_beams=4, num_return_sequences=4, every=True)
        (beams,) = llm.beam_search([PROMPT], 4, MAX_TOKENS)
        assert [beam.token_ids for beam in beams] == expected
        nothing_left = SamplingParams(allowed_token_ids=(5,), bad_word_token_ids=((5, 5),))
        with pytest.raises(BatonError, match="leave no token"):
            llm.generate([PROMPT], nothing_left, use_tqdm=False)


async def test_through_a_prefill_pod(tmp_path):
    """A text's bytes are its tokens there, so that a bad word is known by its bytes."""
    async with running_cluster(tmp_path, MODEL) as cluster:
        for given, expected in rules()[2:]:
            answer = await cluster.generate(PROMPT, max_tokens=MAX_TOKENS, **given)
            assert list(answer.choices[0].token_ids) == expected
        tokenizer = cluster.router.service.model(None).tokenizer
        allowed = tokenizer.encode("abcd")
        spelled = {"allowed_token_ids": allowed, "max_tokens": MAX_TOKENS}
        prompt = tokenizer.encode("Some text ")
        plain = (await cluster.generate(prompt, **spelled)).choices[0].text
        without = (await cluster.generate(prompt, bad_words=[plain[0]], **spelled)).choices[0].text
        assert plain[0] not in without
        answer = await cluster.generate(prompt, stop=[plain[1:3]], include_stop_str_in_output=True, **spelled)
        (stopped,) = answer.choices
        end = plain.index(plain[1:3]) + 2
        assert (stopped.text, stopped.stop_text) == (plain[:end], plain[1:3])
        answer = await cluster.generate(prompt, stop_token_ids=tokenizer.encode(plain[0]), **spelled)
        (by_token,) = answer.choices
        assert (by_token.text, by_token.stop_token_id) == ("", tokenizer.encode(plain[0])[0])
        cut = await cluster.generate(PROMPT, truncate_prompt_tokens=7, max_tokens=MAX_TOKENS)
        assert list(cut.choices[0].token_ids) == reference_generate(tiny_model_dir(MODEL), PROMPT[-7:], MAX_TOKENS)
        assert cut.usage.prompt_tokens == 7
        await check_beams(cluster)
        await check_best_of(cluster)
        with pytest.raises(grpc.aio.AioRpcError, match="the pods have no logits processors"):
            await cluster.generate(PROMPT, vllm_xargs={"a": "1"})
        with pytest.raises(grpc.aio.AioRpcError, match="must be JSON"):
            await cluster.generate(PROMPT, vllm_xargs={"a": "b"})


async def test_a_budget_of_reasoning_holds_through_handoff_migration_and_preemption(tmp_path):
    opening, closing = 254, 255
    options = {"temperature": 1.0, "seed": 3, "max_tokens": 120, "allowed_token_ids": list(range(250))}
    prompts = [[*prompt_of(24, seed=seed), opening] for seed in range(3)]
    # No two fit the blocks of a decode pod at their full length.
    async with running_cluster(
        tmp_path, MODEL, num_decode=2, decode_blocks=30, chat_template="</think>", added_tokens=["<think>", "</think>"]
    ) as cluster:
        free = await cluster.tokens(prompts, **options)
        assert all(len(tokens) == 120 and closing not in tokens for tokens in free)
        (at_once,) = await cluster.tokens(prompts[:1], thinking_token_budget=0, **options)
        assert (at_once[0], closing in at_once[1:]) == (closing, False)
        streams = [Stream(cluster, prompt, {**options, "thinking_token_budget": 60}) for prompt in prompts]
        for stream in streams:
            await stream.reach(20)
        await cluster.decode.pop().stop()
        for stream, without in zip(streams, free, strict=True):
            await stream.reading
            assert stream.tokens[:61] == [*without[:60], closing]
            assert (len(stream.tokens), stream.tokens.count(closing)) == (120, 1)
        preempted = sum(
            sample.value
            for metric in cluster.decode[0].context.metrics.registry.collect()
            for sample in metric.samples
            if sample.name == "baton_pod_num_preemptions_total"
        )
        assert preempted


async def check_best_of(cluster: Cluster):
    """The best of the answers that `n` alone returns, over both protocols."""
    sampled = {"max_tokens": MAX_TOKENS, "temperature": 1.3, "seed": 5}
    message = inference_pb2.GenerateRequest(
        tokens=inference_pb2.TokenPrompt(token_ids=PROMPT), n=5,
        options=inference_pb2.GenerateOptions(**sampled, num_logprobs=0),
    )  # fmt: skip
    every = (await cluster.answer(message)).choices
    ranked = sorted(every, key=lambda choice: -sum(each.sampled for each in choice.logprobs))
    expected = [list(choice.token_ids) for choice in ranked[:2]]
    assert expected != [list(choice.token_ids) for choice in every[:2]]
    message.n, message.best_of = 2, 5
    message.options.ClearField("num_logprobs")
    answer = await cluster.answer(message)
    assert [(list(each.token_ids), each.index, len(each.logprobs)) for each in answer.choices] == [
        (expected[0], 0, 0), (expected[1], 1, 0),
    ]  # fmt: skip
    assert answer.usage.completion_tokens == 5 * MAX_TOKENS
    body = {"prompt": [PROMPT, PROMPT[:-1]], "n": 2, "best_of": 5, "return_token_ids": True, **sampled}
    async with httpx.AsyncClient(base_url=cluster.router.http_url, timeout=DEADLINE_S) as client:
        answer = (await client.post("/v1/completions", json=body)).json()
        assert [choice["token_ids"] for choice in answer["choices"][:2]] == expected
        assert [(choice["index"], choice["logprobs"]) for choice in answer["choices"]] == [(i, None) for i in range(4)]
        assert answer["usage"]["completion_tokens"] == 2 * 5 * MAX_TOKENS


async def check_beams(cluster: Cluster):
    ending = [7, 40, 90]
    beams = {"num_beams": 4, "length_penalty": 1.5, "early_stopping": True}
    expected = reference(**beams, num_return_sequences=3, eos_token_id=ending, every=True)
    body = {
        "prompt": PROMPT, "max_tokens": MAX_TOKENS, "n": 3, "best_of": 4, "stop_token_ids": ending,
        "use_beam_search": True, "length_penalty": 1.5, "early_stopping": True, "return_token_ids": True,
    }  # fmt: skip
    async with httpx.AsyncClient(base_url=cluster.router.http_url, timeout=DEADLINE_S) as client:
        answer = (await client.post("/v1/completions", json=body)).json()
        assert [choice["token_ids"] for choice in answer["choices"]] == expected
        message = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenPrompt(token_ids=PROMPT), n=3, best_of=4,
            use_beam_search=True, length_penalty=1.5, early_stopping=inference_pb2.EARLY_STOPPING_ALWAYS,
            options=inference_pb2.GenerateOptions(max_tokens=MAX_TOKENS, stop_token_ids=ending),
        )  # fmt: skip
        found = await cluster.answer(message)
        assert [list(choice.token_ids) for choice in found.choices] == expected
        assert [choice.text for choice in found.choices] == [choice["text"] for choice in answer["choices"]]
        stops = [choice.stop_token_id if choice.HasField("stop_token_id") else None for choice in found.choices]
        assert stops == [choice["stop_reason"] for choice in answer["choices"]]
        assert found.usage.completion_tokens == answer["usage"]["completion_tokens"]
        for bad, param in [
            ({"best_of": 17}, "best_of"),
            ({"length_penalty": 11}, "length_penalty"),
            ({"early_stopping": 7}, "early_stopping"),
            ({"options": {"num_logprobs": 0}}, "num_logprobs"),
            ({"options": {"structured_outputs": {}}}, "structured_outputs"),
            ({"resumable": True}, "resumable"),
            ({"use_beam_search": False}, "length_penalty"),
        ]:
            changed = inference_pb2.GenerateRequest()
            changed.CopyFrom(message)
            changed.MergeFrom(inference_pb2.GenerateRequest(**bad))
            if not bad.get("use_beam_search", True):
                changed.use_beam_search = False
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await cluster.answer(changed)
            assert from_rpc_error(caught.value).param == param
        for refused in (
            {"stream": True},
            {"logprobs": 0},
            {"thinking_token_budget": 0},
            {"best_of": 17},
            {"best_of": 2},
            {"length_penalty": 11},
        ):
            response = await client.post("/v1/completions", json={**body, **refused})
            assert (response.status_code, response.json()["error"]["param"]) == (400, next(iter(refused)))

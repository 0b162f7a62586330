"""Log probabilities of prompts are those of `transformers`, whatever pod computes the prompt."""

from __future__ import annotations

import httpx
import pytest

from common.engine.llm import LLM
from common.types import SamplingParams
from tests.integration.cluster import CHUNK, DEADLINE_S, Cluster, running_cluster
from tests.tiny_models import prompt_of, reference_generate, reference_logprobs, tiny_model_dir

MODEL = "llama"
PROMPTS = [prompt_of(length) for length in (1, 2, 8, 9, CHUNK + 1, 3 * CHUNK + 5)]
TOLERANCE = 1e-4


def assert_those_of_transformers(prompt, entries, num_top):
    """`entries`: of each token but the first, token's own log probability, rank and the most likely ones."""
    assert len(entries) == len(prompt) - 1
    expected = reference_logprobs(tiny_model_dir(MODEL), prompt)
    for position, entry in enumerate(entries):
        own = expected[position, prompt[position + 1]]
        assert entry.sampled == pytest.approx(float(own), abs=TOLERANCE)
        best, worst = (int((expected[position] > own + margin).sum()) + 1 for margin in (TOLERANCE, -TOLERANCE))
        assert best <= entry.rank <= worst
        best = expected[position].topk(num_top)
        top = [(each.token_id, each.logprob) if hasattr(each, "token_id") else each for each in entry.top]
        assert [token_id for token_id, _ in top] == best.indices.tolist()
        assert [value for _, value in top] == pytest.approx(best.values.tolist(), abs=TOLERANCE)


async def check(cluster: Cluster, **options):
    for prompt in [*PROMPTS, *PROMPTS]:  # the second time their blocks are cached
        answer = await cluster.generate(prompt, prompt_logprobs=3, max_tokens=5, **options)
        assert_those_of_transformers(prompt, answer.choices[0].prompt_logprobs, 3)
        assert list(answer.choices[0].token_ids) == reference_generate(tiny_model_dir(MODEL), prompt, 5)
        only = await cluster.generate(prompt, prompt_logprobs=0, max_tokens=0)
        assert_those_of_transformers(prompt, only.choices[0].prompt_logprobs, 0)
        assert not only.choices[0].token_ids
        assert only.usage.completion_tokens == 0


@pytest.mark.parametrize("connector", ["shared-storage", "nixl"])
async def test_they_come_from_the_prefill_pod(tmp_path, connector):
    async with running_cluster(tmp_path, MODEL, connector=connector) as cluster:
        await check(cluster)
        assert cluster.recomputed() == 0
        await check_echo(cluster)


async def test_they_come_from_a_decode_pod_that_computes_prompts_itself(tmp_path):
    async with running_cluster(tmp_path, MODEL, num_prefill=0) as cluster:
        await check(cluster)


async def check_echo(cluster: Cluster):
    """Over HTTP, as OpenAI and vLLM have them. A token is a byte, so texts and tokens are as long."""
    text = "Hello"
    async with httpx.AsyncClient(base_url=cluster.router.http_url, timeout=DEADLINE_S) as client:
        body = {"prompt": text, "echo": True, "logprobs": 2, "temperature": 0, "prompt_logprobs": 1}
        answer = (await client.post("/v1/completions", json={**body, "max_tokens": 2, "return_token_ids": True})).json()
        (choice,) = answer["choices"]
        prompt = choice["prompt_token_ids"]
        token_ids = [*prompt, *choice["token_ids"]]
        expected = reference_logprobs(tiny_model_dir(MODEL), token_ids)
        own = [float(expected[index - 1, token_id]) for index, token_id in enumerate(token_ids) if index]
        logprobs = choice["logprobs"]
        assert logprobs["token_logprobs"][0] is None
        assert logprobs["top_logprobs"][0] is None
        assert logprobs["token_logprobs"][1:] == pytest.approx(own, abs=TOLERANCE)
        assert logprobs["text_offset"][:5] == [0, 1, 2, 3, 4]
        assert "".join(logprobs["tokens"][:5]) == text
        assert len({len(values) for values in logprobs.values()}) == 1
        assert choice["prompt_logprobs"][0] is None
        for position, (token_id, entry) in enumerate(zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)):
            assert entry[str(token_id)]["logprob"] == pytest.approx(own[position], abs=TOLERANCE)
            assert {each["rank"] for each in entry.values()} >= {1}
        del body["prompt_logprobs"]
        nothing = (await client.post("/v1/completions", json={**body, "max_tokens": 0})).json()
        assert nothing["choices"][0]["text"] == text
        assert nothing["choices"][0]["logprobs"]["token_logprobs"] == logprobs["token_logprobs"][:5]
        assert nothing["usage"]["completion_tokens"] == 0
        streamed = await client.post("/v1/completions", json={**body, "max_tokens": 2, "stream": True})
        assert streamed.text.count('"finish_reason":"length"') == 1
        assert '"text":"Hello"' in streamed.text
        assert streamed.text.index('"token_logprobs":[null,') > 0


def test_prompts_that_are_preempted_half_way_are_reported_once():
    """While the first answer grows, the second prompt is computed in chunks of 10 tokens, and loses its blocks."""
    prompts = [prompt_of(37), prompt_of(80)]
    params = SamplingParams(temperature=0.0, max_tokens=40, prompt_logprobs=2)
    with LLM(tiny_model_dir(MODEL), block_size=4, num_blocks=32, max_num_batched_tokens=10, num_threads=1) as llm:
        for completions in (llm.generate(prompts, params, use_tqdm=False) for _ in range(2)):
            for prompt, completion in zip(prompts, completions, strict=True):
                assert completion.prompt_logprobs[0] is None
                assert_those_of_transformers(prompt, completion.prompt_logprobs[1:], 2)
                assert completion.token_ids == reference_generate(tiny_model_dir(MODEL), prompt, 40)
        assert llm._client.stats().num_preemptions >= 2
        again = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=1), use_tqdm=False)
        assert any(completion.num_cached_tokens for completion in again)  # these are written to the cache all the same

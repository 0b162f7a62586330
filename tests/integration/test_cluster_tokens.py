"""Through router, prefill pod, connector and decode pod the tokens are those of `transformers.generate`."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from tests.integration.cluster import BLOCK_SIZE, CHUNK, running_cluster
from tests.redis_server import running_redis
from tests.tiny_models import prompt_of, reference_generate, tiny_model_dir

MAX_TOKENS = 12
LENGTHS = (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1, CHUNK, CHUNK + 1, 3 * CHUNK + 5)
ARCHITECTURES = (
    *("llama", "gemma3", "gpt2", "deepseek_v3"),
    *(pytest.param(name, marks=pytest.mark.slow) for name in ("qwen3", "mistral", "gemma2", "phi3", "opt", "mixtral")),
)


def reference(model: str, prompts: list[list[int]], max_tokens: int = MAX_TOKENS) -> list[list[int]]:
    return [reference_generate(tiny_model_dir(model), prompt, max_tokens) for prompt in prompts]


@pytest.mark.parametrize("model", ARCHITECTURES)
async def test_greedy_tokens_equal_generate(tmp_path, model):
    prompts = [prompt_of(length) for length in LENGTHS]
    expected = reference(model, prompts)
    async with running_cluster(tmp_path, model) as cluster:
        alone = [(await cluster.tokens([prompt], max_tokens=MAX_TOKENS))[0] for prompt in prompts]
        hitting_the_prefix_cache = await cluster.tokens(prompts, max_tokens=MAX_TOKENS)
        assert alone == expected
        assert hitting_the_prefix_cache == expected
        assert cluster.recomputed() == 0


async def test_tokens_of_two_by_two_pods_in_a_batch_without_prefix_caching(tmp_path):
    prompts = [prompt_of(length, seed=seed) for seed in range(3) for length in LENGTHS]
    async with running_cluster(tmp_path, "llama", num_prefill=2, num_decode=2, prefix_caching=False) as cluster:
        assert await cluster.tokens(prompts, max_tokens=MAX_TOKENS) == reference("llama", prompts)
        assert cluster.recomputed() == 0
        assert all(pod.context.stats.latest.num_generation_tokens for pod in (*cluster.prefill, *cluster.decode))


@pytest.mark.parametrize(
    ("connector", "target_itl_ms", "budget"),
    [("shared-storage", 0.001, 64), ("redis", 5.0, 64), ("nixl", None, 7)],
)
async def test_tokens_do_not_depend_on_how_much_of_prompts_a_step_takes(tmp_path, connector, target_itl_ms, budget):
    """Requests that go to prefill pods and to the decode pod alike, so that prompts run beside streams."""
    prompts = [prompt_of(length, seed=seed) for seed in range(3) for length in LENGTHS]
    expected = reference("llama", prompts)
    with running_redis() if connector == "redis" else nullcontext() as redis:
        options = {"url": redis.url, "lookup_timeout_s": "60"} if redis is not None else {}
        async with running_cluster(
            tmp_path,
            "llama",
            connector=connector,
            connector_options=options,
            target_itl_ms=target_itl_ms,
            max_num_batched_tokens=budget,
        ) as cluster:
            assert await cluster.tokens(prompts, max_tokens=MAX_TOKENS) == expected
            assert cluster.recomputed() == 0
        async with running_cluster(
            tmp_path / "colocated", "llama", num_prefill=0, target_itl_ms=target_itl_ms, max_num_batched_tokens=budget
        ) as cluster:
            assert await cluster.tokens(prompts, max_tokens=MAX_TOKENS) == expected


async def test_tokens_survive_forced_preemption(tmp_path):
    prompts = [prompt_of(3 * BLOCK_SIZE, seed=seed) for seed in range(6)]
    num_tokens = 12 * BLOCK_SIZE  # no two requests fit the 17 blocks at their full length
    async with running_cluster(tmp_path, "llama", decode_blocks=18) as cluster:
        assert await cluster.tokens(prompts, max_tokens=num_tokens) == reference("llama", prompts, num_tokens)
        assert cluster.decode[0].context.stats.latest.num_preemptions > 0


async def test_seeded_sampling_is_the_same_alone_batched_and_colocated(tmp_path):
    prompts = [prompt_of(length) for length in LENGTHS]
    sampling = {"temperature": 1.3, "top_p": 0.9, "top_k": 40, "seed": 7, "max_tokens": MAX_TOKENS}
    async with running_cluster(tmp_path / "split", "qwen3") as cluster:
        alone = [(await cluster.tokens([prompt], **sampling))[0] for prompt in prompts]
        batched = await cluster.tokens(prompts, **sampling)
        other_seed = await cluster.tokens(prompts, **{**sampling, "seed": 8})
    async with running_cluster(tmp_path / "colocated", "qwen3", num_prefill=0) as cluster:
        colocated = await cluster.tokens(prompts, **sampling)
    assert alone == batched == colocated
    assert other_seed != alone


async def test_salts_separate_the_caches_and_not_the_tokens(tmp_path):
    prompt = prompt_of(2 * CHUNK)
    async with running_cluster(tmp_path, "llama") as cluster:
        answers = [
            await cluster.generate(prompt, cache_salt=salt, max_tokens=MAX_TOKENS) for salt in ("alice", "alice", "bob")
        ]
    assert len({tuple(answer.choices[0].token_ids) for answer in answers}) == 1
    assert [answer.usage.cached_tokens > 0 for answer in answers] == [False, True, False]

"""Pods of several engines in a cluster: each engine has requests, and blocks, of its own."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from tests.integration.cluster import BLOCK_SIZE, running_cluster
from tests.pods import wait_for
from tests.redis_server import running_redis
from tests.tiny_models import prompt_of, reference_generate, tiny_model_dir

MAX_TOKENS = 8
PROMPTS = [prompt_of(length, seed=length) for length in (1, BLOCK_SIZE, 3 * BLOCK_SIZE + 1, 40, 55, 70)]


def expected() -> list[list[int]]:
    return [reference_generate(tiny_model_dir("llama"), prompt, MAX_TOKENS) for prompt in PROMPTS]


@pytest.mark.cell(
    feature="handoff between engines of pods",
    connector="{connector}",
    degrees="{prefill_engines} to {decode_engines} engines",
)
@pytest.mark.parametrize(
    ("connector", "prefill_engines", "decode_engines"),
    [("shared-storage", 2, 2), ("redis", 1, 2), ("nixl", 2, 1), ("nixl", 2, 2)],
)
async def test_handoffs_between_engines(tmp_path, connector, prefill_engines, decode_engines):
    with running_redis() if connector == "redis" else nullcontext() as redis:
        options = {"url": redis.url, "lookup_timeout_s": "60"} if redis is not None else {}
        async with running_cluster(
            tmp_path,
            "llama",
            connector=connector,
            connector_options=options,
            prefill_engines=prefill_engines,
            decode_engines=decode_engines,
        ) as cluster:
            assert await cluster.tokens(PROMPTS, max_tokens=MAX_TOKENS) == expected()
            assert cluster.recomputed() == 0
            for pod in (cluster.prefill[0], cluster.decode[0]):
                assert all(stats.num_generation_tokens for stats in pod.context.stats.by_engine)


async def test_a_prompt_goes_to_the_engine_that_has_its_blocks(tmp_path):
    prompt = prompt_of(9 * BLOCK_SIZE)
    async with running_cluster(tmp_path, "llama", num_prefill=0, decode_engines=2, decode_policy="kv_aware") as cluster:
        pod, seen = cluster.decode[0].context, cluster.router.cluster.decode_pods[0]
        await cluster.tokens([prompt], max_tokens=1)
        [first] = [rank for rank, stats in enumerate(pod.stats.by_engine) if stats.num_prompt_tokens]
        index = cluster.router.cluster.index
        await wait_for(lambda: len(index._holders[seen.engines[first].slot].held) == 9)
        assert not index._holders[seen.engines[1 - first].slot].held
        for _ in range(3):
            await cluster.tokens([prompt], max_tokens=1)
        assert pod.stats.by_engine[first].prefix_cache_hits == 3 * 8 * BLOCK_SIZE
        assert pod.stats.by_engine[1 - first].num_prompt_tokens == 0
        text = {
            (sample.name, sample.labels.get("engine")): sample.value
            for metric in pod.metrics.registry.collect()
            for sample in metric.samples
        }
        assert text["baton_pod_prefix_cache_hits_total", str(first)] == 3 * 8 * BLOCK_SIZE
        assert text["baton_pod_prefix_cache_hits_total", str(1 - first)] == 0

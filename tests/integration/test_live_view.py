"""What a router's prefix index says of real pods is what their block pools hold, whatever happened to them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx
import msgspec
import pytest

from common.engine.config import CacheConfig
from common.pb import inference_pb2, inference_pb2_grpc, pods_pb2, pods_pb2_grpc
from common.pod import cache_view
from common.pod.runtime import PodRuntime
from common.rpc.channel import open_channel
from router.config import RouterConfig
from router.placing.config import RoutingConfig
from router.placing.index import PrefixIndex
from router.pods.pod import Pod
from router.pods.stats import follow_stats
from router.runtime import Router
from router.serving.config import ServingConfig
from tests.integration.cluster import BLOCK_SIZE, DEADLINE_S, Cluster, running_cluster
from tests.pods import FakeRouter, RunningPod, decode_pod, engine_request, wait_for
from tests.tiny_models import prompt_of, reference_generate, tiny_model_dir

MAX_TOKENS = 4
PREFER = ServingConfig(routing=RoutingConfig(remote_prefill="prefer"))


def cached_blocks(pod: PodRuntime) -> set[bytes]:
    """What the engine's block pool finds."""
    return set(pod.context.engine._engine._core._scheduler._kv._pool._cached)  # type: ignore[attr-defined]


def indexed_blocks(index: PrefixIndex, pod: Pod) -> set[bytes]:
    return set() if pod.engines[0].slot is None else set(index._holders[pod.engines[0].slot].held)


async def wait_index_is_right(router: Router, *pods: PodRuntime) -> None:
    index, views = router.cluster.index, router.cluster.by_address

    def is_right() -> bool:
        return all(
            views[pod.address].engines[0].is_fed and indexed_blocks(index, views[pod.address]) == cached_blocks(pod)
            for pod in pods
        )

    await wait_for(is_right)
    assert index.check_integrity() == []


async def complete(router: Router, prompt: Sequence[int]) -> list[int]:
    async with open_channel(router.grpc_address) as channel:
        request = inference_pb2.GenerateRequest(
            tokens=inference_pb2.TokenPrompt(token_ids=prompt),
            options=inference_pb2.GenerateOptions(temperature=0.0, max_tokens=MAX_TOKENS),
        )
        answer = await inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=DEADLINE_S)
        return list(answer.choices[0].token_ids)


@asynccontextmanager
async def another_router(cluster: Cluster, **settings: object) -> AsyncIterator[Router]:
    config = msgspec.structs.replace(cluster.router.config, port=0, grpc_port=0, **settings)
    async with Router(config).running() as router:
        await wait_for(lambda: all(pod.engines[0].is_fed for pod in router.cluster.pods))
        yield router


async def test_the_index_is_what_pods_hold_after_evictions_preemptions_and_a_reset(tmp_path):
    async with running_cluster(tmp_path, "llama", prefill_blocks=20, decode_blocks=20) as cluster:
        pods = (*cluster.prefill, *cluster.decode)
        num_rounds = 0
        # On a busy machine requests may come one by one, and preempt none.
        while num_rounds < 4 or not cluster.decode[0].context.stats.latest.num_preemptions:
            await cluster.tokens([prompt_of(30 + 9 * n, seed=4 * num_rounds + n) for n in range(4)], max_tokens=20)
            await wait_index_is_right(cluster.router, *pods)
            num_rounds += 1
        assert all(cached_blocks(pod) for pod in pods)
        assert cluster.router.cluster.index.num_gaps == 0
        for pod in pods:
            await pod.context.engine.reset_prefix_cache()
        await wait_index_is_right(cluster.router, *pods)
        assert cluster.router.cluster.index.size.num_holdings == 0


async def test_a_router_that_comes_later_gets_snapshots_and_cut_ones_are_put_together(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_view, "HASHES_PER_EVENT", 3)
    async with running_cluster(tmp_path, "llama") as cluster:
        await cluster.tokens([prompt_of(100, seed=seed) for seed in range(3)], max_tokens=20)
        pods = (*cluster.prefill, *cluster.decode)
        async with another_router(cluster) as later:
            await wait_index_is_right(later, *pods)
            assert len(cached_blocks(pods[0])) > 30
            await cluster.tokens([prompt_of(100, seed=9)])
            await wait_index_is_right(later, *pods)


async def test_two_routers_answer_correctly_and_each_knows_what_the_other_caused(tmp_path):
    prompts = [prompt_of(60, seed=seed) for seed in range(6)]
    expected = [reference_generate(tiny_model_dir("llama"), prompt, MAX_TOKENS) for prompt in prompts]
    async with running_cluster(tmp_path, "llama", num_prefill=2, num_decode=2) as cluster:
        async with another_router(cluster, serving=PREFER) as other:
            for number, prompt in enumerate(prompts):
                sender, observer = (cluster.router, other) if number % 2 else (other, cluster.router)
                assert await complete(sender, prompt) == expected[number]
                await wait_index_is_right(observer, *cluster.prefill, *cluster.decode)
                assert sum(await predicted_hits(observer, "prefill", prompt)) == 60 // BLOCK_SIZE * BLOCK_SIZE
                assert await complete(observer, prompt) == expected[number]
            explained = await explain(other, prompts[0])
            (taken,) = (leg for leg in explained["legs"] if leg["taken"] and leg["leg"] == "prefill")
            (chosen,) = (each for each in taken["candidates"] if each["address"] == taken["chosen"])
            assert chosen["cached_tokens"] == 60 // BLOCK_SIZE * BLOCK_SIZE
            at_once = [complete(router, prompt) for prompt in prompts for router in (cluster.router, other)]
            assert await asyncio.gather(*at_once) == [answer for answer in expected for _ in range(2)]
            for router in (cluster.router, other):
                await wait_index_is_right(router, *cluster.prefill, *cluster.decode)
        assert cluster.recomputed() == 0


async def explain(router: Router, prompt: Sequence[int]) -> dict:
    async with httpx.AsyncClient(base_url=router.http_url, timeout=DEADLINE_S) as client:
        response = await client.post("/v1/route/explain", json={"prompt": list(prompt), "max_tokens": MAX_TOKENS})
    assert response.status_code == 200, response.text
    return response.json()["data"][0]


async def predicted_hits(router: Router, leg: str, prompt: Sequence[int]) -> list[int]:
    """Prompt tokens that each pod is taken to have."""
    (taken,) = (each for each in (await explain(router, prompt))["legs"] if each["taken"] and each["leg"] == leg)
    return [candidate["cached_tokens"] for candidate in taken["candidates"]]


SMALL = CacheConfig(block_size=16, num_blocks=20)


async def use(pod: RunningPod, seeds: Sequence[int]) -> None:
    async with FakeRouter(pod) as router:
        for seed in seeds:
            request = engine_request(f"r{seed}", prompt_of(100, seed=seed), max_tokens=3)
            await (await router.submit(request)).wait_finished()


async def test_a_restarted_pod_is_known_by_what_it_holds_now():
    async with decode_pod({}, cache=SMALL) as pod:
        port = pod.runtime.server.port
        config = RouterConfig(port=0, grpc_port=0, decode=[pod.address])
        async with Router(config).running() as router:
            await use(pod, range(5))
            await wait_index_is_right(router, pod.runtime)
            assert router.cluster.index.size.num_holdings > 10
            (seen,) = router.cluster.pods
            assert seen.info is not None
            before = seen.info.incarnation
            await pod.kill()
            await wait_for(lambda: seen.info is None)
            async with decode_pod({}, cache=SMALL, port=port) as successor:
                await wait_for(lambda: seen.info is not None and seen.engines[0].is_fed)
                assert seen.info.incarnation != before
                await wait_index_is_right(router, successor.runtime)
                await use(successor, [7])
                await wait_index_is_right(router, successor.runtime)


@pytest.mark.parametrize("lost", [1, 2, 3])
async def test_after_a_lost_event_the_pod_is_asked_for_a_snapshot(lost):
    """Whichever is lost, the first snapshot included."""
    index = PrefixIndex(1000)
    slot = index.join(SMALL.num_blocks)
    num_heard = 0

    def take(stats: pods_pb2.PodStats) -> bool:
        nonlocal num_heard
        if not stats.HasField("kv_events"):
            return True
        num_heard += 1
        events = stats.kv_events
        if num_heard == lost:
            return True
        return index.apply(slot, events.sequence, events.stored, events.removed, is_snapshot=events.is_snapshot)

    async with decode_pod({}, cache=SMALL) as pod:
        stub = pods_pb2_grpc.PodStub(pod.channel)
        following = asyncio.create_task(follow_stats(stub, take, first_pause_s=0.001))
        for seed in range(4):
            before = num_heard
            await use(pod, [seed])
            await wait_for(lambda before=before: num_heard > before)
        await wait_for(lambda: index._holders[slot].held == cached_blocks(pod.runtime))
        following.cancel()
        with pytest.raises(asyncio.CancelledError):
            await following
    assert index.num_gaps == 1

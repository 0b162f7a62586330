"""What a router makes of the KV events that pods report."""

from __future__ import annotations

from common.pb import pods_pb2
from common.types import hash_prompt, root_hash
from router.pods.pod import PodState
from router.testing import FakeDecodePod
from tests.pods import wait_for

PROMPT = list(range(100, 180))  # five blocks
BLOCKS = hash_prompt(PROMPT, 16, root_hash())


def stats(sequence: int, stored: list[bytes], removed: list[bytes] | None = None, *, is_snapshot: bool = False):
    events = pods_pb2.KVEvents(
        sequence=sequence, is_snapshot=is_snapshot, stored=b"".join(stored), removed=b"".join(removed or [])
    )
    return pods_pb2.PodStats(num_free_blocks=100, num_blocks=100, kv_events=events)


async def cached_tokens(cluster) -> dict[str, int]:
    response = await cluster.post("/v1/route/explain", prompt=PROMPT)
    (route,) = response.json()["data"]
    return {each["address"]: each["cached_tokens"] for leg in route["legs"] for each in leg["candidates"]}


async def until_held(cluster, pod, count: int) -> None:
    index, slot = cluster.router.cluster.index, cluster.router.cluster.by_address[pod.address].engines[0].slot
    await wait_for(lambda: len(index._holders[slot].held) == count)


async def test_reported_blocks_are_predicted_hits_and_removed_ones_are_not(start_cluster):
    holder, other = FakeDecodePod(), FakeDecodePod()
    holder.stats = stats(9, BLOCKS[:2], is_snapshot=True)
    cluster = await start_cluster([], [holder, other])
    await until_held(cluster, holder, 2)
    assert await cached_tokens(cluster) == {holder.address: 32, other.address: 0}
    await holder.set_stats(stats(10, BLOCKS[2:]))
    await until_held(cluster, holder, 5)
    assert await cached_tokens(cluster) == {holder.address: 80, other.address: 0}
    assert cluster.metric("baton_router_prefix_index_blocks", state="remembered") == 5
    await holder.set_stats(stats(11, [], BLOCKS[1:]))
    await until_held(cluster, holder, 1)
    assert await cached_tokens(cluster) == {holder.address: 16, other.address: 0}


async def test_a_gap_is_counted_and_mended_by_a_snapshot(start_cluster):
    pod = FakeDecodePod()
    pod.stats = stats(1, BLOCKS[:2], is_snapshot=True)
    cluster = await start_cluster([], [pod])
    await until_held(cluster, pod, 2)
    await pod.set_stats(stats(3, BLOCKS[3:4]))
    await wait_for(lambda: cluster.metric("baton_router_prefix_index_gaps_total") >= 1)
    assert await cached_tokens(cluster) == {pod.address: 32}, "what is known counts meanwhile"
    await pod.set_stats(stats(4, BLOCKS[:4], is_snapshot=True))
    await until_held(cluster, pod, 4)
    await pod.set_stats(stats(5, [], BLOCKS[3:4]))
    await until_held(cluster, pod, 3)
    assert cluster.router.cluster.can_serve


async def test_a_pod_that_reports_what_cannot_be_is_refused(start_cluster):
    for events, said in (
        (stats(2, [], [b"x" * 16]), "never stored"),
        (stats(2, [b"cut"]), "are cut"),
        (stats(2, [], [b"x" * 16], is_snapshot=True), "a snapshot removes"),
        (stats(2, [number.to_bytes(16) for number in range(101)]), "the cache has 100"),
    ):
        liar, honest = FakeDecodePod(), FakeDecodePod()
        liar.stats = stats(1, [], is_snapshot=True)
        cluster = await start_cluster([], [liar, honest])
        seen = cluster.router.cluster.by_address[liar.address]
        await wait_for(lambda seen=seen: seen.engines[0].is_fed)
        await liar.set_stats(events)
        await cluster.until(lambda seen=seen: seen.state is PodState.REFUSED)
        assert said in seen.detail
        await cluster.complete(prompt="Hello", max_tokens=2)
        assert liar.submits == []


def two_engines(pod: FakeDecodePod) -> FakeDecodePod:
    pod.info.parallel_sizes["data_parallel_size"] = 2
    return pod


async def test_each_engine_of_a_pod_has_its_own_blocks_and_load(start_cluster):
    pod = two_engines(FakeDecodePod())
    first, second = stats(1, [], is_snapshot=True), stats(1, BLOCKS, is_snapshot=True)
    second.data_parallel_rank = 1
    second.num_running = 3
    pod.stats = first
    cluster = await start_cluster([], [pod, FakeDecodePod()], wait=False)
    seen = cluster.router.cluster.by_address[pod.address]
    await wait_for(lambda: seen.engines[0].is_fed)
    assert seen.state is PodState.NOT_SERVING  # the other engine has said nothing yet
    await pod.set_stats(second)
    await cluster.until(lambda: seen.state is PodState.READY)
    assert (await cached_tokens(cluster))[f"{pod.address}#1"] == 80
    assert (await cached_tokens(cluster))[pod.address] == 0
    assert [engine.load.current().num_requests for engine in seen.engines] == [0, 3]
    assert (seen.stats.num_blocks, seen.stats.num_running) == (200, 3)
    await cluster.complete(prompt=PROMPT, max_tokens=2)
    assert [submit.request.data_parallel_rank for submit in pod.submits] == [1]


async def test_a_pod_that_has_not_the_engines_that_it_reports_is_refused(start_cluster):
    liar, honest = FakeDecodePod(), FakeDecodePod()
    cluster = await start_cluster([], [liar, honest])
    await liar.set_stats(pods_pb2.PodStats(num_free_blocks=100, num_blocks=100, data_parallel_rank=1))
    seen = cluster.router.cluster.by_address[liar.address]
    await cluster.until(lambda: seen.state is PodState.REFUSED)
    assert "engine 1" in seen.detail

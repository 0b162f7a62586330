"""What the dispatcher asks the planner, and what it books on the pods that were chosen."""

from __future__ import annotations

import asyncio
import math
import time
from dataclasses import replace

import pytest

from common.errors import UnavailableError
from common.pb import pods_pb2
from common.step_budget import prefill_work
from common.types import HASH_BYTES
from router.placing.planner import Query
from router.pods import load
from router.requests.request import TokenPrompt
from router.requests.terms import Terms
from router.testing import FakeDecodePod, FakePrefillPod
from tests.unit.router.dispatching.test_two_legs import LONG_PROMPT, _draft
from tests.unit.router.router_cluster import until

NUM_BLOCKS = 63  # that the long prompt takes, of which it fills all but the last


async def prepared(cluster, **terms):
    draft = replace(_draft("a"), prompt=TokenPrompt(LONG_PROMPT), terms=Terms(**terms))
    return await cluster.router.service.model("").prepare(draft)


async def test_the_planner_is_asked_with_all_that_a_decision_depends_on(start_cluster, monkeypatch):
    cluster = await start_cluster()
    dispatcher = cluster.router.service.model(None).dispatcher
    (pod,) = cluster.router.cluster.decode_pods
    plain, bound = await prepared(cluster), await prepared(cluster, session="s", itl_slo_s=0.02)
    asked = []
    monkeypatch.setattr(dispatcher.planner, "plan", lambda query, now: asked.append(query))
    with dispatcher.expecting(0.25), pytest.raises(UnavailableError):
        dispatcher.route(bound, None, resumed=True, avoid=pod)
    with pytest.raises(UnavailableError):
        dispatcher.plan(plain)
    common = {
        "num_prompt_tokens": len(LONG_PROMPT),
        "block_hashes": plain.block_hashes,
        "block_size": 16,
        "expected_output_tokens": 8.0,
        "handoff_token_s": dispatcher.estimates.handoff_token_s,
    }
    assert asked == [
        Query(**common, session="s", resumed=True, avoid=pod.address, remote_wait_s=0.25, target_itl_s=0.02),
        Query(**common, target_itl_s=math.inf),
    ]


class Bookings:
    """What the prefix index is told to expect."""

    def __init__(self, cluster, monkeypatch):
        self.made = []
        self.expectations = []
        expect = cluster.router.cluster.index.expect

        def record(slot, block_hashes, num_held, now, lifetime_s, *, arrives):
            assert len(block_hashes) == len(LONG_PROMPT) // 16 * HASH_BYTES
            assert 0 < lifetime_s <= 600
            self.made.append((num_held, arrives))
            expectation = expect(slot, block_hashes, num_held, now, lifetime_s, arrives=arrives)
            self.expectations.append(expectation)
            return expectation

        monkeypatch.setattr(cluster.router.cluster.index, "expect", record)


def load_of(pod):
    load = pod.engines[0].load
    return load.num_requests, load.num_tokens, load.work, load.num_blocks


async def test_a_request_is_booked_on_each_pod_until_that_has_done_its_part(pair, monkeypatch):
    monkeypatch.setattr(load, "_UNFED_SETTLING_S", 300.0)
    bookings, before = Bookings(pair, monkeypatch), time.monotonic()
    pair.prefill[0].may_answer.clear()
    pair.decode[0].allowed = 0
    answer = asyncio.create_task(pair.complete(prompt=LONG_PROMPT, max_tokens=8))
    await pair.prefill[0].until(lambda: pair.prefill[0].prefills)
    (prefill,), (decode,) = pair.router.cluster.prefill_pods, pair.router.cluster.decode_pods
    assert load_of(prefill) == (1, 1000, prefill_work(1000.0, 0.0), NUM_BLOCKS)
    assert load_of(decode) == (1, 0, 0.0, NUM_BLOCKS)
    assert (prefill.engines[0].load.context, decode.engines[0].load.context > 1000) == (0.0, True)
    assert sorted(bookings.made) == [(0, False), (0, True)]  # computed there, and handed over
    pair.prefill[0].may_answer.set()
    await until(lambda: load_of(prefill) == (0, 0, 0.0, 0))
    await until(lambda: load_of(decode) == (1, 0, 0.0, 0))  # the KV is there
    await pair.decode[0].allow(None)
    await answer
    await pair.until_quiet()
    # Half of the time that the request had: pods that say nothing of their blocks are taken to keep them for a while.
    assert all(before + 300 <= each.expires_at <= time.monotonic() + 300 for each in bookings.expectations)


async def test_what_the_pod_holds_of_a_prompt_is_not_booked_again(start_cluster, monkeypatch):
    cluster = await start_cluster()
    bookings = Bookings(cluster, monkeypatch)
    await cluster.complete(prompt=LONG_PROMPT, max_tokens=8)
    cluster.decode[0].allowed = 0
    answer = asyncio.create_task(cluster.complete(prompt=LONG_PROMPT, max_tokens=8))
    await cluster.decode[0].until(lambda: len(cluster.decode[0].submits) == 2)
    (decode,) = cluster.router.cluster.decode_pods
    assert load_of(decode) == (1, 1000, prefill_work(8.0, 992.0), 1)
    assert bookings.made == [(0, False), (NUM_BLOCKS - 1, False)]
    await cluster.decode[0].allow(None)
    await answer


@pytest.mark.parametrize(
    ("num_running", "free_blocks", "num_tokens", "has_room"),
    [(255, 2, 32, True), (256, 2, 32, False), (255, 2, 33, False)],
)
async def test_room_besides_a_pod_is_a_slot_and_blocks_on_another(
    start_cluster, num_running, free_blocks, num_tokens, has_room
):
    cluster = await start_cluster([], [FakeDecodePod(), FakeDecodePod()])
    pod, other = (cluster.router.cluster.by_address[decode.address] for decode in cluster.decode)
    await cluster.decode[1].set_stats(
        pods_pb2.PodStats(num_running=num_running, num_free_blocks=free_blocks, num_blocks=100)
    )
    await until(lambda: other.engines[0].load.current().num_requests == num_running)
    assert cluster.router.service.model(None).dispatcher.has_room_besides(pod, num_tokens) == has_room


@pytest.mark.parametrize(("remote_prefill", "takes_prompts"), [("prefer", False), ("never", True)])
async def test_room_for_prompts_is_that_of_the_pods_that_compute_them(start_cluster, remote_prefill, takes_prompts):
    prefill = FakePrefillPod()
    cluster = await start_cluster([prefill], remote_prefill=remote_prefill)
    await prefill.set_stats(pods_pb2.PodStats(num_queued_tokens=1_000_000, num_waiting=9, num_blocks=100))
    (pod,) = cluster.router.cluster.prefill_pods
    await until(lambda: pod.engines[0].load.current().num_requests == 9)
    room = cluster.router.service.model(None).dispatcher.room()
    assert room.takes_prompts == takes_prompts
    assert room.free == room.capacity > 0

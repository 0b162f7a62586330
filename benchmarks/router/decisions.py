"""How long one routing decision takes, both legs and claims on the index included.

Half of the pods prefill, half decode. Prompts have 4,096 tokens in blocks of 16; all pods hold the first 1,024, three
pods each hold more. Decisions come 100 per second and prompts stay expected for 5 seconds.
"""

from __future__ import annotations

import os
import random
import statistics
import time
import tracemalloc
from typing import NamedTuple

from common.types import HASH_BYTES
from router.placing.index import PrefixIndex
from router.placing.planner import Planner, Query
from router.placing.policies import Load, PodFacts, PodTable

_BLOCK_SIZE = 16
_SHARED_BLOCKS, _OWN_BLOCKS = 64, 192
_NUM_DECISIONS = 1_000


class Times(NamedTuple):
    """The times of one cluster."""

    num_pods: int
    num_blocks: int  # indexed
    p50_us: float
    p99_us: float
    bytes_per_holding: float


def measure(num_pods: int, num_blocks: int) -> Times:
    """Fill an index, then decide."""
    choices = random.Random(1)
    shared = os.urandom(_SHARED_BLOCKS * HASH_BYTES)
    tracemalloc.start()
    index, tables = PrefixIndex(10 * num_blocks), (PodTable(), PodTable())
    sequences = {
        _add_pod(index, tables[number % 2], number, shared, num_blocks // num_pods, choices): 1
        for number in range(num_pods)
    }
    bytes_per_holding = tracemalloc.get_traced_memory()[0] / index.size.num_holdings
    tracemalloc.stop()
    prompts = [shared + os.urandom(_OWN_BLOCKS * HASH_BYTES) for _ in range(_NUM_DECISIONS)]
    for prompt in prompts:
        for slot in choices.sample(list(sequences), min(3, num_pods)):
            sequences[slot] += 1
            end = (_SHARED_BLOCKS + choices.randrange(1, _OWN_BLOCKS)) * HASH_BYTES
            index.apply(slot, sequences[slot], prompt[len(shared) : end], b"")
    planner = Planner(*tables, index, remote_prefill="auto")
    seconds = [_decide(planner, index, prompt, 0.01 * number) for number, prompt in enumerate(prompts)]
    percentiles = statistics.quantiles(seconds, n=100)
    return Times(num_pods, num_blocks, percentiles[49] * 1e6, percentiles[98] * 1e6, bytes_per_holding)


def _add_pod(
    index: PrefixIndex, table: PodTable, number: int, shared: bytes, num_blocks: int, choices: random.Random
) -> int:
    slot = index.join(capacity=10**7)
    index.apply(slot, 1, shared + os.urandom(num_blocks * HASH_BYTES), b"", is_snapshot=True)
    facts = PodFacts(f"10.0.0.{number}:7000", slot, "nixl", 30_000, 256, 2048, 131_072, 0.05, 64)
    load = Load(
        choices.randrange(200),
        choices.randrange(20_000),
        choices.randrange(1_000, 30_000),
        choices.randrange(500_000),
        1.0,
    )
    table.add(facts, load)
    return slot


def _decide(planner: Planner, index: PrefixIndex, prompt: bytes, now: float) -> float:
    query = Query(
        num_prompt_tokens=len(prompt) // HASH_BYTES * _BLOCK_SIZE,
        block_hashes=prompt,
        block_size=_BLOCK_SIZE,
        expected_output_tokens=128.0,
        handoff_token_s=2e-5,
    )
    started = time.perf_counter()
    plan = planner.plan(query, now)
    assert plan is not None
    planner.note(plan)
    for placement in (plan.decode, plan.prefill):
        if placement is not None:
            num_held = int(placement.cached_tokens) // _BLOCK_SIZE
            arrives = placement is plan.decode and plan.prefill is not None
            index.expect(placement.facts.slot, prompt, num_held, now, 5.0, arrives=arrives)
    return time.perf_counter() - started

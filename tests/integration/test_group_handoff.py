"""Handoffs and tiers of a model with a full and a window group, over real connectors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from common.engine.client.inproc import InprocClient
from common.engine.config import CacheConfig, EngineConfig, SchedulerConfig
from common.engine.executor.fake import TWO_GROUPS, FakeExecutor, expected_tokens
from common.types import RequestId, SamplingParams
from kv_store.registry import create_connector
from tests.integration.handoff_rig import BLOCK_SIZE, CHUNK, Handoffs, check_integrity, generate
from tests.tiny_models import prompt_of

GREEDY = SamplingParams(temperature=0.0, max_tokens=40)  # so many that blocks fall out
LENGTHS = (1, BLOCK_SIZE, BLOCK_SIZE + 1, CHUNK, 3 * CHUNK - 1, 3 * CHUNK, 5 * CHUNK + 5)
OpenEngine = Callable[[], InprocClient]


@pytest.fixture(params=["memory", "shared-storage", "nixl", "nixl with a store"])
def open_engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenEngine]:
    """Makes engines on one medium; at the end all must be sound."""
    medium = uuid4().hex
    name, options = {
        "memory": ("memory", {"store": medium, "offload": True}),
        "shared-storage": ("shared-storage", {"path": str(tmp_path), "max_bytes": 1 << 28, "offload": True}),
        "nixl": ("nixl", {}),
        "nixl with a store": ("nixl", {"store": "memory", "store.store": medium, "offload": True}),
    }[request.param]
    opened: list[InprocClient] = []

    def open_one() -> InprocClient:
        connector = create_connector(name, options)
        config = EngineConfig(
            cache=CacheConfig(block_size=BLOCK_SIZE), scheduler=SchedulerConfig(max_num_batched_tokens=CHUNK)
        )
        executor = FakeExecutor(block_size=BLOCK_SIZE, connector=connector, groups=TWO_GROUPS)
        opened.append(InprocClient(config, executor))
        return opened[-1]

    yield open_one
    for engine in opened:
        check_integrity(engine)
        engine.close()


def expected(prompt: list[int]) -> list[int]:
    return expected_tokens(prompt, GREEDY.max_tokens or 0, groups=TWO_GROUPS)


def test_each_token_reads_what_its_groups_show_it(open_engine: OpenEngine) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    handoffs = Handoffs(open_engine(), open_engine())
    for request, prompt in zip(handoffs.run(prompts, GREEDY), prompts, strict=True):
        assert request.token_ids == expected(prompt)
        assert request.received is not None
        assert (request.received.num_tokens, request.received.recompute_reason) == (len(prompt), "")
    assert handoffs.consumer.stats().num_prompt_tokens == 0


def test_blocks_that_fell_out_are_neither_reserved_nor_sent(open_engine: OpenEngine) -> None:
    prompt = prompt_of(5 * CHUNK + 5)  # eleven spans: the next token reads the last two of the window
    handoffs = Handoffs(open_engine(), open_engine())
    handoffs.start_producer(RequestId("r"), prompt, GREEDY)
    handoffs.start_consumer(RequestId("r"))
    handoffs.step_consumer()
    stats = handoffs.consumer.stats()
    assert stats.num_blocks - stats.num_free_blocks == 11 + 2
    handoffs.run_to_the_end()
    assert handoffs.producer.stats().saves.num_blocks == 11 + 2
    assert handoffs.decoded[RequestId("r")].token_ids == expected(prompt)


def test_what_another_engine_kept_is_restored(open_engine: OpenEngine) -> None:
    prompt = prompt_of(5 * CHUNK + 5)
    first, second = open_engine(), open_engine()
    assert generate(first, [prompt], GREEDY) == [expected(prompt)]
    assert generate(second, [prompt], GREEDY) == [expected(prompt)]
    stats = second.stats()
    assert not stats.tier_queries or stats.tier_hits == 10 * BLOCK_SIZE
    assert generate(second, [prompt[: 2 * CHUNK]], GREEDY) == [expected(prompt[: 2 * CHUNK])]

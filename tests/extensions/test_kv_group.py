"""A kind of KV group comes from outside the package, in one short file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.engine.client.inproc import InprocClient
from common.engine.config import CacheConfig, EngineConfig, ParallelConfig
from common.engine.executor.fake import expected_tokens
from common.engine.kv_cache import KVGroups
from common.engine.messages import AddRequest
from common.errors import ConfigError
from common.types import RequestId, SamplingParams
from tests.extensions import kv_group
from tests.integration.handoff_rig import check_integrity, generate
from tests.tiny_models import prompt_of

MAX_LINES = 90
BLOCK_SIZE = 4
GREEDY = SamplingParams(temperature=0.0, max_tokens=2 * kv_group.CHUNK)


@pytest.fixture
def engine() -> Iterator[InprocClient]:
    config = EngineConfig(
        cache=CacheConfig(block_size=BLOCK_SIZE), parallel=ParallelConfig(executor="tests.extensions.kv_group:create")
    )
    with InprocClient(config) as engine:
        yield engine
        check_integrity(engine)


def test_the_output_is_as_expected(engine: InprocClient) -> None:
    prompts = [prompt_of(length) for length in (1, kv_group.CHUNK - 1, kv_group.CHUNK, 3 * kv_group.CHUNK + 1)]
    for _ in range(2):  # the second time with prefix hits
        assert generate(engine, prompts, GREEDY) == [
            expected_tokens(prompt, 2 * kv_group.CHUNK, groups=kv_group.GROUPS) for prompt in prompts
        ]


def test_blocks_of_earlier_chunks_are_freed(engine: InprocClient) -> None:
    engine.add_request(AddRequest(request_id=RequestId("r"), prompt_token_ids=prompt_of(49), sampling=GREEDY))
    engine.step()
    stats = engine.stats()
    assert stats.num_blocks - stats.num_free_blocks == 13 + 1  # the full group's, and the begun chunk's
    while engine.has_unfinished:
        engine.step()


def test_one_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="kv-group-kind"):
        KVGroups([replace(kv_group.SPEC, kind="tests.extensions.kv_group:ChunkGroop")], BLOCK_SIZE)


def test_it_is_short() -> None:
    assert len(Path(kv_group.__file__).read_text(encoding="utf-8").splitlines()) < MAX_LINES

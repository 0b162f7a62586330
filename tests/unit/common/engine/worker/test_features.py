"""Features count for the tokens that they were computed of, and no longer than their blocks hold these."""

from __future__ import annotations

import pytest

from common.engine.config import ModelConfig
from common.engine.contract.step import NewRequest, SchedulerOutput
from common.engine.model.eagle3 import load_eagle3
from common.engine.model.loader import load_model
from common.engine.speculative import Eagle3Options
from common.engine.worker.features import Features
from common.types import RequestId, SamplingParams, hash_prompt, root_hash
from tests.eagle3_heads import tiny_head_dir
from tests.tiny_models import prompt_of, tiny_model_dir

BLOCK_SIZE = 4
TOKENS = prompt_of(15)
HASHES = hash_prompt(TOKENS, BLOCK_SIZE, root_hash())
OTHERS = hash_prompt(prompt_of(15, seed=1), BLOCK_SIZE, root_hash())
BLOCKS = [5, 6, 7, 8]


@pytest.fixture
def features() -> Features:
    config = ModelConfig(model=str(tiny_model_dir("llama")), num_threads=1)
    eagle3 = load_eagle3(config, Eagle3Options(model=str(tiny_head_dir(tiny_model_dir("llama")))), 0)
    target = load_model(config)
    found = Features(eagle3, eagle3.keep_inputs(target, 16), 16, BLOCK_SIZE)
    found.set_keys(BLOCKS[:3], HASHES)
    return found


def new(block_ids: list[int], num_computed_tokens: int) -> SchedulerOutput:
    request = NewRequest(RequestId("r"), TOKENS, 15, SamplingParams(), [block_ids], num_computed_tokens)
    return SchedulerOutput(new_requests=[request])


def test_what_was_computed_here_counts_for_the_same_tokens(features: Features) -> None:
    assert features.first_block(BLOCKS, HASHES, 12) == 0
    assert features.first_block(BLOCKS, OTHERS, 12) == 3
    assert features.first_block([9, *BLOCKS[1:]], HASHES, 12) == 1, "one block from elsewhere"
    assert features.first_block([*BLOCKS[:2], 9, 8], HASHES, 12) == 3
    assert features.first_block(BLOCKS, HASHES, 14) == 4, "the rest of a block that is not full is from elsewhere"
    assert features.first_block(BLOCKS, HASHES, 0) == 0


@pytest.mark.parametrize("num_computed_tokens", [4, 7])
def test_what_a_request_writes_to_counts_no_longer(features: Features, num_computed_tokens: int) -> None:
    features.begin_step(new(BLOCKS[:3], num_computed_tokens))
    assert [features.key(each) for each in BLOCKS[:3]] == [HASHES[0], None, None]
    assert features.first_block(BLOCKS, HASHES, 12) == 3


def test_blocks_that_a_request_gets_later_count_no_longer(features: Features) -> None:
    features.begin_step(SchedulerOutput(new_block_ids={RequestId("r"): [[6]]}))
    assert [features.key(each) for each in BLOCKS[:3]] == [HASHES[0], None, HASHES[2]]
    features.begin_step(SchedulerOutput(forgets_outputs=True))
    assert not any(features.key(each) for each in BLOCKS)

"""Features count for the tokens that they were computed of, and no longer than their blocks hold these."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.engine.config import ModelConfig
from common.engine.contract.step import NewRequest, SchedulerOutput
from common.engine.model.eagle3 import load_eagle3
from common.engine.model.loader import load_model
from common.engine.speculative import Eagle3Options
from common.engine.worker.features import Features, Tagger, feature_bytes_per_block
from common.engine.worker.request_table import RequestTable
from common.types import (
    ExtraKey,
    PromptPositions,
    RequestId,
    SamplingParams,
    hash_partial_block,
    hash_prompt,
    root_hash,
)
from tests.eagle3_heads import tiny_head_dir
from tests.tiny_models import prompt_of, tiny_model_dir

BLOCK_SIZE = 4
TOKENS = prompt_of(15)
HASHES = hash_prompt(TOKENS, BLOCK_SIZE, root_hash())
OTHERS = hash_prompt(prompt_of(15, seed=1), BLOCK_SIZE, root_hash())
BLOCKS = [5, 6, 7, 8]


def with_head(seed: int = 0) -> Features:
    config = ModelConfig(model=str(tiny_model_dir("llama")), num_threads=1)
    eagle3 = load_eagle3(config, Eagle3Options(model=str(tiny_head_dir(tiny_model_dir("llama"), seed=seed))), 0)
    places = torch.zeros((16, feature_bytes_per_block(eagle3, BLOCK_SIZE) + 16), dtype=torch.uint8)
    return Features(eagle3, eagle3.keep_states(load_model(config), 16), places, BLOCK_SIZE)


@pytest.fixture
def features() -> Features:
    found = with_head()
    found.set_complete(BLOCKS[:3], HASHES)
    return found


def tagger_of(features: Features) -> tuple[Tagger, RequestTable]:
    table = RequestTable(1, 32, BLOCK_SIZE, vocab_size=256, eos_token_ids=frozenset())
    return Tagger(features, table, BLOCK_SIZE), table


def first_block(features: Features, block_ids: list[int], num_computed_tokens: int, tokens: list[int] = TOKENS) -> int:
    """What a new request's tags say."""
    tagger, _ = tagger_of(features)
    tagger.begin_step(new(block_ids, num_computed_tokens, tokens))
    return tagger.requests[RequestId("r")].first


def new(block_ids: list[int], num_computed_tokens: int, tokens: list[int] = TOKENS) -> SchedulerOutput:
    request = NewRequest(
        RequestId("r"), tokens, len(tokens), SamplingParams(), [block_ids], num_computed_tokens, root=root_hash()
    )
    return SchedulerOutput(new_requests=[request])


def tagged(features: Features) -> list[int]:
    return [block_id for block_id in BLOCKS[:3] if features.first_block([block_id], [HASHES]) == 0]


def test_what_was_computed_here_counts_for_the_same_tokens(features: Features) -> None:
    assert first_block(features, BLOCKS, 12) == 0
    assert first_block(features, BLOCKS, 12, prompt_of(15, seed=1)) == 3
    assert first_block(features, [9, *BLOCKS[1:]], 12) == 1, "one block from elsewhere"
    assert first_block(features, [*BLOCKS[:2], 9, 8], 12) == 3
    assert first_block(features, BLOCKS, 0) == 0


def test_a_block_that_is_not_full_counts_for_its_own_tokens(features: Features) -> None:
    assert first_block(features, BLOCKS, 14) == 4, "the rest is from elsewhere"
    for count in (13, 14):
        features.set_complete(BLOCKS[3:], [hash_partial_block(TOKENS[:count], BLOCK_SIZE, HASHES, root_hash())])
    assert first_block(features, BLOCKS, 14) == 0
    assert first_block(features, BLOCKS, 14) == 4, "the first has written to it"


def test_the_last_token_of_a_full_block_may_be_computed_again(features: Features) -> None:
    assert first_block(features, BLOCKS[:3], 11, TOKENS[:12]) == 0
    assert tagged(features) == BLOCKS[:2]


def test_features_of_another_head_do_not_count(features: Features) -> None:
    other = with_head(seed=1)
    other._tags[:] = features._tags
    assert first_block(other, BLOCKS, 12) == 3


@pytest.mark.parametrize("num_computed_tokens", [4, 7])
def test_what_a_request_writes_to_counts_no_longer(features: Features, num_computed_tokens: int) -> None:
    features.forget(new(BLOCKS[:3], num_computed_tokens))
    assert tagged(features) == BLOCKS[:1]
    assert first_block(features, BLOCKS, 12) == 3


def test_blocks_that_a_request_gets_later_count_no_longer(features: Features) -> None:
    features.forget(SchedulerOutput(new_block_ids={RequestId("r"): [[6]]}))
    assert tagged(features) == [5, 7]


class Computed:
    """Requests that a model computes, and their tags."""

    def __init__(self, features: Features) -> None:
        self.tagger, self._table = tagger_of(features)

    def add(self, num_computed_tokens: int, **settings: object) -> None:
        step = new(BLOCKS, 0)
        step.new_requests[0] = replace(step.new_requests[0], **settings)  # type: ignore[arg-type]
        self.tagger.begin_step(step)
        self._table.update(step)
        (row,) = self._table.rows_of([RequestId("r")])
        self._table.num_computed_tokens[row] = num_computed_tokens
        self.tagger.note_computed([RequestId("r")])

    def drop(self) -> None:
        step = SchedulerOutput(dropped_request_ids=[RequestId("r")], forgets_outputs=True)
        self.tagger.begin_step(step)
        self._table.update(step)


def test_what_is_computed_is_tagged_for_requests_without_drafts_as_well(features: Features) -> None:
    computed = Computed(features)
    computed.add(8, sampling=SamplingParams(speculative=False))
    assert tagged(features) == BLOCKS[:2]
    computed.drop()
    assert tagged(features) == BLOCKS[:2], "it is true until the blocks are written to"


def test_blocks_of_a_request_that_has_left_get_no_tags(features: Features) -> None:
    """Others may have had something written to them meanwhile, before the step begins."""
    computed = Computed(features)
    computed.add(15)
    assert tagged(features) == BLOCKS[:3]
    features.set_complete(BLOCKS[:3], OTHERS)
    computed.drop()
    assert not computed.tagger.note_computed([RequestId("r")])
    assert not tagged(features)


def test_a_tag_is_of_the_blocks_hash(features: Features) -> None:
    """With what decides it beside the tokens."""
    of_image = [ExtraKey(0, 4, b"image")]
    positions = PromptPositions([[0] * 15, [0] * 15], 0)
    for settings in ({"extra_keys": of_image}, {"positions": positions}):
        Computed(features).add(12, **settings)
        assert not tagged(features)
        hashes = hash_prompt(TOKENS, BLOCK_SIZE, root_hash(), **settings)  # type: ignore[arg-type]
        assert features.first_block(BLOCKS[:3], [[each] for each in hashes]) == 0

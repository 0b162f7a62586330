"""Masks of a batch in which some rows have a grammar."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from common.engine.sampling.sampler import Sampler, SamplingRow
from common.engine.scheduler.output import DeadEnd, NewRequest
from common.engine.worker.constraints import Constraints
from common.types import RequestId, SamplingParams

VOCAB_SIZE = 70  # neither a multiple of a word nor of a byte
EOS = 69


class Sequence:
    """A grammar of one text, token by token, then end of sequence; its own matcher."""

    num_bytes = 0

    def __init__(self, *token_ids: int) -> None:
        self._left = [*token_ids, EOS]

    def matcher(self) -> Sequence:
        return Sequence(*self._left[:-1])

    def accept(self, token_id: int) -> bool:
        return bool(self._left) and self._left.pop(0) == token_id

    def fill(self, mask: npt.NDArray[np.int32]) -> None:
        mask[:] = 0
        for token_id in self._left[:1]:
            mask.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)


def new_request(grammar: Sequence | None, *output: int, **sampling: object) -> NewRequest:
    params = SamplingParams(temperature=0.0, **sampling)  # type: ignore[arg-type]
    return NewRequest(RequestId("a"), [1, 2, *output], 2, params, [], 0, grammar)


def allowed(constraints: Constraints, rows: list[int]) -> list[list[int]]:
    """Tokens with finite logits, by row of a batch."""
    logits = torch.zeros(len(rows), VOCAB_SIZE)
    mask, _ = constraints.mask(rows)
    if mask is not None:
        mask.apply(logits)
    return [row.isfinite().nonzero().flatten().tolist() for row in logits]


@pytest.fixture
def constraints() -> Constraints:
    return Constraints(VOCAB_SIZE, frozenset({EOS}))


def test_rows_without_a_grammar_are_free(constraints: Constraints) -> None:
    constraints.add(0, new_request(None))
    assert not constraints
    assert constraints.mask([0]) == (None, {})
    constraints.add(3, new_request(Sequence(31, 32)))
    assert allowed(constraints, [0, 3, 5]) == [list(range(VOCAB_SIZE)), [31], list(range(VOCAB_SIZE))]
    assert allowed(constraints, [3]) == [[31]]
    constraints.drop(3)
    assert not constraints


def test_a_matcher_follows_the_output_that_there_is_and_what_is_sampled(constraints: Constraints) -> None:
    constraints.add(1, new_request(Sequence(5, 6, 68), 5, 6))
    assert allowed(constraints, [1]) == [[68]]
    constraints.accept(1, 68)
    assert allowed(constraints, [1]) == [[EOS]]
    constraints.accept(1, EOS)
    assert constraints.mask([1])[1] == {0: DeadEnd.COMPLETE}


def test_output_that_does_not_follow_the_grammar(constraints: Constraints) -> None:
    constraints.add(1, new_request(Sequence(5, 6), 5, 7))
    assert constraints.mask([0, 1])[1] == {1: DeadEnd.MISMATCH}


@pytest.mark.parametrize("sampling", [{"ignore_eos": True}, {"min_tokens": 9}])
def test_an_answer_that_may_only_end_has_ended(constraints: Constraints, sampling: dict[str, object]) -> None:
    constraints.add(1, new_request(Sequence(5), 5, **sampling))
    assert constraints.mask([1])[1] == {0: DeadEnd.COMPLETE}


def test_the_mask_comes_after_penalties() -> None:
    """Which keep logits finite, so that an excluded token might tie with the worst of the allowed ones."""
    constraints = Constraints(VOCAB_SIZE, frozenset({EOS}))
    constraints.add(0, new_request(Sequence(7)))
    mask, _ = constraints.mask([0])
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.5)
    row = SamplingRow(params, np.array([7, 7, 7]), 1)
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 7] = torch.finfo(torch.float32).min
    [token] = Sampler().sample(logits, [row], mask)
    assert token is not None
    assert token.token_id == 7

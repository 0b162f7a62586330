"""Masks of a batch in which some rows have a grammar, followed by real processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from common.demo_model import demo_model_path
from common.engine.config import GrammarConfig
from common.engine.contract.step import NewRequest, NoToken
from common.engine.grammar.base import Grammar
from common.engine.grammar.compiler import GrammarCompiler, TokenizerSource
from common.engine.grammar.vocabulary import load_vocabulary
from common.engine.sampling.sampler import Sampler, SamplingRow
from common.engine.scheduler.request import Request
from common.engine.worker.constraints import Constraints
from common.types import Constraint, RequestId, SamplingParams
from tests.unit.common.engine.scheduler_factories import create_request

EOS_IDS = frozenset({0, 2})
SOURCE = TokenizerSource(demo_model_path(), 2048, EOS_IDS)
IDS = {
    token: token_id
    for token_id, token in enumerate(load_vocabulary(SOURCE.directory, SOURCE.vocab_size, EOS_IDS).token_bytes)
}
A, B, C = (IDS[letter] for letter in (b"a", b"b", b"c"))
DEADLINE_S = 120.0


class Grammars:
    """Compiles for one test module."""

    def __init__(self, **settings: Any) -> None:
        self._noted = threading.Event()
        self.compiler = GrammarCompiler(GrammarConfig(**settings), SOURCE, self._noted.set, lambda error: None)
        self._num_requests = 0

    def compiled(self, constraint: Constraint) -> Grammar:
        self._num_requests += 1
        message = create_request(f"r{self._num_requests}", structured_outputs=constraint)
        request = Request(message, added_at=0.0, max_model_len=64, eos=frozenset())
        grammar = self.compiler.ask(request)
        while grammar is None:
            assert self._noted.wait(DEADLINE_S)
            self._noted.clear()
            for answer in self.compiler.collect():
                assert isinstance(answer.result, Grammar)
                grammar = answer.result
        return grammar


@pytest.fixture(scope="module")
def grammars() -> Iterator[Grammars]:
    grammars = Grammars()
    yield grammars
    grammars.compiler.close()


@pytest.fixture
def constraints() -> Iterator[Constraints]:
    constraints = Constraints(SOURCE.vocab_size, EOS_IDS, 0.005)
    yield constraints
    for row in range(8):
        constraints.drop(row)


def new_request(grammar: Grammar | None, *output: int, **sampling: object) -> NewRequest:
    params = SamplingParams(temperature=0.0, **sampling)  # type: ignore[arg-type]
    return NewRequest(RequestId("a"), [1, 2, *output], 2, params, [], 0, grammar)


def wait_for(constraints: Constraints, rows: list[int]) -> None:
    """Steps until no mask is late."""
    deadline = time.monotonic() + DEADLINE_S
    constraints.begin()
    while constraints.wait(rows):
        assert time.monotonic() < deadline
        constraints.begin()


def allowed(constraints: Constraints, rows: list[int]) -> list[set[int]]:
    """Tokens with finite logits, by row of a batch."""
    wait_for(constraints, rows)
    logits = torch.zeros(len(rows), SOURCE.vocab_size)
    mask, _ = constraints.mask(rows)
    if mask is not None:
        mask.apply(logits)
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in logits]


def dead_ends(constraints: Constraints, rows: list[int]) -> dict[int, NoToken]:
    wait_for(constraints, rows)
    return constraints.mask(rows)[1]


ALL = set(range(SOURCE.vocab_size))


def test_rows_without_a_grammar_are_free(constraints: Constraints, grammars: Grammars) -> None:
    constraints.add(0, new_request(None))
    assert not constraints
    assert constraints.wait([0]) == []
    assert constraints.mask([0]) == (None, {})
    constraints.add(3, new_request(grammars.compiled(Constraint.regex("[ab]"))))
    assert allowed(constraints, [0, 3, 5]) == [ALL, {A, B}, ALL]
    assert allowed(constraints, [3]) == [{A, B}]
    constraints.drop(3)
    assert not constraints


def test_a_matcher_follows_the_output_that_there_is_and_what_is_sampled(
    constraints: Constraints, grammars: Grammars
) -> None:
    constraints.add(1, new_request(grammars.compiled(Constraint.regex("abc")), A))
    assert B in allowed(constraints, [1])[0]
    constraints.accept(1, B)
    assert allowed(constraints, [1]) == [{C}]
    constraints.accept(1, C)
    assert allowed(constraints, [1]) == [EOS_IDS]
    constraints.accept(1, min(EOS_IDS))
    assert dead_ends(constraints, [1]) == {0: NoToken.COMPLETE}


def test_output_that_does_not_follow_the_grammar(constraints: Constraints, grammars: Grammars) -> None:
    constraints.add(1, new_request(grammars.compiled(Constraint.regex("abc")), A, A))
    assert dead_ends(constraints, [0, 1]) == {1: NoToken.MISMATCH}


@pytest.mark.parametrize("sampling", [{"ignore_eos": True}, {"min_tokens": 9}])
def test_an_answer_that_may_only_end_has_ended(
    constraints: Constraints, grammars: Grammars, sampling: dict[str, object]
) -> None:
    constraints.add(1, new_request(grammars.compiled(Constraint.regex("a")), A, **sampling))
    assert dead_ends(constraints, [1]) == {0: NoToken.COMPLETE}


def pid_of(grammar: Grammar) -> int:
    process = grammar.process()
    assert process is not None
    return process.pid


def test_a_late_mask_does_not_hold_up_the_others(constraints: Constraints, grammars: Grammars) -> None:
    stopped, other = (grammars.compiled(Constraint.regex(text)) for text in ("a[bc]", "ab"))
    constraints.add(0, new_request(stopped))
    constraints.add(1, new_request(other))
    wait_for(constraints, [0, 1])
    pid = pid_of(stopped)
    os.kill(pid, signal.SIGSTOP)
    constraints.accept(0, A)
    constraints.accept(1, A)
    wait_for(constraints, [1])
    assert constraints.wait([0, 1, 2]) == [0]
    assert allowed(constraints, [1]) == [{B}]
    os.kill(pid, signal.SIGCONT)
    assert allowed(constraints, [0]) == [{B, C}]


def test_requests_go_on_when_a_process_dies_once(constraints: Constraints, grammars: Grammars) -> None:
    grammar, same = (grammars.compiled(Constraint.regex("abc[abc]*")) for _ in range(2))
    constraints.add(0, new_request(grammar))
    constraints.add(1, new_request(same))
    wait_for(constraints, [0, 1])
    pid = pid_of(grammar)
    os.kill(pid, signal.SIGSTOP)
    constraints.accept(0, A)
    constraints.begin()
    os.kill(pid, signal.SIGKILL)
    assert dead_ends(constraints, [0]) == {}
    assert B in allowed(constraints, [0])[0]
    constraints.accept(1, A)
    assert B in allowed(constraints, [1])[0]
    assert pid_of(grammar) != pid


def test_a_request_whose_matcher_ends_its_process_twice_ends(constraints: Constraints, grammars: Grammars) -> None:
    grammar = grammars.compiled(Constraint.regex("[ab]+c"))
    constraints.add(0, new_request(grammar))
    for _ in range(2):
        wait_for(constraints, [0])
        pid = pid_of(grammar)
        os.kill(pid, signal.SIGSTOP)
        constraints.accept(0, A)
        constraints.begin()
        os.kill(pid, signal.SIGKILL)
    assert dead_ends(constraints, [0]) == {0: NoToken.TOO_SLOW}


def test_a_matcher_that_exceeds_its_time_ends() -> None:
    """The share of each token is far below what the matcher takes, so that its reserve is used up."""
    slow = Grammars(grammar_timeout_s=0.2)
    constraints = Constraints(SOURCE.vocab_size, EOS_IDS, 1e-6)
    constraints.add(0, new_request(slow.compiled(Constraint.regex("((a|aa|aaa|a?a?a?)*)*z"))))
    for _ in range(100_000):
        if dead_ends(constraints, [0]):
            break
        constraints.accept(0, A)
    assert dead_ends(constraints, [0]) == {0: NoToken.TOO_SLOW}
    slow.compiler.close()


def test_the_mask_comes_after_penalties(constraints: Constraints, grammars: Grammars) -> None:
    """Which keep logits finite, so that an excluded token might tie with the worst of the allowed ones."""
    constraints.add(0, new_request(grammars.compiled(Constraint.regex("a"))))
    wait_for(constraints, [0])
    mask, _ = constraints.mask([0])
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.5)
    row = SamplingRow(params, np.array([A, A, A]), 1)
    logits = torch.zeros(1, SOURCE.vocab_size)
    logits[0, A] = torch.finfo(torch.float32).min
    [token] = Sampler().sample(logits, [row], mask)
    assert token is not None
    assert token.token_id == A

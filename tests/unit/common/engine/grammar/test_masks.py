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
from common.engine.contract.masks import BatchMasks
from common.engine.contract.step import NewRequest, NoToken, SchedulerOutput
from common.engine.devices.host_memory import HostMemory
from common.engine.grammar import processes
from common.engine.grammar.base import Grammar
from common.engine.grammar.compiler import GrammarCompiler, TokenizerSource
from common.engine.grammar.masks import GrammarMasks
from common.engine.grammar.vocabulary import load_vocabulary
from common.engine.sampling.processors import SamplingRow
from common.engine.sampling.sampler import Sampler
from common.engine.scheduler.request import Request
from common.engine.worker.token_mask import TokenMask
from common.types import Constraint, RequestId, SampledToken, SamplingParams
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


class Batch:
    """Masks of requests 0, 1, ... as a step takes them."""

    def __init__(self, step_s: float = 0.005) -> None:
        self.masks = GrammarMasks(SOURCE.vocab_size, EOS_IDS, step_s)
        self._grammars: dict[RequestId, Grammar | None] = {}
        self._num_tokens: dict[int, int] = {}

    def add(self, number: int, grammar: Grammar | None, *output: int, **sampling: object) -> None:
        params = SamplingParams(temperature=0.0, **sampling)  # type: ignore[arg-type]
        request_id = RequestId(str(number))
        self._grammars[request_id] = grammar
        self._num_tokens[number] = 2 + len(output)
        new = NewRequest(request_id, [1, 2, *output], 2, params, [[]], 0)
        self.masks.step_scheduled(SchedulerOutput(new_requests=[new]), self._grammars.get)

    def drop(self, number: int) -> None:
        self.masks.step_scheduled(SchedulerOutput(dropped_request_ids=[RequestId(str(number))]), self._grammars.get)

    def accept(self, number: int, *token_ids: int) -> None:
        self._num_tokens[number] += len(token_ids)
        self.masks.step_ended({RequestId(str(number)): [SampledToken(token_id) for token_id in token_ids]})

    def draft(self, number: int, *token_ids: int) -> None:
        drafts = {RequestId(str(number)): list(token_ids)}
        self.masks.step_scheduled(SchedulerOutput(drafts=drafts), self._grammars.get)

    def ask(self, *numbers: int) -> BatchMasks | None:
        """One step's masks. A request that is named more than once has its last draft first."""
        rows = [(number, numbers[place + 1 :].count(number)) for place, number in enumerate(numbers)]
        lengths = np.array([self._num_tokens.get(number, 0) + num_drafts for number, num_drafts in rows])
        return self.masks.masks([RequestId(str(number)) for number in numbers], lengths)

    def found(self, *numbers: int) -> BatchMasks | None:
        """Masks after as many steps as it takes until none is late."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            masks = self.ask(*numbers)
            if masks is None or NoToken.NOT_YET not in masks.no_tokens.values():
                return masks
            assert time.monotonic() < deadline
            self.masks.step_ended({})
            self.masks.arrived(may_wait=True)

    def no_tokens(self, *numbers: int) -> dict[int, NoToken]:
        masks = self.found(*numbers)
        assert masks is not None
        return masks.no_tokens

    def allowed(self, *numbers: int) -> list[set[int]]:
        """Tokens with finite logits, by place in a batch."""
        logits = torch.zeros(len(numbers), SOURCE.vocab_size)
        masks = self.found(*numbers)
        if masks is not None:
            assert masks.no_tokens == {}
            TokenMask(masks.positions, masks.words, HostMemory()).apply(logits)
        return [set(row.isfinite().nonzero().flatten().tolist()) for row in logits]


@pytest.fixture
def batch() -> Iterator[Batch]:
    batch = Batch()
    yield batch
    batch.masks.close()


ALL = set(range(SOURCE.vocab_size))


def test_requests_without_a_grammar_are_free(batch: Batch, grammars: Grammars) -> None:
    batch.add(0, None)
    assert not batch.masks
    assert batch.ask(0) is None
    batch.add(3, grammars.compiled(Constraint.regex("[ab]")))
    assert batch.allowed(0, 3, 5) == [ALL, {A, B}, ALL]
    assert batch.allowed(3) == [{A, B}]
    batch.drop(3)
    assert not batch.masks


def test_a_matcher_follows_the_output_that_there_is_and_what_is_sampled(batch: Batch, grammars: Grammars) -> None:
    batch.add(1, grammars.compiled(Constraint.regex("abc")), A)
    assert B in batch.allowed(1)[0]
    batch.accept(1, B)
    assert batch.allowed(1) == [{C}]
    batch.accept(1, C)
    assert batch.allowed(1) == [EOS_IDS]
    batch.accept(1, min(EOS_IDS))
    assert batch.no_tokens(1) == {0: NoToken.COMPLETE}


def test_several_tokens_of_one_step_are_followed(batch: Batch, grammars: Grammars) -> None:
    batch.add(1, grammars.compiled(Constraint.regex("abc")))
    batch.accept(1, A, B)
    assert batch.allowed(1) == [{C}]


def test_output_that_does_not_follow_the_grammar(batch: Batch, grammars: Grammars) -> None:
    batch.add(1, grammars.compiled(Constraint.regex("abc")), A, A)
    assert batch.no_tokens(0, 1) == {1: NoToken.MISMATCH}


@pytest.mark.parametrize("sampling", [{"ignore_eos": True}, {"min_tokens": 9}])
def test_an_answer_that_may_only_end_has_ended(batch: Batch, grammars: Grammars, sampling: dict[str, object]) -> None:
    batch.add(1, grammars.compiled(Constraint.regex("a")), A, **sampling)
    assert batch.no_tokens(1) == {0: NoToken.COMPLETE}


def pid_of(grammar: Grammar) -> int:
    process = grammar.process()
    assert process is not None
    return process.pid


def test_a_late_mask_does_not_hold_up_the_others(batch: Batch, grammars: Grammars) -> None:
    stopped, other = (grammars.compiled(Constraint.regex(text)) for text in ("a[bc]", "ab"))
    batch.add(0, stopped)
    batch.add(1, other)
    batch.found(0, 1)
    pid = pid_of(stopped)
    os.kill(pid, signal.SIGSTOP)
    batch.accept(0, A)
    batch.accept(1, A)
    assert batch.allowed(1) == [{B}]
    masks = batch.ask(0, 1, 2)
    assert masks is not None
    assert (masks.positions, masks.no_tokens) == ([1], {0: NoToken.NOT_YET})
    os.kill(pid, signal.SIGCONT)
    assert batch.allowed(0) == [{B, C}]


def test_requests_go_on_when_a_process_dies_once(batch: Batch, grammars: Grammars) -> None:
    grammar, same = (grammars.compiled(Constraint.regex("abc[abc]*")) for _ in range(2))
    batch.add(0, grammar)
    batch.add(1, same)
    batch.found(0, 1)
    pid = pid_of(grammar)
    os.kill(pid, signal.SIGSTOP)
    batch.accept(0, A)
    os.kill(pid, signal.SIGKILL)
    assert B in batch.allowed(0)[0]
    batch.accept(1, A)
    assert B in batch.allowed(1)[0]
    assert pid_of(grammar) != pid


def test_a_request_whose_matcher_ends_its_process_twice_ends(batch: Batch, grammars: Grammars) -> None:
    grammar = grammars.compiled(Constraint.regex("[ab]+c"))
    batch.add(0, grammar)
    for _ in range(2):
        batch.found(0)
        pid = pid_of(grammar)
        os.kill(pid, signal.SIGSTOP)
        batch.accept(0, A)
        os.kill(pid, signal.SIGKILL)
    assert batch.no_tokens(0) == {0: NoToken.TOO_SLOW}


def test_requests_whose_grammar_outgrows_the_memory_for_all_twice_end() -> None:
    small, batch = Grammars(grammar_used_bytes=2**20), Batch()
    for number in range(2):
        batch.add(number, small.compiled(Constraint.regex("[ab]+c")))
    deadline = time.monotonic() + DEADLINE_S
    while len(batch.no_tokens(0, 1)) < 2:  # one that is not yet followed again when a process ends goes on for longer
        assert time.monotonic() < deadline
        time.sleep(0.05)
        batch.accept(0, A)
        batch.accept(1, A)
    assert batch.no_tokens(0, 1) == {0: NoToken.TOO_SLOW, 1: NoToken.TOO_SLOW}
    batch.masks.close()
    small.compiler.close()


def test_a_matcher_that_exceeds_its_time_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The share of each token is far below what the matcher takes, so that its reserve is used up."""
    monkeypatch.setattr(processes, "_LATE_NICENESS", 0)  # else its process's time comes late on a busy machine
    slow, batch = Grammars(grammar_timeout_s=0.2), Batch(step_s=1e-6)
    batch.add(0, slow.compiled(Constraint.regex("((a|aa|aaa|a?a?a?)*)*z")))
    for _ in range(100_000):
        if batch.no_tokens(0):
            break
        batch.accept(0, A)
    assert batch.no_tokens(0) == {0: NoToken.TOO_SLOW}
    slow.compiler.close()


def test_the_mask_comes_after_penalties(batch: Batch, grammars: Grammars) -> None:
    """Which keep logits finite, so that an excluded token might tie with the worst of the allowed ones."""
    batch.add(0, grammars.compiled(Constraint.regex("a")))
    masks = batch.found(0)
    assert masks is not None
    params = SamplingParams(temperature=0.0, frequency_penalty=2.0, repetition_penalty=1.5)
    row = SamplingRow(params, np.array([A, A, A]), 1)
    logits = torch.zeros(1, SOURCE.vocab_size)
    logits[0, A] = torch.finfo(torch.float32).min
    assert Sampler().sample(logits, [row], TokenMask(masks.positions, masks.words, HostMemory())) == [SampledToken(A)]


def letters(batch: Batch, *numbers: int) -> list[set[int]]:
    """What is allowed of single letters and ends."""
    return [allowed & ({A, B, C} | EOS_IDS) for allowed in batch.allowed(*numbers)]


@pytest.mark.parametrize("accepted", [(A,), (A, B), (A, B, C)])
def test_masks_follow_drafts_and_forget_them(batch: Batch, grammars: Grammars, accepted: tuple[int, ...]) -> None:
    batch.masks = GrammarMasks(SOURCE.vocab_size, EOS_IDS, DEADLINE_S)
    batch.add(0, grammars.compiled(Constraint.regex("a[ab][bc]a?")), min_tokens=3)
    batch.add(1, grammars.compiled(Constraint.regex("[bc]")))
    batch.draft(0, A, B, B)
    assert letters(batch, 0, 0, 1, 0, 0) == [{A} | EOS_IDS, {B, C}, {B, C}, {A, B}, {A}]
    batch.accept(0, *accepted)
    assert letters(batch, 0) == [{1: {A, B}, 2: {B, C}, 3: {A} | EOS_IDS}[len(accepted)]]


def test_after_a_draft_that_the_grammar_does_not_allow_there_is_no_token(batch: Batch, grammars: Grammars) -> None:
    batch.masks = GrammarMasks(SOURCE.vocab_size, EOS_IDS, DEADLINE_S)
    batch.add(0, grammars.compiled(Constraint.regex("[ab]{5}")))
    batch.draft(0, B, C, B)
    masks = batch.ask(0, 0, 0, 0)
    assert masks is not None
    assert (masks.positions, masks.no_tokens) == ([2, 3], {0: NoToken.NOT_YET, 1: NoToken.NOT_YET})
    batch.accept(0, B, A)
    assert letters(batch, 0) == [{A, B}]


def test_a_mask_after_a_draft_that_is_late_is_no_mask_of_a_later_step(batch: Batch, grammars: Grammars) -> None:
    batch.masks = GrammarMasks(SOURCE.vocab_size, EOS_IDS, step_s=0.0)
    batch.add(0, grammars.compiled(Constraint.regex("a(b|ca)c?")))
    assert letters(batch, 0) == [{A}]
    batch.draft(0, A, B)
    batch.ask(0, 0, 0)
    batch.masks.step_ended({RequestId("0"): NoToken.NOT_YET})  # whatever came of it
    assert letters(batch, 0) == [{A}]
    batch.draft(0, A, C)
    batch.accept(0, A, C)
    assert letters(batch, 0) == [{A}]


def test_masks_after_drafts_are_not_waited_for_after_their_step(batch: Batch, grammars: Grammars) -> None:
    batch.masks = GrammarMasks(SOURCE.vocab_size, EOS_IDS, DEADLINE_S)
    batch.add(0, grammars.compiled(Constraint.regex("abc")))
    batch.draft(0, A, B, C)
    batch.accept(0, A)
    began = time.monotonic()
    assert letters(batch, 0) == [{B}]
    assert time.monotonic() - began < DEADLINE_S


def test_a_process_that_drafts_have_ended_is_not_the_requests_fault(batch: Batch, grammars: Grammars) -> None:
    """However often: after the first time, no drafts are followed."""
    batch.masks = GrammarMasks(SOURCE.vocab_size, EOS_IDS, step_s=0.1)
    grammar = grammars.compiled(Constraint.regex("[ab]{9}"))
    batch.add(0, grammar)
    assert letters(batch, 0) == [{A, B}]
    os.kill(pid_of(grammar), signal.SIGSTOP)
    batch.draft(0, A, B)
    os.kill(pid_of(grammar), signal.SIGKILL)
    masks = batch.ask(0, 0, 0)
    assert masks is not None
    assert (masks.positions, masks.no_tokens) == ([2], {0: NoToken.NOT_YET, 1: NoToken.NOT_YET})
    batch.accept(0, A)
    assert letters(batch, 0) == [{A, B}]
    batch.draft(0, A, B)
    masks = batch.ask(0, 0, 0)
    assert masks is not None
    assert masks.positions == [2]

"""What proposers propose, and that what goes wrong in one goes no further than its guard."""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import pytest

from common.engine.speculation.base import Context
from common.engine.speculation.guard import MAX_FAILURES, NOTHING, GuardedProposer
from common.engine.speculation.ngram import NgramProposer, find_longest_match
from common.engine.speculation.suffix import SuffixProposer
from common.engine.speculative import NgramOptions, SuffixOptions
from common.types import RequestId

REQUESTS = [Context(RequestId(name), np.array([1, 2])) for name in "ab"]


class Answering:
    """A proposer of these drafts."""

    def __init__(self, drafts: object, spend: Callable[[int], object] = lambda _: None) -> None:
        self.drafts = drafts
        self.asked: list[list[str]] = []
        self._spend = spend

    def propose(self, requests: list[Context]) -> object:
        self.asked.append([request.request_id for request in requests])
        self._spend(len(requests))
        if isinstance(self.drafts, Exception):
            raise self.drafts
        return self.drafts if self.drafts is not None else [[5]] * len(requests)

    def forget(self, requests: object) -> None:
        if isinstance(self.drafts, Exception):
            raise self.drafts

    def reset(self) -> None:
        self.forget(None)

    def check(self) -> list[str]:
        return ["wrong"]


class Clock:
    """Time that a proposer spends."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds


def guarded(proposer: object, **options: object) -> GuardedProposer:
    return GuardedProposer(proposer, **({"vocab_size": 9, "budget_s": 100.0} | options))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [-1, 9, 10**9])
def test_what_is_not_in_the_vocabulary_is_dropped_with_what_follows(bad: int) -> None:
    found = guarded(Answering([[np.int64(3), 8, bad, 4], [bad, 1]])).propose(REQUESTS)
    assert found == ({"a": [3, 8]}, "invalid")
    assert {type(token_id) for token_id in found.drafts[RequestId("a")]} == {int}


@pytest.mark.parametrize(
    ("answer", "drafts", "failure"),
    [
        ([[], []], {}, ""),
        ([[1], []], {"a": [1]}, ""),
        ([[1]], {}, "invalid"),
        ([], {}, "invalid"),
        ([[1] * 10_000, [2]], {"a": [1] * 16, "b": [2]}, "invalid"),
        (7, {}, "raised"),
        ([None, [1]], {}, "raised"),
        ([["x"], [1]], {}, "raised"),
        (RuntimeError("broken"), {}, "raised"),
    ],
)
def test_only_what_can_be_used_is_taken(answer: object, drafts: object, failure: str) -> None:
    assert guarded(Answering(answer)).propose(REQUESTS) == (drafts, failure)


@pytest.mark.parametrize("answer", [RuntimeError("broken"), [[1]], [[-1], []]])
def test_one_that_goes_on_failing_is_switched_off(answer: object, caplog: pytest.LogCaptureFixture) -> None:
    proposer = Answering(answer)
    guard = guarded(proposer)
    with caplog.at_level(logging.WARNING):
        failures = [guard.propose(REQUESTS).failure for _ in range(MAX_FAILURES + 5)]
    assert [bool(each) for each in failures] == [True] * MAX_FAILURES + [False] * 5
    assert len(proposer.asked) == MAX_FAILURES
    assert guard.check() == []
    first, last = caplog.messages  # the kind once, and the end
    assert first.startswith(f"speculative: {failures[0]}: Answering ")
    assert "nothing is proposed any more" in last


def test_failures_that_are_not_in_a_row_do_not_switch_it_off() -> None:
    proposer = Answering(None)
    guard = guarded(proposer)
    for _ in range(3 * MAX_FAILURES):
        proposer.drafts = ValueError()
        assert guard.propose(REQUESTS).failure == "raised"
        proposer.drafts = None
        assert guard.propose(REQUESTS) == ({"a": [5], "b": [5]}, "")


@pytest.mark.parametrize("call", [lambda guard: guard.forget(REQUESTS), GuardedProposer.reset], ids=["forget", "reset"])
def test_what_a_call_without_an_answer_raises_counts_and_goes_no_further(
    call: Callable[[GuardedProposer], None],
) -> None:
    proposer = Answering(None)
    guard = guarded(proposer)
    for _ in range(MAX_FAILURES - 1):
        proposer.drafts = KeyError("x")
        call(guard)
        proposer.drafts = None
        assert guard.propose(REQUESTS) == ({"a": [5], "b": [5]}, "raised")
        assert guard.propose(REQUESTS) == ({"a": [5], "b": [5]}, "")
    proposer.drafts = KeyError("x")
    call(guard)
    assert guard.propose(REQUESTS) == NOTHING


def test_one_that_is_late_with_one_request_is_switched_off() -> None:
    clock = Clock()
    proposer = Answering(None, lambda _: clock.spend(0.1))
    guard = guarded(proposer, budget_s=0.005, clock=clock)
    failures = [guard.propose(REQUESTS * 4).failure for _ in range(30)]
    assert failures == [""] * 3 + ["too_slow"] * MAX_FAILURES + [""] * 17
    assert [len(asked) for asked in proposer.asked] == [8, 4, 2] + [1] * MAX_FAILURES


def test_a_busy_machine_is_not_its_fault() -> None:
    clock, cpu_clock = Clock(), Clock()

    def spend(_: int) -> None:
        clock.spend(0.02)
        cpu_clock.spend(0.001)

    guard = guarded(Answering(None, spend), budget_s=0.005, clock=clock, cpu_clock=cpu_clock)
    assert {guard.propose(REQUESTS).failure for _ in range(3 * MAX_FAILURES)} == {""}
    assert not guard.is_off


def test_one_that_is_late_with_many_requests_is_asked_for_fewer_in_turns() -> None:
    clock = Clock()
    proposer = Answering(None, lambda num_requests: clock.spend(num_requests * 0.001))
    guard = guarded(proposer, budget_s=0.0045, clock=clock)
    requests = [Context(RequestId(str(number)), np.array([1])) for number in range(32)]
    found = [guard.propose(requests) for _ in range(40)]
    assert {each.failure for each in found} == {""}
    assert {len(asked) for asked in proposer.asked[5:]} <= {2, 4, 8}
    assert {name for asked in proposer.asked[5:] for name in asked} == {str(number) for number in range(32)}


def test_a_check_that_raises_is_a_violation() -> None:
    proposer = Answering(None)
    proposer.check = lambda: [][0]  # type: ignore[method-assign]
    assert guarded(proposer).check() == ["the check of Answering has failed: IndexError('list index out of range')"]


def test_guesses_that_nobody_verifies_take_a_small_share_of_the_time() -> None:
    clock = Clock()
    proposer = Answering(None, lambda _: clock.spend(0.001))
    guard = guarded(proposer, clock=clock, cpu_clock=clock)
    for _ in range(10_000):
        guard.propose(REQUESTS, are_verified=False)
        clock.spend(0.01)
    assert 0.015 < 0.001 * len(proposer.asked) / clock.now < 0.021
    num_asked = len(proposer.asked)
    for _ in range(10):
        assert guard.propose(REQUESTS) != NOTHING
        clock.spend(0.01)
    assert len(proposer.asked) == num_asked + 10


# -- ngram ------------------------------------------------------------------------------------------------------------


def ngram(token_ids: list[int], **options: int) -> list[int]:
    proposer = NgramProposer(NgramOptions(**options))
    (drafts,) = proposer.propose([Context(RequestId("a"), np.array(token_ids))])
    return drafts


@pytest.mark.parametrize(
    ("token_ids", "options", "drafts"),
    [
        ([1, 2, 3, 4, 5, 1, 2], {"depth": 2}, [3, 4]),
        ([1, 2, 3, 9, 1, 2, 4, 9, 1, 2], {"depth": 1}, [4]),  # the last of equals
        ([7, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2], {"depth": 1}, [3]),  # the longest
        ([7, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2], {"depth": 1, "max": 2}, [4]),  # which is no longer than max
        ([1, 2, 3, 5, 2], {"depth": 2}, []),
        ([1, 2, 3, 5, 2], {"depth": 2, "min": 1}, [3, 5]),
        ([1, 2, 3, 1, 2, 3, 1, 2], {"depth": 7}, [3, 1, 2, 3, 1, 2, 3]),  # goes on after the end
        ([6, 6, 6], {"depth": 4}, [6, 6, 6, 6]),
        ([1, 2, 1, 2], {"depth": 3, "max": 16}, [1, 2, 1]),
        ([1], {"min": 1}, []),
        ([1, 2], {"min": 1}, []),
        ([1, 1], {"min": 1, "depth": 2}, [1, 1]),
    ],
)
def test_what_followed_before_is_proposed(token_ids: list[int], options: dict[str, int], drafts: list[int]) -> None:
    assert ngram(token_ids, **options) == drafts


def test_matches_are_those_of_a_plain_search() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        token_ids = rng.integers(0, 3, rng.integers(1, 40))
        tokens, most = token_ids.tolist(), int(rng.integers(1, 6))
        expected: tuple[list[int], int] = ([], 0)
        for length in range(1, most + 1):
            ends = [end for end in range(length, len(tokens)) if tokens[end - length : end] == tokens[-length:]]
            if ends and length <= len(tokens):
                expected = (ends, length)
        found = find_longest_match(token_ids, most)
        assert (found.ends.tolist(), found.length) == expected


def test_what_is_searched_is_bounded() -> None:
    token_ids = [1, 2, 3] + [4] * 40_000 + [1, 2]
    assert ngram(token_ids) == []


# -- suffix -----------------------------------------------------------------------------------------------------------


def context(token_ids: list[int], num_prompt_tokens: int = 0, root: bytes = b"a") -> Context:
    return Context(RequestId("x"), np.array(token_ids), num_prompt_tokens=num_prompt_tokens, root=root)


def suffix(*outputs: Context, memory: int = 1 << 20, depth: int = 8) -> SuffixProposer:
    proposer = SuffixProposer(SuffixOptions(memory=memory, depth=depth))
    proposer.forget(outputs)
    return proposer


def drafts_of(proposer: SuffixProposer, token_ids: list[int], root: bytes = b"a") -> list[int]:
    (drafts,) = proposer.propose([context(token_ids, root=root)])
    assert proposer.check() == []
    return drafts


def test_outputs_of_earlier_requests_are_proposed_as_far_as_tokens_match() -> None:
    proposer = suffix(context([1, 2, 3, 4, 5, 6, 7, 8, 9]))
    assert drafts_of(proposer, [50, 1, 2, 3]) == [4, 5, 6]
    assert drafts_of(proposer, [50, 1, 2, 3, 4]) == [5, 6, 7, 8]
    assert drafts_of(proposer, [50, 5, 6, 7]) == [8, 9]  # the output ends
    assert drafts_of(proposer, [50, 2, 3]) == []
    assert drafts_of(proposer, [50, 2, 4, 3]) == []


def test_what_followed_most_often_is_proposed_until_less_than_half_agrees() -> None:
    outputs = [[1, 2, 3, 4, 6, 7], [1, 2, 3, 4, 6, 8], [1, 2, 3, 5, 6, 7], [1, 2, 3, 4, 9, 9]]
    proposer = suffix(*map(context, outputs))
    assert drafts_of(proposer, [1, 2, 3]) == [4, 6]
    proposer = suffix(*map(context, outputs), *[context([1, 2, 3, each]) for each in range(10, 20)])
    assert drafts_of(proposer, [1, 2, 3]) == []


def test_a_longer_match_counts_more_whosever_it_is() -> None:
    proposer = suffix(context([9, 1, 2, 3, 4]), context([8, 1, 2, 3, 5]))
    assert drafts_of(proposer, [8, 1, 2, 3]) == [5]
    assert drafts_of(proposer, [9, 1, 2, 3]) == [4]
    assert drafts_of(proposer, [7, 1, 2, 3, 6, 0, 7, 1, 2, 3]) == [6, 0, 7, 1]


def test_prompts_are_not_learnt_but_for_where_the_answer_begins() -> None:
    prompt = list(range(100, 140))
    proposer = suffix(context([*prompt, 1, 2, 3], len(prompt)), context(prompt, len(prompt)))
    assert drafts_of(proposer, prompt) == [1, 2, 3]
    assert drafts_of(proposer, prompt[:20]) == []
    assert proposer._history.num_tokens == 16 + 3


def test_tenants_learn_nothing_of_each_other() -> None:
    proposer = suffix(context([1, 2, 3, 4, 5, 6], root=b"a"), context([1, 2, 3, 7, 8, 9], root=b"b"))
    assert drafts_of(proposer, [1, 2, 3], b"a") == [4, 5, 6]
    assert drafts_of(proposer, [1, 2, 3], b"b") == [7, 8, 9]
    assert drafts_of(proposer, [1, 2, 3], b"c") == []


def test_the_oldest_outputs_make_room_for_new_ones() -> None:
    rng = np.random.default_rng(1)
    proposer = suffix()
    size = (1 << 20) // 24
    outputs = [rng.integers(0, 1000, rng.integers(1, 3000)).tolist() for _ in range(120)]
    for number, output in enumerate(outputs):
        proposer.forget([context(output)])
        if number % 10 == 0:
            assert proposer.check() == []
    newest = [each for number, each in enumerate(outputs) if sum(map(len, outputs[number:])) + 120 - number < size]
    assert 10 < len(newest) < 100
    for output in newest:
        if len(output) > 30:
            assert drafts_of(proposer, output[:20]) == output[20:28]
    forgotten = outputs[: 110 - len(newest)]
    assert all(drafts_of(proposer, output[:20]) == [] for output in forgotten if len(output) > 30)
    assert size - 200 < proposer._history.num_tokens < size
    proposer.forget([context(rng.integers(0, 1000, 2 * size).tolist())])  # more than there is room for
    assert proposer.check() == []
    assert proposer._history.num_tokens == size - 1


@pytest.mark.parametrize("array", ["_tagged", "_newest", "_before"])
def test_a_history_that_is_wrong_is_noticed(array: str) -> None:
    proposer = suffix(context([1, 2, 3, 4, 5, 6, 7]))
    values = getattr(proposer._history, array)
    values[np.flatnonzero(values)[0] if array != "_before" else 5] += 1 if array != "_before" else 100
    assert proposer.check() != []


def test_what_is_found_is_what_a_plain_search_of_the_last_outputs_finds() -> None:
    rng = np.random.default_rng(2)
    proposer = suffix()
    size, vocab = (1 << 20) // 24, 40
    written: list[int] = []
    while len(written) < 2 * size:
        output = rng.integers(0, vocab, rng.integers(1, 500)).tolist()
        proposer.forget([context(output)])
        written += [*output, -1]
    ring = ",".join(["", *map(str, written[-size:]), ""])
    num_found = 0
    for _ in range(200):
        at = int(rng.integers(size, len(written) - 20))
        tokens = [abs(each) for each in written[at : at + 4]]
        found = proposer._history.find(b"a", np.array(tokens), 1)
        expected = next(
            (length, count)
            for length in (4, 3, 0)
            if (count := ring.count("," + ",".join(map(str, tokens[-length:])) + ",")) or not length
        )
        if found.length or expected[0]:
            assert (found.length, len(found.continuations)) == expected
            num_found += 1
    assert num_found > 100

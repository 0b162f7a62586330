"""SLOs, the search for the highest rate, and the test that tells a difference from noise."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
from collections.abc import Sequence

import pytest

from common.errors import ConfigError
from loadgen.compare import holm, order, rank_sum_p
from loadgen.endpoint import Prompt
from loadgen.samples import Sample
from loadgen.slo import parse_slo
from loadgen.sweep import Found, Try, attainment_alone, highest_rate
from loadgen.workload import Conversation, Turn


def test_slos_are_spelled_as_vllm_does() -> None:
    assert parse_slo(["ttft:500", "itl:50"]) == {"ttft": 0.5, "itl": 0.05}
    for text in ("ttft", "ttft:x", "ttft:0", "ttft:nan", "ttft:inf", "latency:5"):
        with pytest.raises(ConfigError, match="--goodput: expected NAME:MILLISECONDS"):
            parse_slo([text])
    with pytest.raises(ConfigError, match="ttft is given twice"):
        parse_slo(["ttft:5", "ttft:6"])


def found(limit: float, start: float, precision: float = 0.05, alone: float = 1.0) -> Found:
    tries: list[Try] = []

    async def measure(rate: float) -> float:
        return 1.0 if rate <= limit else 0.9

    async def measure_alone() -> float:
        return alone

    search = highest_rate(
        measure, measure_alone, start=start, attainment=0.99, precision=precision, on_try=tries.append
    )
    result = asyncio.run(search)
    assert tries == result.tries
    return result


@pytest.mark.parametrize(("limit", "start"), [(13.0, 1.0), (13.0, 100.0), (1.0, 1.0)])
def test_the_highest_rate_is_between_what_keeps_and_what_breaks(limit: float, start: float) -> None:
    result = found(limit, start)
    assert result.kept is not None
    assert result.broken is not None
    assert result.kept <= limit < result.broken <= result.kept * 1.05
    assert len(result.tries) < 14


def test_a_search_without_an_end_says_so() -> None:
    assert found(1e9, 1.0).broken is None
    assert found(0.0, 1.0).kept is None
    assert "no rate keeps the SLOs" in found(0.0, 1.0).summary
    assert "within" in found(13.0, 1.0).summary


def test_slos_that_requests_alone_do_not_keep_end_the_search() -> None:
    hopeless = found(0.0, 1.0, alone=0.25)
    assert [each.rate for each in hopeless.tries] == [1.0]
    assert hopeless.kept is None
    assert "of requests sent one at a time 25.0% kept them" in hopeless.summary
    assert found(13.0, 1.0, alone=0.25).kept is not None  # a rate that keeps them is not questioned


class _InTurn:
    """Takes one request at a time; each but the first is as fast as it says."""

    def __init__(self, ttft_s: float) -> None:
        self.num_requests = 0
        self._ttft_s = ttft_s
        self._is_busy = False

    async def ask(self, prompt: Prompt, num_output_tokens: int | None, sample: Sample) -> str:
        assert not self._is_busy
        self._is_busy = True
        await asyncio.sleep(0)
        self._is_busy = False
        self.num_requests += 1
        sample.token_times = [sample.sent_s + (self._ttft_s if self.num_requests > 1 else 0.0)]
        return ""

    def conversation(self, said: Sequence[tuple[str, str]], text: str) -> Prompt:
        return text


@pytest.mark.parametrize(
    ("ttft_s", "attainment", "num_sent", "share"), [(0.1, 0.99, 20, 1.0), (1.0, 0.99, 2, 0.5), (1.0, 0.55, 11, 1 / 11)]
)
def test_requests_alone_are_sent_until_too_many_miss(
    ttft_s: float, attainment: float, num_sent: int, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        gc, "collect", lambda: None
    )  # before each request; a second in a process that has run many tests
    endpoint = _InTurn(ttft_s)
    conversations = [Conversation(None, [Turn("", 1)])] * 20
    kept = asyncio.run(attainment_alone(conversations, endpoint, {"ttft": 0.5}, attainment=attainment))
    assert (endpoint.num_requests, kept) == (num_sent, pytest.approx(share))


def brute_force_p(a: list[float], b: list[float]) -> float:
    """The share of all ways to deal the values out that are as far from the middle."""
    values = a + b
    ranks = [sum(x < y for x in values) + (sum(x == y for x in values) + 1) / 2 for y in values]
    middle = len(a) * sum(ranks) / len(ranks)
    observed = abs(sum(ranks[: len(a)]) - middle)
    sums = [abs(sum(chosen) - middle) for chosen in itertools.combinations(ranks, len(a))]
    return sum(each >= observed - 1e-9 for each in sums) / len(sums)


def test_the_rank_sum_test_is_exact() -> None:
    choices = random.Random(3)
    for _ in range(30):
        a = [float(choices.randint(0, 8)) for _ in range(choices.randint(1, 5))]
        b = [float(choices.randint(2, 10)) for _ in range(choices.randint(1, 5))]
        assert rank_sum_p(a, b) == pytest.approx(brute_force_p(a, b))
    assert rank_sum_p([1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]) == pytest.approx(2 / 924)


def test_p_values_are_corrected_for_their_number() -> None:
    assert holm([0.01, 0.5, 0.02]) == pytest.approx([0.03, 0.5, 0.04])
    assert holm([0.6, 0.7]) == [1.0, 1.0]


def test_equal_endpoints_seldom_differ() -> None:
    choices = random.Random(7)
    alarms = 0
    for _ in range(300):
        columns = [[choices.gauss(0, 1) for _ in range(12)] for _ in range(6)]
        alarms += min(holm([rank_sum_p(column[:6], column[6:]) for column in columns])) < 0.05
    assert alarms <= 15 + 10  # one in twenty, and some luck


def test_each_side_is_first_and_last_as_often() -> None:
    assert order(3) == "ABBAABBAABBA"

"""The benchmark of the router runs, and its figures say what they claim. No test looks at a time."""

from __future__ import annotations

import pytest

from benchmarks.router import __main__ as benchmark
from benchmarks.router.__main__ import main
from benchmarks.router.decisions import Times
from benchmarks.router.measure import Answers, Idle, Results, StreamLoad, Streams, measure
from benchmarks.router.report import make_page, verdicts
from benchmarks.router.systems import NO_ROUTER, OURS, RIVAL, baton

TINY = benchmark.Plan(
    repeats=2,
    concurrency=(2,),
    num_answers=4,
    streams=(StreamLoad(3, 5, 0.0), StreamLoad(3, 3, 0.001)),
    idle_streams=(2, 4),
    decision_pods=(2,),
    decision_blocks=(100,),
)


@pytest.mark.slow
def test_run_without_the_rival_measures_everything():
    """The load generator raises if a stream does not end as it should, so this is a test of the fake pods as well."""
    results = measure(TINY, [baton], lambda _: None)
    assert [*results.answers] == [(OURS, 2)]
    assert [*results.streams] == [(name, load) for name in (OURS, NO_ROUTER) for load in TINY.streams]
    assert all(streams.tokens_per_event >= 1 for streams in results.streams.values()), "each token was sent once"
    assert [*results.idle] == [(OURS, 2), (OURS, 4)]
    assert f"{RIVAL} was not measured" in str(make_page({}, results))


@pytest.mark.slow
def test_quick_run_beside_the_rival(tmp_path):
    pytest.importorskip("sglang_router", reason="the extra `bench` is not installed")
    page = tmp_path / "router.md"
    assert main(["--quick", "--markdown", str(page)]) == 0
    assert f"| {RIVAL} | " in page.read_text()


def _results(added_s: float = 0.001, rate: float = 15_000, size: float = 39_999, decision_us: float = 199) -> Results:
    results = Results(versions={OURS: "1", RIVAL: "2"})
    slow = Answers(100.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0)
    results.answers = {(OURS, 1): slow._replace(added_p50_s=added_s), (OURS, 64): slow, (RIVAL, 1): slow}
    load = StreamLoad(64, 100, 0.02)
    results.streams = {(OURS, load): Streams(rate, 3000.0, 1.0), (RIVAL, load): Streams(1.0, 1.0, 1.0)}
    results.idle = {(OURS, 512): Idle(size), (RIVAL, 512): Idle(1e6)}
    results.decisions = [Times(2, 100, 1e6, 1e6, 1.0), Times(512, 1_000_000, decision_us, 999.0, 1.0)]
    return results


def test_targets_are_met_by_figures_within_them():
    assert [verdict.is_met for verdict in verdicts(_results())] == [True] * 4


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        ({"added_s": 0.003}, "added latency"),
        ({"rate": 14_999}, "streamed tokens/s"),
        ({"size": 40_000}, "memory per open stream"),
        ({"decision_us": 200}, "decision"),
    ],
)
def test_each_target_is_judged_by_our_own_figures_alone(figures, missed):
    failed = [verdict for verdict in verdicts(_results(**figures)) if not verdict.is_met]
    assert [missed in verdict.target for verdict in failed] == [True]


def test_page_has_both_systems():
    page = str(make_page({"cores": "2"}, _results()))
    assert "- sglang-router: 2" in page
    assert "| 64 | 50 | baton | 15,000 | 3,000 | 1.00 |" in page

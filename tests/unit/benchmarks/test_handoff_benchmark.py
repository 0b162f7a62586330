"""The benchmark of handoffs runs, and its figures say what they claim. No test looks at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.handoff.__main__ import QUICK, main
from benchmarks.handoff.loads import AtOnce, Beside, Handoffs
from benchmarks.handoff.measure import ROWS, Benchmark, Cell, Results, Taken
from benchmarks.handoff.report import Figure, make_page, report
from benchmarks.harness.checkouts import BEFORE, NOW, ROOT, checkout_of, sides_of
from benchmarks.harness.figures import p99
from benchmarks.harness.models import demo_model


@pytest.mark.slow
def test_quick_run_writes_its_tables(tmp_path):
    page = tmp_path / "handoff.md"
    assert main(["--quick", "--rows", "1", "--markdown", str(page)]) == 0
    assert page.read_text().count("| shared-storage | now | ") == 2


@pytest.mark.slow
def test_quick_run_of_all_rows_beside_another_checkout(tmp_path):
    sides = sides_of(checkout_of(ROOT))
    results = Benchmark(QUICK, sides, demo_model(), tmp_path, lambda _: None).run(ROWS)
    assert list(results.taken) == [NOW, BEFORE]
    for taken in results.taken.values():
        assert all(len(handoffs.gaps) >= 2 for handoffs in taken.handoffs.values())
        assert len(taken.first_gaps) == 8
        assert all(beside.gaps for beside in taken.beside)
        assert [len(at_once.ttfts) for at_once in taken.at_once] == [8]
        assert taken.itls.keys() == taken.steps.keys() == {1, 2}


def test_before_must_be_a_checkout(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--before", str(tmp_path)])
    assert "is not a checkout" in capsys.readouterr().err


def _taken(scale: float = 1.0) -> Taken:
    """Figures that meet all targets at 1, measured on a pod whose steps take 10 ms."""
    return Taken(
        handoffs={
            Cell("nixl", 0.25): Handoffs([0.004] * 98 + [0.019 * scale] * 2, decode_s=0.01, step_s=0.25),
            Cell("nixl", 2.0): Handoffs([0.004 * scale] * 100, decode_s=0.01, step_s=2.0),
        },
        first_gaps=[1.5 * scale, 1.5 * scale, 4.0],
        beside=[
            Beside([0.02] * 98 + [0.09 * scale] * 2, tokens_per_s=300.0 / scale, decode_s=0.01, least_prompt_s=0.05)
        ],
        at_once=[AtOnce([0.7 * scale] * 8, tokens_per_s=1000.0 / scale)],
        itls={1: [0.0105 * scale]},
        steps={1: [0.01]},
    )


def _figure(figures: list[Figure], words: str) -> Figure:
    (found,) = (figure for figure in figures if words in figure.what)
    return found


def test_targets_are_met_by_figures_within_them():
    before = replace(_taken(), beside=[Beside([3.0], 100.0, 0.01, 0.05)], at_once=[AtOnce([1.0] * 8, 1000.0)])
    figures = report(Results({BEFORE: before, NOW: _taken()}))
    assert [figure for figure in figures if not figure.is_met] == []
    assert list(_figure(figures, "throughput of the streams").cells)[5] == "3.00"


@pytest.mark.parametrize(
    ("words", "scale"),
    [
        ("handoff p50", 1.3),
        ("handoff p99", 1.1),
        ("growth of the p50", 5.0),
        ("first and second token, ITLs, p50", 1.4),
        ("ITL p99 beside", 1.2),
        ("throughput of the streams", 1.1),
        ("TTFT p50", 1.2),
        ("throughput of the prompts", 1.1),
        ("ITL / step offline", 1.1),
    ],
)
def test_each_target_is_missed_by_figures_beyond_it(words, scale):
    before = replace(_taken(), beside=[Beside([3.0], 100.0, 0.01, 0.05)], at_once=[AtOnce([1.0] * 8, 1000.0)])
    assert _figure(report(Results({BEFORE: before, NOW: _taken(scale)})), words).is_met is False


def test_without_an_older_checkout_there_is_nothing_to_be_faster_than():
    figures = report(Results({NOW: _taken()}))
    assert {figure.what for figure in figures if figure.is_met is None} == {
        "throughput of the streams",
        "TTFT p50",
        "throughput of the prompts",
    }


def test_p99_of_few_samples_is_the_worst():
    assert p99([3.0, 1.0, 2.0]) == 3.0
    assert p99([*range(1, 201)]) == 198


def test_page_has_both_sides():
    page = str(make_page({"cores": "2"}, Results({BEFORE: _taken(), NOW: _taken()})))
    assert "| nixl | before | 2.00 | 4.0 | 4.0 | 100 | 10.0 |" in page

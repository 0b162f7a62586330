"""The benchmark of the gateway runs, and its figures say what they claim. No test looks at a time."""

from __future__ import annotations

import pytest

from benchmarks.gateway import __main__ as benchmark
from benchmarks.gateway import measure
from benchmarks.gateway.__main__ import main
from benchmarks.gateway.measure import Cost, Results, Router
from benchmarks.gateway.report import make_page, verdicts
from benchmarks.gateway.workload import SETUPS
from benchmarks.harness.checkouts import ROOT, checkout_of
from benchmarks.router.measure import StreamLoad

TINY = benchmark.Plan(
    repeats=2, concurrency=2, num_answers=3, fast=StreamLoad(2, 4, 0.0), paced=StreamLoad(2, 3, 0.001)
)


@pytest.mark.slow
def test_every_api_is_measured():
    """The load generator raises if an answer is an error, or a stream does not end as it should."""
    results = measure.measure(TINY, Router(), None, lambda _: None)
    names = [case.name for setup in SETUPS for case in setup.cases]
    assert list(results.now) == names
    assert results.before == {}
    page = str(make_page({}, TINY, results))
    for name in names:
        assert f"| {name} | " in page
        assert len(results.now[name]) == 2
        assert min(map(min, results.now[name])) > 0


@pytest.mark.slow
def test_next_to_a_checkout(monkeypatch):
    """A case of which the older checkout knows nothing has no figures of it."""
    first, second, *_ = SETUPS[0].cases
    monkeypatch.setattr(measure, "SETUPS", [SETUPS[0]._replace(cases=(first, second))])
    has = measure.has
    unknown = second._replace(call=second.call._replace(path="/v1/none"))
    monkeypatch.setattr(
        measure, "has", lambda system, load, case: has(system, load, unknown if case == second else case)
    )
    results = measure.measure(TINY, Router(), Router(checkout_of(ROOT)), lambda _: None)
    assert (list(results.now), list(results.before)) == (["completion", "chat"], ["completion"])
    assert "at most 3 % more than before" in str(make_page({}, TINY, results))


@pytest.mark.slow
def test_what_an_older_checkout_lacks_is_left_out(tmp_path, monkeypatch):
    older = tmp_path / "older"  # which does not know the options of this setup, say
    (older / "router").mkdir(parents=True)
    (older / "router" / "__main__.py").write_text("import sys\nsys.exit(2)\n")
    monkeypatch.setattr(measure, "SETUPS", [SETUPS[0]._replace(cases=SETUPS[0].cases[:1])])
    results = measure.measure(TINY, Router(), Router(checkout_of(older)), lambda _: None)
    assert (list(results.now), results.before) == (["completion"], {})
    with pytest.raises(SystemExit, match="2"):
        main(["--before", str(tmp_path)])


def results_of(*, request_s=1.5e-3, token_s=60e-6, times=1.03):
    results = Results()
    results.now["chat"] = [Cost(request_s, token_s, 1e-4)] * 3
    results.now["new"] = [Cost(1e-3, 1e-5, 1e-4)]
    results.before["chat"] = [Cost(request_s / times, token_s, 1e-4)] * 3
    return results


def test_targets_are_met_by_figures_within_them():
    assert [verdict.is_met for verdict in verdicts(results_of(times=1.0299))] == [True] * 7


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        ({"request_s": 1.51e-3}, "chat: at most 1.5 ms"),
        ({"token_s": 61e-6}, "chat: at most 60 us"),
        ({"times": 1.031}, "chat: at most 3 % more than before per request"),
    ],
)
def test_each_target_is_judged(figures, missed):
    failed = [verdict for verdict in verdicts(results_of(**{"times": 1.0, **figures})) if not verdict.is_met]
    assert [missed in verdict.target for verdict in failed] == [True]


def test_differences_are_those_of_pairs():
    results = results_of()
    results.now["chat"] = [Cost(1.0, 1.0, 1.0), Cost(2.0, 2.0, 1.0), Cost(9.0, 3.0, 1.0)]
    results.before["chat"] = [Cost(1.0, 2.0, 1.0), Cost(1.0, 4.0, 1.0), Cost(6.0, 6.0, 1.0)]
    assert results.ratios == {"chat": Cost(1.5, 0.5, 1.0)}
    page = str(make_page({"cores": "2"}, TINY, results))
    assert (
        "| chat | 2000.00 | 1000.00 | +50.0 % | 2000000.0 | 4000000.0 | -50.0 % | 1000000.0 | 1000000.0 | +0.0 % |"
        in page
    )
    assert "| new | 1.00 | - | - | 10.0 | - | - | 100.0 | - | - |" in page


def test_counting_needs_valgrind(monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="2"):
        main(["--instructions", "--quick"])
    assert "--instructions: valgrind is not installed" in capsys.readouterr().err

"""What the benchmark of neighbours sends, and what it makes of what came."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.neighbours.attacks import ATTACKS, MAX_BODY_BYTES, body_of
from benchmarks.neighbours.measure import MAX_GAP_S, MAX_GRAMMAR_S, Plan, Row
from benchmarks.neighbours.neighbour import Asked, Sight, gaps_of
from benchmarks.neighbours.report import cells_of, open_page
from benchmarks.neighbours.target import Target
from common.demo_model import demo_model_path
from loadgen.events import AnswerReader

QUIET = Sight(gaps_s=[0.01, 0.02], ttfts_s=[0.03], grammars_s=[0.05], late_s=0.001, failures=[])


@pytest.fixture(scope="module")
def target() -> Target:
    return Target.of("demo", demo_model_path())


@pytest.mark.parametrize("name", ATTACKS)
def test_each_attack_has_a_body_that_is_read(name: str, target: Target) -> None:
    request = ATTACKS[name].request(target, 3)
    body = body_of(request, target)
    assert len(body) <= MAX_BODY_BYTES
    assert json.loads(body)["model"] == "demo"


def test_a_gap_counts_also_if_it_has_not_ended() -> None:
    reader = AnswerReader()
    reader.times = [1.0, 2.0, 2.5, 4.0]
    under_way = Asked(0.5, reader)
    assert gaps_of(under_way, 1.5, 9.0) == [1.0, 0.5, 1.5, 5.0]
    assert gaps_of(under_way, 3.0, 3.5) == [1.0]
    ended = Asked(0.5, reader, has_ended=True)
    assert gaps_of(ended, 1.5, 9.0) == [1.0, 0.5, 1.5]


@pytest.mark.parametrize(
    ("beside", "problems"),
    [
        (QUIET, []),
        (replace(QUIET, gaps_s=[0.01, MAX_GAP_S * 1.01]), ["gap"]),
        (replace(QUIET, grammars_s=[MAX_GRAMMAR_S * 1.1]), ["grammar"]),
        (replace(QUIET, grammars_s=[MAX_GRAMMAR_S * 1.1], ttfts_s=[MAX_GRAMMAR_S]), []),  # all short answers wait
        (replace(QUIET, failures=["status 503"]), ["1 failed"]),
    ],
)
def test_what_a_neighbour_must_not_see(beside: Sight, problems: list[str]) -> None:
    row = Row("cancelled", "1P1D", QUIET, beside, {"left": 3})
    assert row.problems == problems
    page = open_page({}, Plan(seconds=1.0, quiet_s=1.0, streams=1, layouts=["1P1D"]))
    cells = cells_of(row)
    assert max(line.count(" | ") for line in str(page).splitlines()) == len(cells) - 1
    assert cells[-1].startswith("**FAIL**") == bool(problems)

"""Tables of simulated runs, and what they say about the targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.harness.report import table
from planning.simulator.cluster import Outcome, hit_rate

_GOOD_TTFT_S, _GOOD_TPOT_S = 0.5, 0.025
_BASELINES = ("round_robin", "least_loaded")
_KEPT = 0.9  # by each of several routers, of one router's hit rate
_TOLERATED = 1.02  # of the better baseline's time, where nothing is shared


class Row(NamedTuple):
    """One policy on one trace."""

    trace: str
    shares: bool
    policy: str
    outcome: Outcome

    @property
    def cells(self) -> list[str]:
        """Returns the row of a table."""
        outcome = self.outcome
        return [
            self.trace,
            self.policy,
            *(f"{outcome.ttft(percentile) * 1e3:.0f}" for percentile in (50, 99)),
            *(f"{outcome.itl(percentile) * 1e3:.1f}" for percentile in (50, 99)),
            f"{outcome.goodput(_GOOD_TTFT_S, _GOOD_TPOT_S):.1f}",
            f"{outcome.hit_rate:.0%}",
            f"{outcome.local_share:.0%}",
        ]


class Verdict(NamedTuple):
    """kv_aware next to the better of round robin and least loaded."""

    trace: str
    percentile: int  # of the TTFT
    ratio: float  # below 1: kv_aware is ahead
    holds: bool


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Whether kv_aware beats both wherever prompts share something, and is at most 2 % worse where they do not."""
    found = []
    for trace in dict.fromkeys(row.trace for row in rows):
        outcomes = {row.policy: row for row in rows if row.trace == trace}
        if "kv_aware" not in outcomes or not all(name in outcomes for name in _BASELINES):
            continue
        ours = outcomes["kv_aware"]
        for percentile in (50, 99):
            best = min(outcomes[name].outcome.ttft(percentile) for name in _BASELINES)
            ratio = ours.outcome.ttft(percentile) / best
            found.append(Verdict(trace, percentile, ratio, ratio < 1 if ours.shares else ratio <= _TOLERATED))
    return found


class RouterRow(NamedTuple):
    """Several routers on one trace, next to a single one."""

    trace: str
    one: Outcome
    several: Sequence[Outcome]

    @property
    def kept(self) -> float:
        """Hit rate of the worst of all routers, over that of the single one on the same requests."""
        return min(self._kept(outcome) for outcome in self.several)

    @property
    def holds(self) -> bool:
        """Whether each of several has nearly the hit rate of one."""
        return self.kept >= _KEPT

    @property
    def rows(self) -> Iterator[list[object]]:
        """Yields rows of a table, one per number of routers."""
        for outcome in (self.one, *self.several):
            times = (f"{outcome.ttft(percentile) * 1e3:.0f}" for percentile in (50, 99))
            goodput = f"{outcome.goodput(_GOOD_TTFT_S, _GOOD_TPOT_S):.1f}"
            shares = (f"{outcome.hit_rate:.1%}", f"{self._kept(outcome):.1%}")
            yield [self.trace, _num_routers(outcome), *times, goodput, *shares]

    def _kept(self, outcome: Outcome) -> float:
        """By the router that has lost most."""
        alone = {(each.session, each.turn): each for each in self.one.served}
        ratios = []
        for router in range(_num_routers(outcome)):
            mine = [each for each in outcome.served if each.router == router]
            best = hit_rate([alone[each.session, each.turn] for each in mine])
            ratios.append(hit_rate(mine) / best if best else 1.0)
        return min(ratios)


def _num_routers(outcome: Outcome) -> int:
    return 1 + max(each.router for each in outcome.served)


def routers_table(rows: Sequence[RouterRow]) -> list[str]:
    """Returns the lines of a section: how several routers do next to one."""
    columns = "trace | routers | TTFT p50, ms | TTFT p99, ms | goodput, 1/s | cached | kept by the worst"
    lines = table(columns, (cells for row in rows for cells in row.rows))
    found = (f"{row.trace}: target {'met' if row.holds else 'missed'}, {row.kept:.1%} kept" for row in rows)
    return [*lines, "", *found]


def policies_table(rows: Sequence[Row], judged: Sequence[Verdict]) -> list[str]:
    """Returns the lines of a section: table and verdicts."""
    columns = "trace | policy | TTFT p50, ms | TTFT p99, ms | ITL p50, ms | ITL p99, ms | goodput, 1/s | cached | local"
    targets = []
    for p50, p99 in zip(judged[::2], judged[1::2], strict=True):
        met = "met" if p50.holds and p99.holds else "missed"
        targets.append((p50.trace, f"{p50.ratio:.2f}", f"{p99.ratio:.2f}", met))
    words = "kv_aware's TTFT over that of the better of round robin and least loaded; below 1 it is ahead:"
    lines = table(columns, (row.cells for row in rows))
    return [*lines, "", words, "", *table("trace | p50 | p99 | target", targets)]

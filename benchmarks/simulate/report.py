"""Tables of simulated runs, and what they say about the targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

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
    def line(self) -> str:
        """Returns the row of a table."""
        outcome = self.outcome
        figures = [
            f"{outcome.ttft(50) * 1e3:.0f}",
            f"{outcome.ttft(99) * 1e3:.0f}",
            f"{outcome.itl(50) * 1e3:.1f}",
            f"{outcome.itl(99) * 1e3:.1f}",
            f"{outcome.goodput(_GOOD_TTFT_S, _GOOD_TPOT_S):.1f}",
            f"{outcome.hit_rate:.0%}",
            f"{outcome.local_share:.0%}",
        ]
        return "| " + " | ".join([self.trace, self.policy, *figures]) + " |"


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
    def lines(self) -> list[str]:
        """Returns rows of a table, one per number of routers."""
        return [
            f"| {self.trace} | {_num_routers(outcome)} | {outcome.ttft(50) * 1e3:.0f} | {outcome.ttft(99) * 1e3:.0f} "
            f"| {outcome.goodput(_GOOD_TTFT_S, _GOOD_TPOT_S):.1f} | {outcome.hit_rate:.1%} "
            f"| {self._kept(outcome):.1%} |"
            for outcome in (self.one, *self.several)
        ]

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


def format_routers(title: str, rows: Sequence[RouterRow]) -> str:
    """A section: how several routers do next to one."""
    lines = [
        f"## {title}",
        "",
        "| trace | routers | TTFT p50, ms | TTFT p99, ms | goodput, 1/s | cached | kept by the worst |",
        "|---|---|---|---|---|---|---|",
        *(line for row in rows for line in row.lines),
        "",
        *(f"{row.trace}: target {'met' if row.holds else 'missed'}, {row.kept:.1%} kept" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def format_markdown(title: str, rows: Sequence[Row], judged: Sequence[Verdict]) -> str:
    """A section: table and verdicts."""
    lines = [
        f"## {title}",
        "",
        "| trace | policy | TTFT p50, ms | TTFT p99, ms | ITL p50, ms | ITL p99, ms | goodput, 1/s | cached | local |",
        "|---|---|---|---|---|---|---|---|---|",
        *(row.line for row in rows),
        "",
        "kv_aware's TTFT over that of the better of round robin and least loaded; below 1 it is ahead:",
        "",
        "| trace | p50 | p99 | target |",
        "|---|---|---|---|",
    ]
    for p50, p99 in zip(judged[::2], judged[1::2], strict=True):
        met = "met" if p50.holds and p99.holds else "missed"
        lines.append(f"| {p50.trace} | {p50.ratio:.2f} | {p99.ratio:.2f} | {met} |")
    return "\n".join(lines) + "\n"

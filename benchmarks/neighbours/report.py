"""The figures as a page of markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.neighbours.attacks import ATTACKS
from benchmarks.neighbours.measure import MAX_GAP_S, MAX_GRAMMAR_S, TARGET_ITL_S, Plan, Row

_HEAD = (
    "| attack | cluster | worst gap, ms | p99 gap | / ITL target | quiet worst | quiet p99 | TTFT median, ms | worst "
    "| new grammar, worst, ms | attacker's answers | |"
)


def problems_of(row: Row) -> list[str]:
    """What the neighbour must not see; empty: it did not."""
    sight = row.beside
    found = []
    if sight.gaps_s[-1] > MAX_GAP_S:
        found.append("gap")
    # What a short answer without a grammar waits for is no matter of grammars.
    if sight.grammars_s and sight.grammars_s[-1] - sight.ttfts_s[-1] > MAX_GRAMMAR_S:
        found.append("grammar")
    if sight.failures:
        found.append(f"{len(sight.failures)} failed")
    return found


def format_row(row: Row) -> str:
    """One line of the table."""
    quiet, beside = row.quiet, row.beside
    found = problems_of(row)
    cells = [
        row.attack,
        row.layout,
        _ms(beside.gaps_s[-1]),
        _ms(_p99(beside.gaps_s)),
        f"{beside.gaps_s[-1] / TARGET_ITL_S:.1f}",
        _ms(quiet.gaps_s[-1]),
        _ms(_p99(quiet.gaps_s)),
        *((_ms(beside.ttfts_s[len(beside.ttfts_s) // 2]), _ms(beside.ttfts_s[-1])) if beside.ttfts_s else ("", "")),
        _ms(beside.grammars_s[-1]) if beside.grammars_s else "",
        ", ".join(f"{count} {end}" for end, count in sorted(row.ends.items())),
        f"**FAIL**: {', '.join(found)}" if found else "pass",
    ]
    return f"| {' | '.join(cells)} |"


def format_page(machine: Mapping[str, str], plan: Plan, rows: Sequence[Row], note: str) -> str:
    """The page that a run writes."""
    late_s = max(max(row.quiet.late_s, row.beside.late_s) for row in rows)
    streams = f"{plan.streams} streams" if plan.streams > 1 else "one stream"
    lines = [
        "# What one client can do to another",
        "",
        "`python -m benchmarks.neighbours`, whose help says what is measured.",
        "",
        *(f"- {name}: {value}" for name, value in machine.items()),
        f"- neighbour: {streams}, watched for {plan.quiet_s:g} s before each attack and {plan.seconds:g} s beside it",
        f"- lateness of its own event loop: {late_s * 1e3:.0f} ms at most",
        "",
        *([note, ""] if note else []),
        _HEAD,
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *map(format_row, rows),
        "",
        "## What was sent",
        "",
        "| attack | |",
        "|---|---|",
    ]
    sent = [name for name in ATTACKS if any(row.attack == name for row in rows)]
    lines += [f"| {name} | {ATTACKS[name].sent.replace('|', chr(92) + '|')} |" for name in sent]
    return "\n".join(lines) + "\n"


def format_head() -> str:
    """The first lines of the table."""
    return f"{_HEAD}\n|{'---|' * _HEAD.count(' | ')}---|"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"


def _p99(values: Sequence[float]) -> float:
    return values[min(len(values) - 1, len(values) * 99 // 100)]

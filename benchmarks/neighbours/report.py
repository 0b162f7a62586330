"""The figures as a page of markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.neighbours.attacks import ATTACKS
from benchmarks.neighbours.measure import TARGET_ITL_S, Plan, Row

_HEAD = (
    "| attack | cluster | worst gap, ms | p99 gap | / ITL target | quiet worst | quiet p99 | TTFT median, ms | worst "
    "| new grammar, worst, ms | attacker's answers | |"
)

_EXPLANATION = """\
Two tenants use one cluster of the demo model. The neighbour has streams, and asks for short answers beside them; the
attacker sends one kind of request. Gaps are those between tokens of one stream as the neighbour's process sees them; if
the next token has not come when the attack ends, the gap counts until then. They must not exceed twice the pods' ITL
target of 50 ms, and a grammar that is new must not wait a second longer than a short answer without one. "Quiet" is the
same cluster just before the attack. What an attack makes one process compute, others on the same cores wait for, and so
does any other work on the machine.

- Where the batch is full (`n=128`, two at once), a gap is at least a step of 256 requests: on one thread some 25 ms of
  processor time after short contexts, 180 ms after 3,000 tokens each. `target_itl_ms` bounds what of prompts is
  computed beside streams, not how many streams there are, which `max_num_seqs` does. Short answers wait for a slot.
  `max_concurrent` of an API key bounds what one client takes of the slots.
- Where as many requests come as the router can take (`cancelled`, `short requests`), a gap shows its queue of work,
  some 1.4 ms for each. `requests_per_minute` of an API key bounds them.
"""


def format_row(row: Row) -> str:
    """One line of the table."""
    quiet, beside = row.quiet, row.beside
    found = row.problems
    cells = [
        row.attack,
        row.layout,
        _ms(row.worst_gap_s),
        _ms(_p99(beside.gaps_s)),
        f"{row.worst_gap_s / TARGET_ITL_S:.1f}",
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
        "`python -m benchmarks.neighbours --markdown FILE`; `--list` names the attacks, `--only` takes some of them.",
        "",
        _EXPLANATION,
        *(f"- {name}: {value}" for name, value in machine.items()),
        f"- neighbour: {streams}, watched for {plan.quiet_s:g} s before each attack and {plan.seconds:g} s beside it",
        *([f"- tries of an attack: up to {plan.tries}, of which the best stands here"] if plan.tries > 1 else []),
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

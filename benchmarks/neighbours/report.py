"""The figures as a page of markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from benchmarks.harness.figures import p99
from benchmarks.harness.report import Page, table
from benchmarks.neighbours.attacks import ATTACKS
from benchmarks.neighbours.measure import TARGET_ITL_S, Plan, Row

_COLUMNS = (
    "attack | cluster | worst gap, ms | p99 gap | / ITL target | quiet worst | quiet p99 | TTFT median, ms | worst "
    "| new grammar, worst, ms | attacker's answers | "
)

_EXPLANATION = """\
`python -m benchmarks.neighbours --markdown FILE`; `--list` names the attacks, `--only` takes some of them.

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
  some 1.4 ms for each. `requests_per_minute` of an API key bounds them."""


def open_page(machine: Mapping[str, str], plan: Plan) -> Page:
    """Returns the page without results."""
    streams = f"{plan.streams} streams" if plan.streams > 1 else "one stream"
    facts = {
        **machine,
        "neighbour": f"{streams}, watched for {plan.quiet_s:g} s before each attack and {plan.seconds:g} s beside it",
        **({"tries of an attack": f"up to {plan.tries}, of which the best stands here"} if plan.tries > 1 else {}),
    }
    page = Page("What one client can do to another", _EXPLANATION, facts)
    page.add("", *table(_COLUMNS))
    return page


def cells_of(row: Row) -> list[str]:
    """Returns a row of the table."""
    quiet, beside = row.quiet, row.beside
    found = row.problems
    return [
        row.attack,
        row.layout,
        _ms(row.worst_gap_s),
        _ms(p99(beside.gaps_s)),
        f"{row.worst_gap_s / TARGET_ITL_S:.1f}",
        _ms(quiet.gaps_s[-1]),
        _ms(p99(quiet.gaps_s)),
        *((_ms(beside.ttfts_s[len(beside.ttfts_s) // 2]), _ms(beside.ttfts_s[-1])) if beside.ttfts_s else ("", "")),
        _ms(beside.grammars_s[-1]) if beside.grammars_s else "",
        ", ".join(f"{count} {end}" for end, count in sorted(row.ends.items())),
        f"**FAIL**: {', '.join(found)}" if found else "pass",
    ]


def close_page(page: Page, rows: Sequence[Row]) -> None:
    """Adds what was sent."""
    late_s = max(max(row.quiet.late_s, row.beside.late_s) for row in rows)
    page.add("", f"The neighbour's own event loop was late by {late_s * 1e3:.0f} ms at most.")
    page.section("What was sent")
    sent = [name for name in ATTACKS if any(row.attack == name for row in rows)]
    page.add(*table("attack | ", ((name, ATTACKS[name].sent.replace("|", "\\|")) for name in sent)))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.0f}"

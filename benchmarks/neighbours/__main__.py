"""Measures the harm that one client can do to the streams of another, on one cluster.

    python -m benchmarks.neighbours [--only NAME]... [--seconds 6] [--streams 4] [--layout 1P1D] [--tries 1]
                                    [--markdown FILE] [--quick] [--list]

A cluster of the demo model serves two tenants, each with an API key. The neighbour has a few streams; beside them it
asks for short answers, one after the other, and for answers under grammars that the cluster has not seen. The attacker
sends, for some seconds, one kind of request after the other that may be expensive. Both are processes of their own,
and the neighbour notes how late its own loop is, which is no fault of the cluster.

Measured are, as the neighbour sees them, the gaps between tokens, which must not exceed twice the ITL target of the
pods (100 ms), the time to first token of short answers, and of those under new grammars, which must stay below a
second. A gap counts from the last token even if the next has not come when the attack ends; so does what is still
waited for. What the neighbour sees just before each attack stands beside it.

Rows are measured with one prefill and one decode pod, and with one pod that does both, with one thread for each
engine. All share the machine's cores with the two clients; run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.handoff.sides import ROOT, Side
from benchmarks.neighbours.attacks import ATTACKS
from benchmarks.neighbours.measure import LAYOUTS, Plan, measure
from benchmarks.neighbours.report import format_head, format_page, format_row
from benchmarks.page import describe_machine
from benchmarks.router.report import PACKAGES

_QUICK = ("many choices", "new grammars", "cancelled")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints. Returns 1 if the neighbour saw what it must not."""
    args = _parser().parse_args(argv)
    if args.list:
        print("\n".join(f"{name}: {attack.sent}" for name, attack in ATTACKS.items()))
        return 0
    attacks = [name for name in ATTACKS if any(part in name for part in args.only)] if args.only else list(ATTACKS)
    plan = Plan(
        seconds=args.seconds,
        quiet_s=args.seconds / 2,
        streams=args.streams,
        layouts=args.layout or [*LAYOUTS],
        tries=args.tries,
    )
    if args.quick:
        plan = Plan(seconds=1.0, quiet_s=0.5, streams=1, layouts=plan.layouts[:1])
        attacks = [name for name in attacks if args.only or name in _QUICK]
    machine = describe_machine(*PACKAGES) | {"commit": Side("now", ROOT).commit}
    print(format_head(), flush=True)
    rows = []
    for row in measure(plan, attacks):
        rows.append(row)
        print(format_row(row), flush=True)
        for failure in row.beside.failures[:3]:
            print(failure, file=sys.stderr)
    if args.markdown:
        args.markdown.write_text(format_page(machine, plan, rows, args.note))
    return int(any(row.problems for row in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.neighbours",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", action="append", metavar="NAME", help="attacks with this in their name")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each attack")
    parser.add_argument("--tries", type=int, default=1, help="of an attack with a gap too long, on a busy machine")
    parser.add_argument("--streams", type=int, default=4, choices=range(1, 9), help="of the neighbour")
    parser.add_argument("--layout", action="append", choices=[*LAYOUTS], help="which clusters; default: all")
    parser.add_argument("--quick", action="store_true", help="little, once, to see that it runs")
    parser.add_argument("--list", action="store_true", help="print the attacks and exit")
    parser.add_argument("--markdown", type=Path, help="also write the tables here")
    parser.add_argument("--note", default="", help="a remark for the page of markdown")
    return parser


if __name__ == "__main__":
    sys.exit(main())

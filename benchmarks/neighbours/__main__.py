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

import sys
from collections.abc import Sequence

from benchmarks.harness.checkouts import HERE
from benchmarks.harness.command import make_parser
from benchmarks.harness.report import SERVING_PACKAGES, describe_machine, row
from benchmarks.neighbours.attacks import ATTACKS
from benchmarks.neighbours.measure import LAYOUTS, Plan, measure
from benchmarks.neighbours.report import cells_of, close_page, open_page

_QUICK = ("many choices", "new grammars", "cancelled")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints. Returns 1 if the neighbour saw what it must not."""
    parser = make_parser("benchmarks.neighbours", __doc__, has_quick=True)
    parser.add_argument("--only", action="append", metavar="NAME", help="attacks with this in their name")
    parser.add_argument("--seconds", type=float, default=6.0, help="of each attack")
    parser.add_argument("--tries", type=int, default=1, help="of an attack with a gap too long, on a busy machine")
    parser.add_argument("--streams", type=int, default=4, choices=range(1, 9), help="of the neighbour")
    parser.add_argument("--layout", action="append", choices=[*LAYOUTS], help="which clusters; default: all")
    parser.add_argument("--list", action="store_true", help="print the attacks and exit")
    args = parser.parse_args(argv)
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
    page = open_page(describe_machine(*SERVING_PACKAGES) | {"commit": HERE.commit}, plan)
    rows = []
    for found in measure(plan, attacks):
        rows.append(found)
        page.add(row(*cells_of(found)))
        print("\n".join(found.beside.failures[:3]), file=sys.stderr)
    close_page(page, rows)
    page.write(args.markdown)
    return int(any(found.problems for found in rows))


if __name__ == "__main__":
    sys.exit(main())

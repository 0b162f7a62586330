"""Measures the cost of each API of the gateway to the router, with pods that answer at once.

    python -m benchmarks.gateway [--before DIR | --timelines | --workers N] [--markdown FILE] [--quick] 2>/dev/null

The real router process stands between a load generator and fake pods, as in benchmarks.router. Measured is its
processor time, of all its threads: per whole answer of one token, and per token of streams that have had their first,
as fast as tokens come and at a rate. At a rate, the router wakes up for every step of the pod, so a token costs more
where it carries few streams; the target is for tokens as fast as they come.

Measured are completions, chats, chats with tools (the parser that `--tool-parser auto` finds), with reasoning, with a
schema as response_format, Anthropic's messages, OpenAI's responses, and chats over gRPC.

With --before the router of another checkout runs beside that of this one, and they take turns, with the same load
generator, answers and Python environment; what it does not have is left out. With --timelines what runs beside is the
same router without timelines and access log, which the measured one has: `before` is without. With --workers
it is the same router with one process. The difference is the median of those of pairs that were measured one after the
other. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.gateway.measure import SEEN, UNSEEN, Plan, Router, measure
from benchmarks.gateway.report import format_page, format_tables, verdicts
from benchmarks.page import describe_machine, format_verdict
from benchmarks.router.measure import StreamLoad
from benchmarks.router.report import PACKAGES

FULL = Plan(
    repeats=7, concurrency=16, num_answers=1_000, fast=StreamLoad(64, 500, 0.0), paced=StreamLoad(64, 150, 0.02)
)
QUICK = Plan(repeats=1, concurrency=4, num_answers=100, fast=StreamLoad(16, 100, 0.0), paced=StreamLoad(16, 30, 0.01))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    args = _parser().parse_args(argv)
    plan = QUICK if args.quick else replace(FULL, repeats=args.repeats)
    machine = describe_machine(*PACKAGES)
    now, before = _sides(args)
    results = measure(plan, now, before, lambda line: print(line, file=sys.stderr))
    found = verdicts(results, is_bounded=not args.workers)
    print(format_tables(results, found))
    print("\n".join(map(format_verdict, found)))
    if args.json:
        figures = {"machine": machine, "now": results.now, "before": results.before}
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    if args.markdown:
        args.markdown.write_text(format_page(machine, plan, results, found, args.note))
    return 0


def _sides(args: argparse.Namespace) -> tuple[Router, Router | None]:
    if args.timelines:
        return SEEN, UNSEEN
    if args.workers:
        return Router(options=("--workers", str(args.workers))), Router()
    return Router(), args.before and Router(args.before)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gateway", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    beside = parser.add_mutually_exclusive_group()
    beside.add_argument("--before", type=_checkout, metavar="DIR", help="an older checkout, to compare with")
    beside.add_argument("--timelines", action="store_true", help="what timelines and access log cost")
    beside.add_argument("--workers", type=int, metavar="N", help="what N processes of a router cost")
    parser.add_argument("--repeats", type=int, default=FULL.repeats)
    parser.add_argument("--quick", action="store_true", help="little, once, to see that it runs")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--markdown", type=Path, help="also write the tables here")
    parser.add_argument("--note", default="", help="a remark for the page of markdown")
    return parser


def _checkout(text: str) -> Path:
    path = Path(text).resolve()
    if not (path / "router" / "__main__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text} is no checkout of Baton")
    return path


if __name__ == "__main__":
    sys.exit(main())

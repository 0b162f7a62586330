"""Measures the cost of each API of the gateway to the router, with pods that answer at once.

    python -m benchmarks.gateway [--before DIR | --timelines | --workers N] [--instructions] [--markdown FILE] [--quick]

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

With --instructions valgrind counts the instructions for an answer of one token, of either side once, in place of time:
two runs on a busy machine differ by up to 3 %, where times differ by 30. It takes some fifty times as long.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace

from benchmarks.gateway.instructions import count
from benchmarks.gateway.instructions import make_page as make_counts_page
from benchmarks.gateway.measure import SEEN, UNSEEN, Plan, Router, measure
from benchmarks.gateway.report import make_page
from benchmarks.harness.checkouts import BEFORE, NOW, checkout_of
from benchmarks.harness.command import make_parser
from benchmarks.harness.report import SERVING_PACKAGES, describe_machine
from benchmarks.router.measure import StreamLoad

FULL = Plan(
    repeats=7, concurrency=16, num_answers=1_000, fast=StreamLoad(64, 500, 0.0), paced=StreamLoad(64, 150, 0.02)
)
QUICK = Plan(repeats=1, concurrency=4, num_answers=100, fast=StreamLoad(16, 100, 0.0), paced=StreamLoad(16, 30, 0.01))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = _parser()
    args = parser.parse_args(argv)
    plan = QUICK if args.quick else replace(FULL, repeats=args.repeats)
    machine = describe_machine(*SERVING_PACKAGES)
    now, before = _sides(args)

    def say(line: str) -> None:
        print(line, file=sys.stderr)

    if args.instructions:
        num_answers = 20 if args.quick else 300
        routers = {NOW: now} if before is None else {NOW: now, BEFORE: before}
        try:
            counts = count(routers, num_answers, say)
        except FileNotFoundError as error:
            parser.error(f"--instructions: {error}")
        make_counts_page(machine, num_answers, counts).write(args.markdown)
        return 0
    results = measure(plan, now, before, say)
    make_page(machine, plan, results, is_bounded=not args.workers).write(args.markdown)
    return 0


def _sides(args: argparse.Namespace) -> tuple[Router, Router | None]:
    if args.timelines:
        return SEEN, UNSEEN
    if args.workers:
        return Router(options=("--workers", str(args.workers))), Router()
    return Router(), args.before and Router(args.before)


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("benchmarks.gateway", __doc__, repeats=FULL.repeats, has_quick=True)
    beside = parser.add_mutually_exclusive_group()
    beside.add_argument("--before", type=checkout_of, metavar="DIR", help="an older checkout, to compare with")
    beside.add_argument("--timelines", action="store_true", help="what timelines and access log cost")
    beside.add_argument("--workers", type=int, metavar="N", help="what N processes of a router cost")
    parser.add_argument("--instructions", action="store_true", help="count instructions, by valgrind")
    return parser


if __name__ == "__main__":
    sys.exit(main())

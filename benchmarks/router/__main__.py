"""Measures the cost of the router, with pods that answer at once, so that only the router is measured.

    python -m benchmarks.router [--markdown FILE] [--quick] [--without-rival]

The real router process stands between a load generator and fake pods, each a process of its own: one prefill pod and
one decode pod, real gRPC, no engine. In turn with it runs sglang-router in PD mode between the same load generator and
trivial HTTP backends, if it is installed (`pip install -c constraints.txt -e '.[bench]'`). Every system is started
anew for every repeat; figures are medians of the repeats.

    answers      POST /v1/completions of a text prompt of about 100 tokens, one token back, so many at once.
    direct       the call that the router makes, made by the load generator: both legs over gRPC for ours, one request
                 to the decode backend over HTTP for the rival. added = through the router - direct
    streams      streams that have had their first token get the rest: tokens / CPU seconds of the router process, of
                 all its threads. A decode pod sends one message per step with one token for each stream; a backend
                 writes one event to each connection per step. The wall clock is beside it, but on few cores that is
                 also the speed of the load generator and of what stands behind the router.
                 `no router` is one of those backends alone, which sends its events to the clients itself: no router
                 that sends each event in a system call of its own can need less
    per event    more than 1: tokens that were due to a client together were sent together
    memory       growth of the router's own memory (USS) from no stream to so many, all open and silent; opened 16 at a
                 time, since what the beginnings of 2,000 requests take at once is not the memory of a stream
    decisions    one routing decision, see benchmarks.router.decisions

The two routers do not do the same work. Ours parses the request, tokenises the prompt, hashes its blocks, and turns
token ids back into text; its legs are gRPC. The rival, in Rust, parses the request and hands it and the answer on as
they are; tokenisation and detokenisation are left to the servers behind it. With tokens that come as fast as they can,
the backends' events pile up in its sockets and go on many at once; the rows with a rate are those to compare.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from benchmarks.harness.command import make_parser
from benchmarks.harness.report import SERVING_PACKAGES, describe_machine
from benchmarks.router.measure import Plan, Start, StreamLoad, measure
from benchmarks.router.report import make_page
from benchmarks.router.systems import RIVAL, baton, rival_version, sglang_router

FULL = Plan(
    repeats=3,
    concurrency=(1, 16, 64),
    num_answers=1_000,
    streams=(
        StreamLoad(1, 4_000, 0.0),
        StreamLoad(64, 500, 0.0),
        StreamLoad(512, 100, 0.0),
        StreamLoad(1, 200, 0.01),
        StreamLoad(64, 150, 0.02),
        StreamLoad(512, 60, 0.05),
    ),
    idle_streams=(512, 2_000),
    decision_pods=(2, 32, 512),
    decision_blocks=(10_000, 1_000_000),
)
QUICK = Plan(
    repeats=1,
    concurrency=(1, 16),
    num_answers=100,
    streams=(StreamLoad(1, 500, 0.0), StreamLoad(64, 50, 0.0), StreamLoad(64, 20, 0.02)),
    idle_streams=(64,),
    decision_pods=(2,),
    decision_blocks=(10_000,),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = make_parser("benchmarks.router", __doc__, has_quick=True)
    parser.add_argument("--without-rival", action="store_true", help=f"leave {RIVAL} out")
    args = parser.parse_args(argv)
    machine = describe_machine(*SERVING_PACKAGES)
    results = measure(QUICK if args.quick else FULL, _starts(args), lambda line: print(line, file=sys.stderr))
    make_page(machine, results).write(args.markdown)
    return 0


def _starts(args: argparse.Namespace) -> list[Start]:
    if args.without_rival:
        return [baton]
    if rival_version() is None:
        print(f"{RIVAL} is not installed: pip install -c constraints.txt -e '.[bench]'", file=sys.stderr)
        return [baton]
    return [baton, sglang_router]


if __name__ == "__main__":
    sys.exit(main())

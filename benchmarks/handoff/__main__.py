"""How little prompts disturb streams, and what a handoff costs a stream, seen by a client.

    python -m benchmarks.handoff [--before DIR] [--markdown FILE] [--rows 1,2,3,4,5] [--quick]

With --before, an older checkout of Baton is measured as well: its clusters, started with its own code and this Python,
take turns with ours, with the same model and the same load. The model has 100M random parameters. Pods have their
default settings unless a row says otherwise; prompts of the rows with prefill pods go there wherever predictions would
keep them.

    1   From the end of the forward that completes a prompt to its stream's first decode step: gap between first and
        second token less a decode step. One prefill and one decode pod, over each connector. The prefill pod computes
        prompts of another client all the time, one each step, with the length of its steps given (target_itl_ms is
        null there).
    2   The same gap in median ITLs: 8 streams at once, 512 tokens in, 64 out, one prefill and one decode pod.
    3   8 streams of 128 tokens in, 128 out, beside a prompt of 2048 tokens every 2 s, all on one pod.
    4   Time to first token of 8 prompts of 512 tokens at once on one prefill pod that has just begun another; ours also
        with target_itl_ms null, where a step is as large as its budget.
    5   Gap between tokens of streams on one pod that has all cores, next to the step of the same model offline.

The scheduler alone is measured by `python -m benchmarks.steps`.

Figures are medians of all turns unless they are named otherwise; the p99 of fewer than 100 samples is the worst.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.handoff.measure import ROWS, Benchmark, Plan
from benchmarks.handoff.report import make_page
from benchmarks.harness.checkouts import sides_of
from benchmarks.harness.command import make_parser
from benchmarks.harness.models import demo_model, make_served_model
from benchmarks.harness.report import describe_torch_machine

CONNECTORS = ("shared-storage", "redis", "nixl")
FULL = Plan(turns=2, connectors=CONNECTORS, steps_s=(0.25, 0.5, 1.0, 2.0), seconds=10.0, min_samples=5)
QUICK = Plan(
    turns=1,
    connectors=CONNECTORS[:1],
    steps_s=(0.05, 0.1),
    seconds=0.5,
    min_samples=2,
    handed_over=(64, 8),
    colocated=(32, 64),
    long_prompt=128,
    interval_s=0.3,
    beside_s=0.6,
    decoding=(16, 8),
    batches=(1, 2),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = make_parser("benchmarks.handoff", __doc__, has_quick=True, has_before=True)
    parser.add_argument("--rows", type=_rows, default=ROWS, help="which figures; default: all")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that clusters are stopped
    sides = sides_of(args.before)
    machine = describe_torch_machine() | {side.name: side.commit for side in sides}
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as directory:
        scratch = Path(directory)
        model = demo_model() if args.quick else make_served_model(scratch)
        plan = QUICK if args.quick else FULL
        results = Benchmark(plan, sides, model, scratch, lambda line: print(line, file=sys.stderr)).run(args.rows)
    make_page(machine, results).write(args.markdown)
    return 0


def _rows(text: str) -> tuple[int, ...]:
    rows = tuple(sorted({int(number) for number in text.split(",")}))
    if not {*rows} <= {*ROWS}:
        raise argparse.ArgumentTypeError(f"{text} is not a list of rows from {ROWS[0]} to {ROWS[-1]}")
    return rows


if __name__ == "__main__":
    sys.exit(main())

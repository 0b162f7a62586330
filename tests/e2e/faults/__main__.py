"""Runs the fault matrix and prints its table: `python -m tests.e2e.faults [--all] [--markdown FILE]`."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from deploy.scratch import scratch_directory
from tests.e2e.faults.cases import ALL, COVERING, Cell
from tests.e2e.faults.fleets import Fleets, plan_for
from tests.e2e.faults.matrix import CUT, Case, Outcome
from tests.e2e.faults.network import obstacle
from tests.e2e.faults.traffic import MAX_TOKENS, NUM_JOBS, make_jobs
from tests.e2e.machine import describe_machine

_EXPLANATION = """# Faults while requests run

`python -m tests.e2e.faults{options} --markdown FILE`. `make test` runs the cells of the command
without options, `make test-slow` all others.

- machine: {machine}

Each cell: {num_jobs} streams of {max_tokens} tokens, greedy and seeded, over two prefill and two decode pods (one of
each for network cuts) and two routers; the fault strikes the victim when the stage is first seen. Exact: the same
tokens and text as without a fault. Recovery: from the fault until the last of the open streams had gone on or ended,
queues included; with few tokens per step and two requests at once per pod, a wave takes a second or two without a
fault. After each cell all pods were ready again, `CheckIntegrity` found every pod sound and empty, no server had more
than a few file descriptors beyond those of the first idle moment, and no process was left of those killed. Streams of a
router that is killed end with it; pods abort them.
"""
_HEAD = ["| connector | fault | victim | stage | answers | recovery, s |", "|---|---|---|---|---|---|"]


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a cell failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.e2e.faults", description=__doc__)
    parser.add_argument("--all", action="store_true", help="every cell, not only the covering ones")
    parser.add_argument("--only", default="", metavar="TEXT", help="cells whose connector or case has this in it")
    parser.add_argument("--markdown", type=Path, help="write the table to this file, too")
    args = parser.parse_args(argv)
    lines, failed = [], False
    cells = [
        (connector, case) for connector, case in (ALL if args.all else COVERING) if args.only in f"{connector}: {case}"
    ]
    for connector, case, outcome in _run(cells):
        failed |= isinstance(outcome, AssertionError)
        lines.append(_row(connector, case, outcome))
        sys.stdout.write(f"{lines[-1]}\n")
        sys.stdout.flush()
        if args.markdown:
            explanation = _EXPLANATION.format(
                options=" --all" if args.all else "",
                machine=describe_machine(),
                num_jobs=NUM_JOBS,
                max_tokens=MAX_TOKENS,
            )
            args.markdown.write_text("\n".join([explanation, *_HEAD, *lines, ""]))
    return int(failed)


def _run(cells: Sequence[Cell]) -> Iterator[tuple[str, Case, Outcome | AssertionError | str]]:
    """Each cell with what came of it, or why it was left out."""
    with scratch_directory() as directory:
        problem = obstacle(directory)
    with Fleets(make_jobs()) as fleets:
        for connector, case in cells:
            if case.fault == CUT and problem:
                yield connector, case, f"skipped: {problem}"
                continue
            try:
                fleets.get(plan_for(connector, case))
                yield connector, case, asyncio.run(fleets.run(case))
            except AssertionError as error:
                sys.stderr.write(f"{error}\n")
                yield connector, case, error


def _row(connector: str, case: Case, outcome: Outcome | AssertionError | str) -> str:
    match outcome:
        case Outcome():
            answers = f"{outcome.num_exact} exact"
            answers += f", {outcome.num_broken} ended with their router" if outcome.num_broken else ""
            recovery = f"{outcome.recovery_s:.1f}"
        case AssertionError():
            answers, recovery = "FAILED", ""
        case _:
            answers, recovery = outcome, ""
    return f"| {connector} | {case.fault} | {case.victim} | {case.stage.value} | {answers} | {recovery} |"


if __name__ == "__main__":
    sys.exit(main())

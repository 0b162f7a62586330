"""Measures the engine's share of a step beside the forward pass, and the cost of prefix caching that finds nothing.

    python -m benchmarks.steps [--before DIR] [--repeats 9] [--markdown FILE]

All figures are processor time of the step loop's thread, with one thread for the demo model's forward pass, so that
other work on the machine shows little; medians over `--repeats`, each with other random prompts.

    steps      decode steps of 1, 8 and 64 requests, and of 64 that are drawn at temperature 1, by phase. `sample`
               includes the argmax; `encode` is what the output thread does to a step's outputs.
    caching    32 prompts of 256 tokens, 64 output tokens each, with prefix caching and without, in turn: in a KV cache
               whose memory was written before, and in one where caching takes memory that nothing has used yet; without
               caching, the blocks that were freed last are used first

With --before the engine of another checkout takes turns with this one's, in the same Python environment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks.handoff.sides import ROOT, Side
from benchmarks.page import describe_torch_machine
from benchmarks.steps.side import Load, Run, Times

SIDE = Path(__file__).with_name("side.py")
USED_BLOCKS = 1601  # written within a few runs
UNUSED_BLOCKS = 4801  # enough for the warm-up and MAX_UNUSED_RUNS runs that cache all they compute
MAX_UNUSED_RUNS = 4
WARM_UPS = 3
STEPS = {
    "1": Load(1, 128, 96, 0.0, True, USED_BLOCKS, 0),
    "8": Load(8, 128, 96, 0.0, True, USED_BLOCKS, 0),
    "64": Load(64, 128, 64, 0.0, True, USED_BLOCKS, 0),
    "64, temperature 1": Load(64, 128, 64, 1.0, True, USED_BLOCKS, 0),
}
CACHING = {
    "used": Load(32, 256, 64, 0.0, True, USED_BLOCKS, 0),
    "unused": Load(32, 256, 64, 0.0, True, UNUSED_BLOCKS, 0),
}

Runner = Callable[[Load], Run]


@contextmanager
def side_of(side: Side) -> Iterator[Runner]:
    """The engines of one checkout, in a process of its own."""
    command = [sys.executable, str(SIDE)]
    with subprocess.Popen(
        command, cwd=side.root, env=side.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        orders, answers = process.stdin, process.stdout

        def run(load: Load) -> Run:
            print(json.dumps(asdict(load)), file=orders, flush=True)
            answer = json.loads(answers.readline() or "null")
            if answer is None:
                raise RuntimeError(f"the engine of {side.root} has died")
            return Run(Times(**answer["step"]), Times(**answer["total"]), answer["digest"])

        try:
            yield run
        finally:
            orders.close()


def in_turn(runners: Mapping[str, Runner], loads: Sequence[Load], repeats: int) -> dict[str, list[list[Run]]]:
    """Each of the loads on each of the sides, so often. Raises RuntimeError if their tokens differ."""
    found: dict[str, list[list[Run]]] = {name: [[] for _ in loads] for name in runners}
    for repeat in range(WARM_UPS + repeats):
        turns = [(name, index) for name in runners for index in range(len(loads))]
        runs = {}
        for name, index in turns if repeat % 2 else reversed(turns):
            runs[name, index] = runners[name](replace(loads[index], seed=repeat))
        if len({run.digest for run in runs.values()}) > 1:
            raise RuntimeError("the sides gave different tokens")
        for (name, index), run in runs.items():
            if repeat >= WARM_UPS:
                found[name][index].append(run)
    return found


def steps_table(runners: Mapping[str, Runner], repeats: int) -> Iterator[str]:
    """Rows of microseconds per step."""
    yield "| batch | engine | schedule | prepare | sample | update | encode | all but forward, us | forward, us |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for batch, load in STEPS.items():
        for name, (runs,) in in_turn(runners, [load], repeats).items():
            cells = [
                f"{statistics.median(getattr(run.step, field) for run in runs) * 1e6:.0f}"
                for field in ("schedule", "prepare", "sample", "update", "encode", "overhead", "forward")
            ]
            yield " | ".join([f"| {batch}", name, *cells]) + " |"


def caching_table(runners: Mapping[str, Runner], repeats: int) -> Iterator[str]:
    """Rows of milliseconds per run, with caching and without."""
    yield "| KV cache | engine | with, ms | without, ms | difference | of it in the forward pass, ms | elsewhere, ms |"
    yield "|---|---|---|---|---|---|---|"
    for kind, load in CACHING.items():
        count = repeats if kind == "used" else min(repeats, MAX_UNUSED_RUNS)
        found = in_turn(runners, [load, replace(load, is_caching=False)], count)
        for name, (cached, plain) in found.items():
            pairs = list(zip(cached, plain, strict=True))
            forward = statistics.median((on.total.forward - off.total.forward) * 1e3 for on, off in pairs)
            elsewhere = statistics.median((on.total.overhead - off.total.overhead) * 1e3 for on, off in pairs)
            share = statistics.median(_seconds(on) / _seconds(off) - 1 for on, off in pairs)
            with_ms, without_ms = (statistics.median(map(_seconds, runs)) * 1e3 for runs in (cached, plain))
            cells = f"{with_ms:.0f} | {without_ms:.0f} | {share:+.1%} | {forward:+.1f} | {elsewhere:+.1f}"
            yield f"| {kind} | {name} | {cells} |"


def _seconds(run: Run) -> float:
    return run.total.forward + run.total.overhead


def main() -> int:
    """Runs the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, metavar="DIR", help="an older checkout, to compare with")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    args = parser.parse_args()
    sides = [Side("now", ROOT)] + ([Side("before", args.before.resolve())] if args.before else [])
    machine = describe_torch_machine() | {"threads": "1"}
    lines = ["# What the engine adds to the forward pass", "", "`python -m benchmarks.steps`; see its `--help`.", ""]
    lines += [f"- {key}: {value}" for key, value in machine.items()]
    lines += [f"- {side.name}: {side.commit}" for side in sides]
    with contextlib.ExitStack() as stack:
        runners = {side.name: stack.enter_context(side_of(side)) for side in sides}
        for title, table in (("A decode step", steps_table), ("Prefix caching at no hits", caching_table)):
            lines += ["", f"## {title}", ""]
            for row in table(runners, args.repeats):
                print(row, flush=True)
                lines.append(row)
    if args.markdown:
        args.markdown.write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

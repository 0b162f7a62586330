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

import contextlib
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from benchmarks.harness.checkouts import sides_of
from benchmarks.harness.command import make_parser
from benchmarks.harness.figures import in_turn
from benchmarks.harness.processes import Child
from benchmarks.harness.report import Page, describe_torch_machine, row, table
from benchmarks.steps import side as side_module
from benchmarks.steps.side import Load, Run, Times

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

Sides = Mapping[str, Child]  # engines of the checkouts, in processes of their own


def measure(sides: Sides, loads: Sequence[Load], repeats: int) -> dict[str, list[list[Run]]]:
    """Each of the loads on each of the sides, so often. Raises RuntimeError if their tokens differ."""
    found: dict[str, list[list[Run]]] = {name: [[] for _ in loads] for name in sides}
    for repeat in range(WARM_UPS + repeats):
        turns = [(name, index) for name in sides for index in range(len(loads))]
        runs = {}
        for name, index in in_turn(turns, repeat):
            answer = sides[name].ask(asdict(replace(loads[index], seed=repeat)))
            runs[name, index] = Run(Times(**answer["step"]), Times(**answer["total"]), answer["digest"])
        if len({run.digest for run in runs.values()}) > 1:
            raise RuntimeError("the sides gave different tokens")
        for (name, index), run in runs.items():
            if repeat >= WARM_UPS:
                found[name][index].append(run)
    return found


def steps_table(sides: Sides, repeats: int) -> Iterator[str]:
    """Rows of microseconds per step."""
    yield from table(
        "batch | engine | schedule | prepare | sample | update | encode | all but forward, us | forward, us"
    )
    for batch, load in STEPS.items():
        for name, (runs,) in measure(sides, [load], repeats).items():
            cells = [
                f"{statistics.median(getattr(run.step, field) for run in runs) * 1e6:.0f}"
                for field in ("schedule", "prepare", "sample", "update", "encode", "overhead", "forward")
            ]
            yield row(batch, name, *cells)


def caching_table(sides: Sides, repeats: int) -> Iterator[str]:
    """Rows of milliseconds per run, with caching and without."""
    yield from table(
        "KV cache | engine | with, ms | without, ms | difference | of it in the forward, ms | elsewhere, ms"
    )
    for kind, load in CACHING.items():
        count = repeats if kind == "used" else min(repeats, MAX_UNUSED_RUNS)
        found = measure(sides, [load, replace(load, is_caching=False)], count)
        for name, (cached, plain) in found.items():
            pairs = list(zip(cached, plain, strict=True))
            forward = statistics.median((on.total.forward - off.total.forward) * 1e3 for on, off in pairs)
            elsewhere = statistics.median((on.total.overhead - off.total.overhead) * 1e3 for on, off in pairs)
            share = statistics.median(_seconds(on) / _seconds(off) - 1 for on, off in pairs)
            with_ms, without_ms = (statistics.median(map(_seconds, runs)) * 1e3 for runs in (cached, plain))
            figures = (f"{with_ms:.0f}", f"{without_ms:.0f}", f"{share:+.1%}", f"{forward:+.1f}", f"{elsewhere:+.1f}")
            yield row(kind, name, *figures)


def _seconds(run: Run) -> float:
    return run.total.forward + run.total.overhead


def main() -> int:
    """Runs the command."""
    args = make_parser("benchmarks.steps", __doc__, repeats=9, has_before=True).parse_args()
    checkouts = sides_of(args.before)
    facts = describe_torch_machine() | {"threads": "1"} | {each.name: each.commit for each in checkouts}
    page = Page("What the engine adds to the forward pass", "`python -m benchmarks.steps`; see its `--help`.", facts)
    with contextlib.ExitStack() as stack:
        sides = {each.name: stack.enter_context(each.start(side_module.__file__)) for each in checkouts}
        for title, lines in (("A decode step", steps_table), ("Prefix caching at no hits", caching_table)):
            page.section(title)
            for line in lines(sides, args.repeats):
                page.add(line)
    page.write(args.markdown)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Measures linear layers on compiled CPU kernels, for few rows to many, next to torch's operator.

    python -m benchmarks.linears [--weights KIND ...] [--dtypes TYPE ...] [--before DIR] [--markdown FILE]

A table for each kind of weights and type of activations: milliseconds of a call, the shortest of the repeats, each the
mean of calls that take 20 ms together, over copies of the layer that no cache has room for. ratio: the time of torch's
operator, with weights that are not quantised, divided by that; with --before, the older checkout's time. The two take
turns.

A layer whose kernel gives way to another at some number of rows, as some do at 64, has that limit in the wrong place
if 64 rows take longer than 65, or much less.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import asdict

import torch

from benchmarks.harness.checkouts import BEFORE, HERE, NOW, sides_of
from benchmarks.harness.command import make_parser
from benchmarks.harness.figures import in_turn
from benchmarks.harness.processes import Child
from benchmarks.harness.report import Page, describe_torch_machine, row, table
from benchmarks.linears import side as side_module
from benchmarks.linears.side import TORCH, WEIGHTS, Load

SHAPES = ((768, 4096), (2048, 768), (4096, 4096))  # inputs and outputs
ROWS = (1, 4, 8, 16, 32, 64, 65, 96, 128, 256, 512)
_DTYPES = ("float32", "bfloat16")
_WORDS = "`python -m benchmarks.linears`; see its `--help`."


def main() -> int:
    """Measures and prints."""
    parser = make_parser("benchmarks.linears", __doc__, repeats=5, has_before=True)
    parser.add_argument(
        "--weights", nargs="+", choices=WEIGHTS, default=[*WEIGHTS], metavar="KIND", help=", ".join(WEIGHTS)
    )
    parser.add_argument(
        "--dtypes", nargs="+", choices=_DTYPES, default=_DTYPES, metavar="TYPE", help=", ".join(_DTYPES)
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: torch's")
    args = parser.parse_args()
    facts = describe_torch_machine() | {"threads": str(args.threads)}
    page = Page(
        "Linear layers on CPU kernels", _WORDS, facts | {each.name: each.commit for each in sides_of(args.before)}
    )
    titles = [f"{inputs} x {outputs}, ms | ratio" for inputs, outputs in SHAPES]
    for weights in args.weights:
        for dtype in args.dtypes:
            page.section(f"{weights}, {dtype}")
            page.add(*table(" | ".join(["rows", *titles])))
            # A process for each table, so that its layers' memory is given back.
            with contextlib.ExitStack() as stack:
                now = stack.enter_context(HERE.start(side_module.__file__, str(args.threads)))
                other = (
                    stack.enter_context(args.before.start(side_module.__file__, str(args.threads)))
                    if args.before
                    else now
                )
                sides = {NOW: (now, weights), BEFORE: (other, weights if args.before else TORCH)}
                for num_rows in ROWS:
                    cells = []
                    for shape in SHAPES:
                        load = Load("", dtype, *shape, num_rows)
                        seconds = _measure(sides, load, args.repeats)
                        cells += [f"{seconds[NOW] * 1e3:.2f}", f"{seconds[BEFORE] / seconds[NOW]:.2f}"]
                    page.add(row(num_rows, *cells))
    page.write(args.markdown)
    return 0


def _measure(sides: dict[str, tuple[Child, str]], load: Load, repeats: int) -> dict[str, float]:
    """The shortest seconds of a call on each side."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for repeat in range(repeats):
        for name in in_turn(sides, repeat):
            child, weights = sides[name]
            found[name].append(child.ask(asdict(load) | {"weights": weights}))
    return {name: min(times) for name, times in found.items()}


if __name__ == "__main__":
    sys.exit(main())

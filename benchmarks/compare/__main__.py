"""Baton next to what users would run instead, on one machine in one run.

    make peers                                  # vLLM for CPUs, in an environment of its own
    python -m benchmarks.compare [--quick] [--markdown FILE] [--json FILE]

Each side is a process with the same weights, types of numbers, prompts and number of tokens, on the same cores; all are
loaded at the same time and take turns. Tokens are chosen greedily, and compared: near logits of a random model may be
rounded to other tokens, in bfloat16 often.

With int8 the sides compute less of the same. Baton (`--quantization int8`) has int8 weights in all linear layers, and
activations in bfloat16 if the processor multiplies that, else in float32. vLLM loads a checkpoint of compressed-tensors
with the same int8 weights, but rounds activations to int8 for each product, too (W8A8), and keeps the output layer in
bfloat16: other tokens are to be expected. Sides of transformers take no part.

    baton           the engine in its process, as `baton.LLM` runs it
    vllm            vLLM's engine in its process, compiled: of `make peers`, or as installed beside Baton (on a GPU)
    invariant       Baton with `batch_invariant`
    transformers    `generate` with its default cache and `sdpa` attention
    generate_batch  transformers' own continuous batching over a paged cache

    decode          milliseconds between two tokens of a batch whose prompts have 128 tokens
    prefill         prompt tokens per second of one prompt of 1,024 tokens
    offline         output tokens per second of 32 prompts of 256 tokens with 64 tokens each, prefill included
    serving         `baton up` and `vllm serve` over HTTP, with `baton bench serve` as the client
    speculation     output tokens per second of decoding while answers repeat prompts of 128 tokens of which some are
                    changed, with n-gram speculation and without, on Baton and vLLM

What the machine could do at most is measured in the same run: its memory's speed, and that of packed matrix products.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.compare import offline, speculation
from benchmarks.compare.checkpoints import PRECISIONS, Checkpoint, Precision, checkpoint_of, write_counting
from benchmarks.compare.limits import ON_GPU, Limits, measure_limits, work_of
from benchmarks.compare.offline import Measure, Row, measure_model
from benchmarks.compare.peers import MAIN_NAMES, NAMES, SideError, python_of
from benchmarks.compare.report import format_page, format_row, format_serving, format_speculation, plot
from benchmarks.compare.serving import LOADS, ServingRow, measure_serving
from benchmarks.engine import make_random_model
from benchmarks.grammar import write_tokenizer
from benchmarks.page import describe_torch_machine
from common.demo_model import demo_model_path

_QUICK_REPEATS, _REPEATS = 1, 5
_MODELS = ["0.6B", "8B"] if ON_GPU else ["demo", "100M", "0.6B"]
_SECTIONS = {"offline": _MODELS, "serving": ["100M"]}
if not ON_GPU:  # whose memory is shared out between one engine of Baton and one of vLLM
    _SECTIONS["speculation"] = ["0.6B"]
_DTYPES = ["bfloat16"] if ON_GPU else ["float32", "bfloat16", "int8"]


def main() -> int:
    """Measures and prints."""
    args = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that sides and servers are stopped
    sides = args.sides or (MAIN_NAMES if args.quick or ON_GPU else NAMES)
    names = [name for name in sides if python_of(name)]
    if missing := set(sides) - set(names):
        print(f"not installed: {', '.join(missing)}; `make peers` installs vLLM", file=sys.stderr)
    sections = args.sections or (["offline"] if args.quick else _SECTIONS)
    models = {section: args.models or _SECTIONS[section][: 2 if args.quick else None] for section in sections}
    repeats = args.repeats or (_QUICK_REPEATS if args.quick else _REPEATS)
    machine = describe_torch_machine()
    dtypes = args.dtypes or [name for name in _DTYPES if not (args.quick and name == "int8")]
    precisions = [PRECISIONS[name] for name in dtypes]
    limits = {precision.name: measure_limits(precision.dtype) for precision in precisions}
    rows: list[Row] = []
    speculating: list[Row] = []
    serving: list[ServingRow] = []
    with tempfile.TemporaryDirectory() as scratch:
        logs = Path(scratch)
        for model in models.get("offline", ()):
            directory = _directory(model, logs)
            for row in _measure(model, directory, precisions, names, offline.MEASURES, repeats, limits, logs):
                print(format_row(row), flush=True)
                rows.append(row)
        for model in models.get("speculation", ()):
            directory = _counting(model, logs)
            engines = [side for name in names for side in speculation.SIDES.get(name, ())]
            for row in _measure(model, directory, precisions, engines, speculation.MEASURES, repeats, limits, logs):
                print(format_speculation(row), flush=True)
                speculating.append(row)
        if "serving" in models:
            serving = _serving(models["serving"], precisions, names, args.serving_repeats, logs)
    if args.markdown:
        drawing = args.markdown.with_suffix(".svg")
        args.markdown.write_text(format_page(machine, limits, names, rows, speculating, serving, drawing.name))
        drawing.write_text(plot(rows, names))
    if args.json:
        found = {
            "machine": machine,
            "limits": {precision: each._asdict() for precision, each in limits.items()},
            "offline": [row._asdict() for row in rows],
            "speculation": [row._asdict() for row in speculating],
            "serving": [row._asdict() for row in serving],
        }
        args.json.write_text(json.dumps(found, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.compare", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small models, one repeat, no servers: under 10 minutes")
    parser.add_argument("--sections", nargs="+", choices=_SECTIONS, help="default: all; with --quick offline")
    parser.add_argument("--models", nargs="+", choices=["demo", "100M", "0.6B", "8B"], help=f"default: {_SECTIONS}")
    parser.add_argument("--dtypes", nargs="+", choices=PRECISIONS, help=f"default: {_DTYPES}; with --quick no int8")
    parser.add_argument("--sides", nargs="+", choices=NAMES, help=f"default: all; with --quick {MAIN_NAMES}")
    parser.add_argument("--repeats", type=int, help=f"default: {_REPEATS}, with --quick {_QUICK_REPEATS}")
    parser.add_argument("--serving-repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--markdown", type=Path, help="also write the tables here, and a plot beside it")
    return parser


def _directory(model: str, scratch: Path) -> Path:
    if model == "demo":
        return Path(demo_model_path())
    directory = scratch / f"qwen3-{model.lower()}"
    if not directory.exists():
        make_random_model(scratch, model)
        write_tokenizer(directory, json.loads((directory / "config.json").read_text())["vocab_size"])
    return directory


def _counting(model: str, scratch: Path) -> Path:
    directory = scratch / f"{model}-counting"
    write_counting(_directory(model, scratch), directory)
    return directory


def _checkpoints(directory: Path, precision: Precision, names: Sequence[str], scratch: Path) -> dict[str, Checkpoint]:
    """Returns the checkpoints of the sides that take part, in their order."""
    return {name: checkpoint_of(name, directory, precision, scratch) for name in names if precision.suits(name)}


def _measure(
    model: str,
    directory: Path,
    precisions: Sequence[Precision],
    names: Sequence[str],
    measures: Sequence[Measure],
    repeats: int,
    limits: Mapping[str, Limits],
    scratch: Path,
) -> Iterator[Row]:
    for precision in precisions:
        checkpoints = _checkpoints(directory, precision, names, scratch)
        work, limit = work_of(directory, precision), limits[precision.name]
        try:
            yield from measure_model(model, precision.name, checkpoints, measures, repeats, work, limit, scratch)
        except SideError as error:
            print(f"{model} {precision.name}: {error}", file=sys.stderr)


def _serving(
    models: Sequence[str], precisions: Sequence[Precision], names: Sequence[str], repeats: int, scratch: Path
) -> list[ServingRow]:
    servers = [name for name in names if name in ("baton", "vllm")]
    rows = []
    for model in models:
        for precision in precisions:
            checkpoints = _checkpoints(_directory(model, scratch), precision, servers, scratch)
            try:
                for row in measure_serving(model, precision.name, checkpoints, LOADS, repeats, scratch):
                    print("\n".join(format_serving(row)), flush=True)
                    rows.append(row)
            except SideError as error:
                print(f"{model} {precision.name}: {error}", file=sys.stderr)
    return rows


if __name__ == "__main__":
    sys.exit(main())

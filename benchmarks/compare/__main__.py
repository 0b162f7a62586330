"""Baton next to what users would run instead, on one machine in one run.

    make peers                                  # vLLM for CPUs, OpenVINO and llama.cpp, each in its own environment
    python -m benchmarks.compare [--quick] [--markdown FILE]

Each side is a process with the same weights, types of numbers, prompts and number of tokens, on the same cores; all are
loaded at the same time and take turns. Tokens are chosen greedily, and compared: near logits of a random model may be
rounded to other tokens, in bfloat16 often.

With int8 the sides compute less of the same. Baton (`--quantization int8`) has int8 weights in all linear layers, and
activations in bfloat16 if the processor multiplies that, else in float32. vLLM loads a checkpoint of compressed-tensors
with the same int8 weights, but rounds activations to int8 for each product, too (W8A8), and keeps the output layer in
bfloat16: other tokens are to be expected. llama.cpp rounds activations with Q8_0, and OpenVINO as it sees fit. With
int8-dynamic Baton rounds activations as well, and the others compute what they do with int8. With q4_k Baton and
llama.cpp load one GGUF file, in batches only, and no other side takes part. Sides of transformers take no part in any
of these. A side that does not start is named, and left out.

    baton           the engine in its process, as `baton.LLM` runs it
    vllm            vLLM's engine in its process, compiled: of `make peers`, or as installed beside Baton (on a GPU)
    openvino        OpenVINO GenAI's continuous batching, of a model that `optimum-cli` has converted, KV not quantised
    llamacpp        llama.cpp's decode over sequences of one buffer, of GGUF files; int8 is Q8_0
    invariant       Baton with `batch_invariant`
    transformers    `generate` with its default cache and `sdpa` attention
    generate_batch  transformers' own continuous batching over a paged cache

    decode          milliseconds between two tokens of a batch whose prompts have 128 tokens
    prefill         prompt tokens per second of one prompt of 1,024 tokens
    offline         output tokens per second of 32 prompts of 256 tokens with 64 tokens each, prefill included
    serving         `baton up` and `vllm serve` over HTTP, with `baton bench serve` as the client
    embeddings      prompts per second, of which the last token's hidden state is wanted
    speculation     output tokens per second of decoding while answers repeat prompts of 128 tokens of which some are
                    changed, with n-gram speculation and without, on Baton and vLLM

What the machine could do at most is measured in the same run: its memory's speed, and that of packed matrix products.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import transformers

from benchmarks.compare import offline, pooling, report, speculation
from benchmarks.compare.checkpoints import PRECISIONS, Checkpoint, Precision, checkpoint_of, write_counting
from benchmarks.compare.limits import ON_GPU, Limits, measure_limits, work_of
from benchmarks.compare.offline import Measure, Row, measure_model
from benchmarks.compare.peers import MAIN_NAMES, NAMES, TCMALLOC, python_of
from benchmarks.compare.serving import LOADS, ServingRow, measure_serving
from benchmarks.harness.command import make_parser
from benchmarks.harness.models import SHAPES, make_random_model, write_tokenizer
from benchmarks.harness.processes import ChildEndedError
from benchmarks.harness.report import describe_torch_machine, table
from common.demo_model import demo_model_path

_QUICK_REPEATS, _REPEATS = 1, 5
_MODELS = ["0.6B", "8B"] if ON_GPU else ["demo", "100M", "0.6B"]
_SECTIONS = {"offline": _MODELS, "embeddings": ["100M"], "serving": ["100M"]}
if not ON_GPU:  # whose memory is shared out between one engine of Baton and one of vLLM
    _SECTIONS["speculation"] = ["0.6B"]
_DTYPES = ["bfloat16"] if ON_GPU else ["float32", "bfloat16", "int8", "int8-dynamic", "q4_k"]


def main() -> int:
    """Measures and prints."""
    args = _parser().parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that sides and servers are stopped
    transformers.utils.logging.disable_progress_bar()
    sides = args.sides or (MAIN_NAMES if args.quick or ON_GPU else NAMES)
    names = [name for name in sides if python_of(name)]
    if missing := set(sides) - set(names):
        print(
            f"not installed: {', '.join(missing)}; `make peers` installs vLLM, OpenVINO and llama.cpp", file=sys.stderr
        )
    sections = args.sections or (["offline"] if args.quick else _SECTIONS)
    models = {section: args.models or _SECTIONS[section][: 2 if args.quick else None] for section in sections}
    repeats = args.repeats or (_QUICK_REPEATS if args.quick else _REPEATS)
    machine = describe_torch_machine()
    if "vllm" in names and not ON_GPU:
        machine["vLLM's allocator"] = TCMALLOC or "glibc's, as tcmalloc is not installed (libtcmalloc-minimal4)"
    dtypes = args.dtypes or [name for name in _DTYPES if not args.quick or PRECISIONS[name].quantization is None]
    precisions = [PRECISIONS[name] for name in dtypes]
    limits = {precision.name: measure_limits(precision.dtype) for precision in precisions}
    drawing = args.markdown.with_suffix(".svg") if args.markdown else Path("compare.svg")
    page = report.open_page(machine, limits, drawing.name)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        logs = Path(scratch)
        if "offline" in models:
            page.section("Batches")
            page.add(*table(report.offline_columns(names)))
        for model in models.get("offline", ()):
            directory = _directory(model, logs)
            for row in _measure(model, directory, precisions, names, offline.MEASURES, repeats, limits, logs):
                page.add(report.offline_row(row, names))
                rows.append(row)
        if "embeddings" in models:
            engines = [name for name in names if name in pooling.SIDES]
            sides = [pooling.SIDES[name] for name in engines]
            page.section("Embeddings")
            page.add(*table(report.offline_columns(engines)))
        for model in models.get("embeddings", ()):
            directory = _directory(model, logs)
            for row in _measure(model, directory, precisions, sides, pooling.MEASURES, repeats, limits, logs):
                page.add(report.offline_row(pooling.by_engine(row), engines))
        if "speculation" in models:
            engines = [side for name in names for side in speculation.SIDES.get(name, ())]
            page.section("Speculation")
            page.add(*table(report.speculation_columns(engines)))
        for model in models.get("speculation", ()):
            directory = _counting(model, logs)
            shared = _shared(precisions, engines)
            for row in _measure(model, directory, shared, engines, speculation.MEASURES, repeats, limits, logs):
                page.add(report.speculation_row(row))
        if "serving" in models:
            servers = [name for name in names if name in ("baton", "vllm")]
            page.section("Serving")
            page.add(*table(report.serving_columns(servers)))
            shared = _shared(precisions, servers)
            for served in _serving(models["serving"], shared, servers, args.serving_repeats, logs):
                page.add(*report.serving_rows(served))
    page.write(args.markdown)
    if args.markdown:
        drawing.write_text(report.plot(rows, names))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("benchmarks.compare", __doc__)
    parser.add_argument("--quick", action="store_true", help="small models, one repeat, no servers: under 10 minutes")
    parser.add_argument("--sections", nargs="+", choices=_SECTIONS, help="default: all; with --quick offline")
    parser.add_argument(
        "--models", nargs="+", type=_model, help=f"demo, 100M, 0.6B, 8B, or directories; default: {_SECTIONS}"
    )
    parser.add_argument(
        "--dtypes",
        nargs="+",
        choices=PRECISIONS,
        help=f"default: {_DTYPES}; with --quick none with quantised weights",
    )
    parser.add_argument("--sides", nargs="+", choices=NAMES, help=f"default: all; with --quick {MAIN_NAMES}")
    parser.add_argument("--repeats", type=int, help=f"default: {_REPEATS}, with --quick {_QUICK_REPEATS}")
    parser.add_argument("--serving-repeats", type=int, default=3)
    return parser


def _model(name: str) -> str:
    if name != "demo" and name not in SHAPES and not (Path(name) / "config.json").is_file():
        raise argparse.ArgumentTypeError(f"{name} is no model")
    return name


def _directory(model: str, scratch: Path) -> Path:
    if model == "demo":
        return Path(demo_model_path())
    if model not in SHAPES:
        return Path(model).resolve()
    directory = make_random_model(scratch, model)
    if not (directory / "tokenizer.json").exists():
        write_tokenizer(directory)
    return directory


def _counting(model: str, scratch: Path) -> Path:
    source = _directory(model, scratch)
    directory = scratch / f"{source.name}-counting"
    write_counting(source, directory)
    return directory


def _shared(precisions: Sequence[Precision], names: Sequence[str]) -> list[Precision]:
    """Returns those in which all sides take part."""
    return [precision for precision in precisions if all(map(precision.suits, names))]


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
        except ChildEndedError as error:
            print(f"{model} {precision.name}: {error}", file=sys.stderr)


def _serving(
    models: Sequence[str], precisions: Sequence[Precision], servers: Sequence[str], repeats: int, scratch: Path
) -> Iterator[ServingRow]:
    for model in models:
        for precision in precisions:
            checkpoints = _checkpoints(_directory(model, scratch), precision, servers, scratch)
            try:
                yield from measure_serving(model, precision.name, checkpoints, LOADS, repeats, scratch)
            except ChildEndedError as error:
                print(f"{model} {precision.name}: {error}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())

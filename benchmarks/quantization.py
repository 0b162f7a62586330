"""Measures checkpoints in each quantised format, and int8 weights, next to float32 and bfloat16, in one run.

python -m benchmarks.quantization [--markdown FILE] [--formats NAME ...]

quality   the demo model, whose weights were rounded to the nearest, over text of the kind that it was trained on, from
          another seed, next to float32: as `python -m benchmarks.int8`
speed     steps of a random model of 100M parameters, the kinds of weights in turn: milliseconds of a decode step
          after 128 tokens of context, and of a prompt of 1024 tokens; medians and ranges of the repeats
memory    of a process that loads the model of 100M parameters, beyond what it had before, and bytes of its file
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

from benchmarks.harness.command import make_parser
from benchmarks.harness.models import make_random_model
from benchmarks.harness.report import Page, describe_torch_machine, row, spread, table
from benchmarks.int8.quality import Weights, held_out_texts, measure_quality, tokenize
from benchmarks.int8.speed import measure_memory, measure_speed
from common.demo_model import demo_model_path
from tools.quantize_checkpoint import quantize_checkpoint

FORMATS = (
    "gptq",
    "gptq-zeros",
    "gptq-act-order",
    "awq",
    "compressed-w4a16-zeros",
    "gguf-q4_0",
    "gguf-q4_k",
    "gguf-q6_k",
    "gguf-q8_0",
    "gptq-8bit",
    "compressed-w8a8",
    "fp8-block",
    "fp8-tensor",
)
_MAX_TOKENS = 512  # of a document
_DTYPE = "bfloat16"
_QUALITY = "weights | perplexity | of float32's | same best token | same 32 tokens | mean logit difference | largest"


def main() -> int:
    """Measures and prints."""
    parser = make_parser("benchmarks.quantization", __doc__, repeats=7)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=FORMATS)
    parser.add_argument("--documents", type=int, default=100, help="of text for quality; default: 100")
    parser.add_argument("--threads", type=int, help="default: torch's")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    page = Page("Quantised checkpoints", "`python -m benchmarks.quantization`.", describe_torch_machine())
    demo = Path(demo_model_path())
    tokens = tokenize(demo, held_out_texts(args.documents), _MAX_TOKENS)
    page.add("", f"{sum(map(len, tokens)):,} tokens in {len(tokens)} texts.", "", *table(_QUALITY))
    with tempfile.TemporaryDirectory() as scratch:
        for each in measure_quality(demo, tokens, _kinds(demo, Path(scratch), args.formats, "float32")):
            figures = [f"{each.perplexity:.4f}", f"{each.perplexity_ratio:.4f}", f"{each.same_best_token:.2%}"]
            differences = [f"{each.mean_difference:.4f}", f"{each.max_difference:.2f}"]
            page.add(row(each.weights.name, *figures, f"{each.same_continuation:.0%}", *differences))
    with tempfile.TemporaryDirectory() as scratch:
        model = make_random_model(Path(scratch) / "model", "100M")
        kinds = _kinds(model, Path(scratch), args.formats, _DTYPE)
        memory = [measure_memory(model, weights) for weights in kinds]
        speed = list(measure_speed(model, kinds, args.repeats))
        steps = [name for name, _ in speed]
        page.add("", *table(" | ".join(["100M parameters", *(f"{name}, ms" for name in steps), "MiB", "file, MiB"])))
        for place, weights in enumerate(kinds):
            times = [spread(milliseconds[place], ".2f") for _, milliseconds in speed]
            page.add(row(weights.name, *times, f"{memory[place].kept_mib:.0f}", f"{_file_mib(model, weights):.0f}"))
    page.write(args.markdown)
    return 0


def _kinds(model: Path, scratch: Path, formats: list[str], dtype: str) -> list[Weights]:
    """Kinds of weights, of which quantised ones are computed in `dtype`; writes the checkpoints to `scratch`."""
    kinds = [Weights("float32"), Weights("bfloat16"), Weights("bfloat16", "int8"), Weights("bfloat16", "int8-dynamic")]
    for name in formats:
        quantize_checkpoint(model, scratch / name, name)
        kinds.append(Weights("float32" if dtype == "float32" else "bfloat16", checkpoint=scratch / name))
    return kinds


def _file_mib(model: Path, weights: Weights) -> float:
    directory = weights.checkpoint or model
    files = [path for path in directory.iterdir() if path.suffix in (".safetensors", ".gguf")]
    return sum(path.stat().st_size for path in files) / (1 << 20)


if __name__ == "__main__":
    sys.exit(main())

"""Measures the cost of int8 weights in quality and their gain in speed, next to float32 and bfloat16, in one run.

python -m benchmarks.int8 [--markdown FILE] [--model DIR --text FILE]

quality   the demo model over text of the kind that it was trained on, from another seed; or, with --model, another
          one over the paragraphs of a file. Each kind of weights next to float32: perplexity, positions with the
          same best token, texts of 32 tokens with the same 32 greedy ones after them, differences of logits
speed     steps of a random model of 100M parameters, the kinds of weights in turn: milliseconds of a decode step
          after 128 tokens of context, and of a prompt of 1024 tokens; medians and ranges of the repeats
memory    of a process that loads the model of 100M parameters, beyond what it had before
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from benchmarks.harness.command import make_parser
from benchmarks.harness.models import make_random_model
from benchmarks.harness.report import Page, describe_torch_machine, row, spread, table
from benchmarks.int8.quality import Quality, Weights, held_out_texts, measure_quality, tokenize
from benchmarks.int8.speed import measure_memory, measure_speed
from common.demo_model import demo_model_path

KINDS = [Weights("float32"), Weights("bfloat16"), Weights("float32", "int8"), Weights("bfloat16", "int8")]
_NUM_DOCUMENTS = 400
_MAX_TOKENS = 512  # of a document
_QUALITY = "weights | perplexity | of float32's | same best token | same 32 tokens | mean logit difference | largest"


def main() -> int:
    """Measures and prints."""
    parser = make_parser("benchmarks.int8", __doc__, repeats=7)
    parser.add_argument("--model", type=Path, help="quality of this model instead of the demo model, and no speed")
    parser.add_argument("--text", type=Path, help="held-out text for --model")
    parser.add_argument("--threads", type=int, help="default: torch's")
    args = parser.parse_args()
    if (args.model is None) != (args.text is None):
        parser.error("--model and --text come together")
    if args.threads:
        torch.set_num_threads(args.threads)
    model = args.model or Path(demo_model_path())
    texts = args.text.read_text().split("\n\n") if args.text else held_out_texts(_NUM_DOCUMENTS)
    tokens = tokenize(model, texts, _MAX_TOKENS)
    page = Page("int8 weights", "`python -m benchmarks.int8`.", describe_torch_machine())
    page.add("", f"{sum(map(len, tokens)):,} tokens in {len(tokens)} texts.", "", *table(_QUALITY))
    for quality in measure_quality(model, tokens, KINDS):
        page.add(row(*_cells(quality)))
    if args.model is None:
        with tempfile.TemporaryDirectory() as scratch:
            directory = make_random_model(Path(scratch), "100M")
            memory = [measure_memory(directory, weights) for weights in KINDS]
            page.add("", *table(" | ".join(["100M parameters", *(weights.name for weights in KINDS)])))
            for step, milliseconds in measure_speed(directory, KINDS, args.repeats):
                page.add(row(f"{step}, ms", *(spread(each, ".2f") for each in milliseconds)))
        page.add(row("memory, MiB", *(f"{each.kept_mib:.0f}" for each in memory)))
        page.add(row("most while loading, MiB", *(f"{each.peak_mib:.0f}" for each in memory)))
    page.write(args.markdown)
    return 0


def _cells(quality: Quality) -> Iterator[str]:
    yield from (quality.weights.name, f"{quality.perplexity:.4f}", f"{quality.perplexity_ratio:.4f}")
    yield from (f"{quality.same_best_token:.2%}", f"{quality.same_continuation:.0%}")
    yield from (f"{quality.mean_difference:.4f}", f"{quality.max_difference:.2f}")


if __name__ == "__main__":
    sys.exit(main())

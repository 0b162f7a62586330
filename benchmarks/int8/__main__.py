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

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks.engine import make_100m_model
from benchmarks.int8.quality import Quality, Weights, held_out_texts, measure_quality, tokenize
from benchmarks.int8.speed import Memory, Speed, measure_memory, measure_speed
from benchmarks.page import describe_torch_machine
from common.demo_model import demo_model_path

KINDS = [Weights("float32"), Weights("bfloat16"), Weights("float32", "int8"), Weights("bfloat16", "int8")]
_NUM_DOCUMENTS = 400
_MAX_TOKENS = 512  # of a document


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.int8", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="quality of this model instead of the demo model, and no speed")
    parser.add_argument("--text", type=Path, help="held-out text for --model")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--markdown", type=Path, help="also write the tables here")
    args = parser.parse_args()
    if (args.model is None) != (args.text is None):
        parser.error("--model and --text come together")
    if args.threads:
        torch.set_num_threads(args.threads)
    model = args.model or Path(demo_model_path())
    texts = args.text.read_text().split("\n\n") if args.text else held_out_texts(_NUM_DOCUMENTS)
    tokens = tokenize(model, texts, _MAX_TOKENS)
    lines = _quality_table(list(measure_quality(model, tokens, KINDS)), tokens)
    if args.model is None:
        with tempfile.TemporaryDirectory() as scratch:
            directory = make_100m_model(Path(scratch))
            memory = [measure_memory(directory, weights) for weights in KINDS]
            lines += ["", *_speed_table(list(measure_speed(directory, KINDS, args.repeats)), memory)]
    print("\n".join(lines))
    if args.markdown:
        machine = [f"- {key}: {value}" for key, value in describe_torch_machine().items()]
        page = ["# int8 weights", "", "`python -m benchmarks.int8`.", "", *machine, "", *lines]
        args.markdown.write_text("\n".join(page) + "\n")
    return 0


def _quality_table(rows: Sequence[Quality], texts: Sequence[Sequence[int]]) -> list[str]:
    return [
        f"{sum(map(len, texts)):,} tokens in {len(texts)} texts.",
        "",
        "| weights | perplexity | of float32's | same best token | same 32 tokens | mean logit difference | largest |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {row.weights.name} | {row.perplexity:.4f} | {row.perplexity_ratio:.4f} | {row.same_best_token:.2%} | "
            f"{row.same_continuation:.0%} | {row.mean_difference:.4f} | {row.max_difference:.2f} |"
            for row in rows
        ),
    ]


def _speed_table(rows: Sequence[Speed], memory: Sequence[Memory]) -> list[str]:
    names = [weights.name for weights in KINDS]
    return [
        f"| 100M parameters | {' | '.join(names)} |",
        "|---|" + "---|" * len(names),
        *(f"| {row.step}, ms | {' | '.join(map(_with_range, row.milliseconds))} |" for row in rows),
        f"| memory, MiB | {' | '.join(f'{each.kept_mib:.0f}' for each in memory)} |",
        f"| most while loading, MiB | {' | '.join(f'{each.peak_mib:.0f}' for each in memory)} |",
    ]


def _with_range(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.2f} [{min(values):.2f}, {max(values):.2f}]"


if __name__ == "__main__":
    sys.exit(main())

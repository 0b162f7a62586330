"""Measures the cost of quantised KV in quality and its gain in speed and memory, next to float32 and bfloat16.

python -m benchmarks.kv_quantization [--markdown FILE] [--model DIR --text FILE]

quality   the demo model over text of the kind that it was trained on, from another seed; or, with --model, another
          one over the paragraphs of a file. Each kind of KV next to float32: perplexity, positions with the same
          best token, texts of 32 tokens with the same 32 greedy ones after them, differences of logits
decodes   attention of a decode step to 4096 tokens, of one layer in the shapes of a few models, the kinds of KV in
          turn: milliseconds of processor time on one thread; medians and ranges of the repeats, medians of ratios
memory    bytes that a token takes in one of these layers
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.harness.command import make_parser
from benchmarks.harness.report import Page, describe_torch_machine, row, spread, table
from benchmarks.int8.quality import Quality, Weights, held_out_texts, measure_quality, tokenize
from common.demo_model import demo_model_path
from common.engine.config import ModelConfig
from common.engine.devices.attention import AttentionArgs, AttentionMetadata, KVSpec
from common.engine.devices.kv_quantization import pack
from common.engine.devices.registry import DEVICES

CONTEXT, BLOCK_SIZE = 4096, 16
NUM_LAYERS = 8  # of the cache, in turn: as in a model, KV does not stay in the processor's caches
MODELS = [Weights("float32"), Weights("float32", None, "int8"), Weights("float32", None, "fp8")]
_NUM_DOCUMENTS = 400
_MAX_TOKENS = 512  # of a document
_QUALITY = "KV | perplexity | of float32's | same best token | same 32 tokens | mean logit difference | largest"


class Heads(NamedTuple):
    """The heads of a layer."""

    name: str
    num_heads: int
    num_kv_heads: int
    head_dim: int


SHAPES = [
    Heads("Llama 3 8B", 32, 8, 128),
    Heads("Qwen3 0.6B", 16, 8, 128),
    Heads("Llama 2 7B", 32, 32, 128),
    Heads("Llama 3.2 1B", 32, 8, 64),
    Heads("Qwen2.5 0.5B", 14, 2, 64),
]
KINDS = {
    "float32": (torch.float32, None),
    "bfloat16": (torch.bfloat16, None),
    "int8": (torch.float32, torch.int8),
    "fp8": (torch.float32, torch.float8_e4m3fn),
}
"""Types of queries, and of KV if it is quantised."""


def main() -> int:
    """Measures and prints."""
    parser = make_parser("benchmarks.kv_quantization", __doc__, repeats=15)
    parser.add_argument("--model", type=Path, help="quality of this model instead of the demo model, and no decodes")
    parser.add_argument("--text", type=Path, help="held-out text for --model")
    args = parser.parse_args()
    if (args.model is None) != (args.text is None):
        parser.error("--model and --text come together")
    torch.set_num_threads(1)
    model = args.model or Path(demo_model_path())
    texts = args.text.read_text().split("\n\n") if args.text else held_out_texts(_NUM_DOCUMENTS)
    page = Page("Quantised KV", "`python -m benchmarks.kv_quantization`.", describe_torch_machine())
    if args.model is None:
        page.add("", *table(" | ".join(["layer of", *KINDS, *(f"int8 to {kind}" for kind in ("float32", "bfloat16"))])))
        for shape in SHAPES:
            page.add(_decodes(shape, args.repeats))
        page.add("", *table(" | ".join(["bytes of a token", *KINDS])))
        for shape in SHAPES:
            page.add(row(shape.name, *(spec.bytes_per_block(BLOCK_SIZE) // BLOCK_SIZE for spec in _specs(shape, 1))))
    tokens = tokenize(model, texts, _MAX_TOKENS)
    page.add("", f"{sum(map(len, tokens)):,} tokens in {len(tokens)} texts.", "", *table(_QUALITY))
    for quality in measure_quality(model, tokens, MODELS):
        page.add(row(*_cells(quality)))
    page.write(args.markdown)
    return 0


def _cells(quality: Quality) -> Iterator[str]:
    yield from (quality.weights.name, f"{quality.perplexity:.4f}", f"{quality.perplexity_ratio:.4f}")
    yield from (f"{quality.same_best_token:.2%}", f"{quality.same_continuation:.0%}")
    yield from (f"{quality.mean_difference:.4f}", f"{quality.max_difference:.2f}")


def _specs(shape: Heads, num_layers: int) -> list[KVSpec]:
    kinds = KINDS.values()
    return [KVSpec(num_layers, shape.num_kv_heads, shape.head_dim, shape.head_dim, *kind) for kind in kinds]


@torch.inference_mode()
def _decodes(shape: Heads, repeats: int) -> str:
    """The row of one shape."""
    runs = [_decode(shape, spec) for spec in _specs(shape, NUM_LAYERS)]
    for run in runs:
        run()
    times = [[_milliseconds(run) / NUM_LAYERS for run in runs] for _ in range(repeats)]
    by_kind = dict(zip(KINDS, zip(*times, strict=True), strict=True))
    ratios = [
        statistics.median(other / own for own, other in zip(by_kind["int8"], by_kind[kind], strict=True))
        for kind in ("float32", "bfloat16")
    ]
    cells = (spread(each, ".2f") for each in by_kind.values())
    heads = f"{shape.name}: {shape.num_heads} heads, {shape.num_kv_heads} of KV, {shape.head_dim}"
    return row(heads, *cells, *(f"{ratio:.2f}" for ratio in ratios))


def _decode(shape: Heads, spec: KVSpec) -> Callable[[], None]:
    """Attention of one request's decode, in all layers."""
    num_blocks = CONTEXT // BLOCK_SIZE
    kv_cache = torch.empty((num_blocks + 1, *spec.block_shape(BLOCK_SIZE)), dtype=spec.cache_dtype)
    shape_of_block = (NUM_LAYERS, 2, shape.num_kv_heads, BLOCK_SIZE, shape.head_dim)
    for block in kv_cache:
        vectors = torch.randn(shape_of_block).to(spec.dtype)
        block.copy_(vectors if spec.quantized is None else pack(vectors, spec.quantized))
    table_ = torch.randperm(num_blocks).add(1)[None]
    batch = AttentionMetadata(
        num_decodes=1,
        query_start=[0, 1],
        seq_lens=[CONTEXT],
        seq_lens_tensor=torch.tensor([CONTEXT]),
        block_tables=table_,
        slot_mapping=table_[:, -1] * BLOCK_SIZE + BLOCK_SIZE - 1,
    )
    backend = DEVICES.find("cpu")(ModelConfig(num_threads=1), 0).attention(kv_cache, "attention", spec.dtype)
    backend.begin_step(batch)
    query = torch.randn(1, 1, shape.num_heads, shape.head_dim).to(spec.dtype)
    key, value = (torch.randn(1, 1, shape.num_kv_heads, shape.head_dim).to(spec.dtype) for _ in range(2))
    args = AttentionArgs(scale=shape.head_dim**-0.5)

    def run() -> None:
        for layer in range(NUM_LAYERS):
            backend.attend(layer, query, key, value, args)

    return run


def _milliseconds(run: Callable[[], None]) -> float:
    """Processor time of this thread."""
    started = time.thread_time()
    run()
    return 1000 * (time.thread_time() - started)


if __name__ == "__main__":
    sys.exit(main())

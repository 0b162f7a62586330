"""Speed of the engine next to transformers' `generate` on this machine, in one process, in turn.

    python -m benchmarks.engine [--json FILE] [--markdown FILE]

The models are the demo model and a random Qwen3 of 100M parameters; on a GPU random ones of 0.6B and 8B.

Both get the same random prompts, decode greedily in the same dtype on the same threads, and must give the same tokens
(in bfloat16 they may differ: rounding decides between near logits of a random model); transformers runs with its
default cache and `sdpa` attention. Every figure is the median over `--repeats`.

    decode       gap between two tokens of a batch whose prompts have 128 tokens
    prefill      prompt tokens per second of one prompt of 1024 tokens
    throughput   output tokens per second of 32 prompts of 256 tokens, 64 output tokens each, prefill included

`--grammar` measures what structured output costs instead, see `benchmarks.grammar`.

At the end: time from `baton up` to ready, and resident memory per process (`benchmarks.startup` has the details).
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks import grammar
from benchmarks.compare.baton_side import Baton, offline_config
from benchmarks.compare.side import Generation, Generator, timed
from benchmarks.compare.transformers_side import Transformers
from benchmarks.page import describe_torch_machine
from common.demo_model import DEMO_MODEL_NAME, demo_model_path
from common.engine.client.inproc import InprocClient

ON_GPU = torch.cuda.is_available()
DECODE_PROMPT_TOKENS, DECODE_TOKENS = 128, 48
PREFILL_TOKENS = 1024
WARM_UP_TOKENS = 4
STARTUPS = 3  # clusters started for the time to ready and the memory of each process
THROUGHPUT_PROMPTS, THROUGHPUT_PROMPT_TOKENS, THROUGHPUT_TOKENS = 32, 256, 64


@dataclass(frozen=True, slots=True)
class Measure:
    """A run, and the figure to take of it."""

    name: str
    unit: str
    higher_is_better: bool
    num_prompts: int
    prompt_tokens: int
    output_tokens: int
    figure: Callable[[Generation], float]
    max_repeats: int = 1000


def _gap_ms(generation: Generation) -> float:
    """Median time between two tokens."""
    return statistics.median(generation.gaps_ms)


MEASURES = (
    *(
        Measure(f"decode, batch {batch}", "ms/token", False, batch, DECODE_PROMPT_TOKENS, DECODE_TOKENS, _gap_ms)
        for batch in ((1, 8, 64) if ON_GPU else (1, 8))
    ),
    Measure("prefill, 1024 tokens", "tokens/s", True, 1, PREFILL_TOKENS, 1, lambda g: PREFILL_TOKENS / g.seconds),
    Measure(
        "throughput, 32 x (256 in, 64 out)",
        "tokens/s",
        True,
        THROUGHPUT_PROMPTS,
        THROUGHPUT_PROMPT_TOKENS,
        THROUGHPUT_TOKENS,
        lambda g: THROUGHPUT_PROMPTS * THROUGHPUT_TOKENS / g.seconds,
        max_repeats=3,  # long enough to vary little
    ),
)


@dataclass(frozen=True, slots=True)
class Result:
    """One row of the table."""

    model: str
    measure: str
    unit: str
    baton: float
    transformers: float
    speedup: float  # above 1: Baton is ahead
    baton_range: tuple[float, float]
    transformers_range: tuple[float, float]
    same_tokens: bool


def main() -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", help="directory to measure instead of the demo and 100M models")
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16", "float16"])
    parser.add_argument("--threads", type=int, help="CPU threads; default: torch's")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--grammar", action="store_true", help="measure structured output instead")
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("--markdown", type=Path, help="also write the table here")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()

    machine = describe_torch_machine()
    if args.grammar:
        return _measure_grammars(args, machine)
    results: list[Result] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, directory in _models(args.model, Path(scratch)):
            for result in measure_model(name, directory, args.dtype, args.repeats):
                print(format_row(result), flush=True)
                results.append(result)
    cluster = [] if args.model or ON_GPU else _measure_clusters()
    print("\n".join(cluster))
    if args.json:
        args.json.write_text(json.dumps({"machine": machine, "results": [asdict(r) for r in results]}, indent=2) + "\n")
    if args.markdown:
        args.markdown.write_text(format_markdown(machine, results, cluster))
    return 0 if ON_GPU or all(result.same_tokens for result in results) else 1


def _measure_clusters() -> list[str]:
    from benchmarks import startup  # needs the whole of Baton, where the rest needs the engine only

    return startup.summary([startup.measure_cluster(prefill=1, decode=1) for _ in range(STARTUPS)])


def _measure_grammars(args: argparse.Namespace, machine: dict[str, str]) -> int:
    results: list[grammar.GrammarResult] = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, directory in _models(args.model, Path(scratch)):
            if not (directory / "tokenizer.json").is_file():
                grammar.write_tokenizer(directory, json.loads((directory / "config.json").read_text())["vocab_size"])
            for result in grammar.measure_grammar(name, directory, args.dtype, args.repeats):
                print(result, flush=True)
                results.append(result)
    if args.json:
        rows = [result._asdict() for result in results]
        args.json.write_text(json.dumps({"machine": machine, "results": rows}, indent=2) + "\n")
    if args.markdown:
        args.markdown.write_text(grammar.format_markdown(machine, results))
    return 0


def _models(directories: Sequence[str] | None, scratch: Path) -> Iterator[tuple[str, Path]]:
    if directories:
        yield from ((Path(directory).name, Path(directory)) for directory in directories)
    elif ON_GPU:
        yield "Qwen3 shape, 0.6B random", make_random_model(scratch, "0.6B")
        yield "Qwen3 shape, 8B random", make_random_model(scratch, "8B")
    else:
        yield DEMO_MODEL_NAME, Path(demo_model_path())
        yield "Qwen3 shape, 100M random", make_100m_model(scratch)


# Vocabulary, hidden size, intermediate size, layers, heads, KV heads, size of a head, tied embeddings, type.
SHAPES: dict[str, tuple[int, int, int, int, int, int, int, bool, torch.dtype]] = {
    "100M": (32000, 768, 2048, 12, 12, 4, 64, True, torch.float32),
    "60M": (151936, 320, 960, 8, 5, 5, 64, True, torch.bfloat16),  # a tenth of the next
    "0.6B": (151936, 1024, 3072, 28, 16, 8, 128, True, torch.bfloat16),
    "8B": (151936, 4096, 12288, 36, 32, 8, 128, False, torch.bfloat16),
}


def make_100m_model(parent: Path) -> Path:
    """A random Qwen3 of 100M parameters."""
    return make_random_model(parent, "100M")


def make_random_model(parent: Path, name: str) -> Path:
    """A random Qwen3 of one of the SHAPES."""
    vocab_size, hidden, intermediate, layers, heads, kv_heads, head_dim, tied, dtype = SHAPES[name]
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    directory = parent / f"qwen3-{name.lower()}"
    with torch.device("cuda" if ON_GPU else "cpu"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(directory)
    return directory


def measure_model(name: str, directory: Path, dtype: str, repeats: int) -> Iterator[Result]:
    """All measures of one model."""
    with both_systems(directory, dtype) as (baton, hf, vocab_size):
        for measure in MEASURES:
            yield run_measure(name, measure, baton, hf, vocab_size, repeats)
    gc.collect()


@contextmanager
def both_systems(directory: Path, dtype: str) -> Iterator[tuple[Generator, Generator, int]]:
    """The two systems with the same model on the same device, and its vocabulary."""
    config = offline_config(str(directory), dtype)
    with InprocClient(config) as client:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=getattr(torch, client.spec.dtype), attn_implementation="sdpa"
        )
        model = model.to(client.spec.device).eval()
        yield Baton(client), Transformers(model), client.spec.vocab_size


def run_measure(name: str, measure: Measure, baton: Generator, hf: Generator, vocab_size: int, repeats: int) -> Result:
    """One measure, both systems in turn."""
    figures: dict[Generator, list[float]] = {baton: [], hf: []}
    same_tokens = True
    for repeat in range(min(repeats, measure.max_repeats) + 1):
        generator = torch.Generator().manual_seed(repeat)
        shape = (measure.num_prompts, measure.prompt_tokens)
        prompts = torch.randint(3, vocab_size, shape, generator=generator).tolist()
        order = (baton, hf) if repeat % 2 else (hf, baton)
        num_tokens = measure.output_tokens if repeat else min(measure.output_tokens, WARM_UP_TOKENS)
        generations = {system: timed(system, prompts, num_tokens) for system in order}
        same_tokens &= generations[baton].tokens == generations[hf].tokens
        if repeat:
            for system, generation in generations.items():
                figures[system].append(measure.figure(generation))
    ours, theirs = statistics.median(figures[baton]), statistics.median(figures[hf])
    return Result(
        model=name,
        measure=measure.name,
        unit=measure.unit,
        baton=ours,
        transformers=theirs,
        speedup=ours / theirs if measure.higher_is_better else theirs / ours,
        baton_range=(min(figures[baton]), max(figures[baton])),
        transformers_range=(min(figures[hf]), max(figures[hf])),
        same_tokens=same_tokens,
    )


def format_row(result: Result) -> str:
    """One line for the terminal."""
    note = "" if result.same_tokens else "  TOKENS DIFFER"
    return (
        f"{result.model:<26} {result.measure:<34} baton {result.baton:>9.2f}  transformers {result.transformers:>9.2f} "
        f"{result.unit:<9} x{result.speedup:.2f}{note}"
    )


def format_markdown(machine: dict[str, str], results: Sequence[Result], cluster: Sequence[str]) -> str:
    """The table with what it depends on."""
    lines = [
        "# Engine next to transformers' generate",
        "",
        "`python -m benchmarks.engine`; medians, ranges of the repeats in brackets. Speedup above 1: Baton is ahead.",
        "",
        *(f"- {key}: {value}" for key, value in machine.items()),
        "",
        "| model | measure | unit | Baton | transformers | speedup | same tokens |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in results:
        ours, theirs = _with_range(r.baton, r.baton_range), _with_range(r.transformers, r.transformers_range)
        same = "yes" if r.same_tokens else "NO"
        lines.append(f"| {r.model} | {r.measure} | {r.unit} | {ours} | {theirs} | {r.speedup:.2f} | {same} |")
    if cluster:
        lines += ["", "`baton up`, one prefill and one decode pod, already installed:", "", "```", *cluster, "```"]
    return "\n".join(lines) + "\n"


def _with_range(value: float, bounds: tuple[float, float]) -> str:
    return f"{value:.4g} [{bounds[0]:.4g}, {bounds[1]:.4g}]"


if __name__ == "__main__":
    sys.exit(main())

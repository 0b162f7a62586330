"""Decode steps with LoRA adapters, next to the same without.

    python -m benchmarks.adapters [--rank 16] [--markdown FILE]

A random model of the shape of Qwen3-0.6B's layers, of which it has fewer, in one process; all steps are measured in
turn. Adapters change all seven linear layers of a layer. `one` gives all requests the same adapter, `eight` mixes eight
of them. Times are those between two tokens of a batch whose prompts have 64 tokens; a step that takes a tenth more than
without adapters has 1.10 in its column.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.harness.command import make_parser
from benchmarks.harness.figures import ratio
from benchmarks.harness.report import Page, describe_torch_machine, row, spread, table
from common.engine.llm import LLM, LoRARequest
from common.types import SamplingParams

BATCHES = (1, 8, 32)
PROMPT, NUM_TOKENS = 64, 33
VOCAB_SIZE = 32_768
NUM_ADAPTERS = 8
CONFIG = Qwen3Config(
    vocab_size=VOCAB_SIZE,
    hidden_size=1024,
    intermediate_size=3072,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=8,
    head_dim=128,
    eos_token_id=None,
)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

Adapters = Sequence[LoRARequest | None]


def main() -> int:
    """Measures and prints."""
    parser = make_parser("benchmarks.adapters", __doc__, repeats=5)
    parser.add_argument("--rank", type=int, default=16, help="of all adapters (default: %(default)s)")
    args = parser.parse_args()
    page = Page(
        "LoRA adapters",
        f"`python -m benchmarks.adapters --rank {args.rank}`; rank {args.rank}.",
        describe_torch_machine(),
    )
    page.add("", *table("numbers | step | without, ms | one, ms | eight, ms | one | eight"))
    with tempfile.TemporaryDirectory() as root:
        directory = Path(root)
        write_model(directory / "model")
        paths = [write_adapter(directory / str(seed), seed, args.rank) for seed in range(NUM_ADAPTERS)]
        for dtype in ("float32", "bfloat16"):
            for line in measure(directory / "model", paths, dtype, args.repeats):
                page.add(line)
    page.write(args.markdown)
    return 0


def measure(model: Path, paths: Sequence[Path], dtype: str, repeats: int) -> Iterator[str]:
    """The rows of a type of numbers."""
    adapters = [LoRARequest(path.name, 0, str(path)) for path in paths]
    options: dict[str, Any] = {"block_size": 64, "kv_cache_memory": 1 << 30, "enable_prefix_caching": False}
    with LLM(model, dtype=dtype, max_num_seqs=32, max_loras=NUM_ADAPTERS, **options) as llm:
        for size in BATCHES:
            sides: list[Adapters] = [
                [None] * size,
                adapters[:1] * size,
                [adapters[number % NUM_ADAPTERS] for number in range(size)],
            ]
            times = [[_between_tokens(llm, side) for side in sides] for _ in range(repeats)]
            yield _row(dtype, f"decode of {size}", times)
        for length in (512,):
            times = [[_seconds(llm, side[:1], length, 1) for side in sides] for _ in range(repeats)]
            yield _row(dtype, f"prefill of {length}", times)


def write_model(directory: Path) -> None:
    """Writes a model with random weights."""
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIG, dtype=torch.bfloat16).save_pretrained(directory)


def write_adapter(directory: Path, seed: int, rank: int) -> Path:
    """Writes an adapter with random weights, in PEFT's format."""
    generator = torch.Generator().manual_seed(seed)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIG)
    tensors = {}
    for path, module in model.named_modules():
        if path.rpartition(".")[2] in TARGETS:
            key = f"base_model.model.{path}"
            out_features, in_features = module.weight.shape
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, in_features, generator=generator) / in_features**0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(out_features, rank, generator=generator) / 100
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return directory


def _between_tokens(llm: LLM, adapters: Adapters) -> float:
    first, all_tokens = (min(_seconds(llm, adapters, PROMPT, number) for _ in range(2)) for number in (1, NUM_TOKENS))
    return (all_tokens - first) / (NUM_TOKENS - 1)


def _seconds(llm: LLM, adapters: Adapters, length: int, num_tokens: int) -> float:
    prompts = torch.randint(3, VOCAB_SIZE, (len(adapters), length)).tolist()
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    started = time.perf_counter()
    llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapters)
    return time.perf_counter() - started


def _row(dtype: str, step: str, times: list[list[float]]) -> str:
    sides = [[1000 * each[side] for each in times] for side in range(3)]
    return row(dtype, step, *map(spread, sides), *(f"{ratio(side, sides[0]):.2f}" for side in sides[1:]))


if __name__ == "__main__":
    raise SystemExit(main())

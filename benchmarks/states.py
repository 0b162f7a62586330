"""Decoding and prompts of models with layers that keep a state, next to transformers with its own cache.

    python -m benchmarks.states [--markdown FILE]

Random models of two kinds, in float32, in one process and in turn: a Jamba (Mamba in three layers of four) and a
Qwen3-Next (gated delta nets in three of four). `decode` is the time between two tokens of a batch whose prompts have 64
tokens; `prefill` the time to the first token of one prompt. Above a ratio of 1 Baton is faster. The time between tokens
is that of an answer less that of its first token, the least of a few of each.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, JambaConfig, PreTrainedConfig, Qwen3NextConfig

from benchmarks.harness.command import make_parser
from benchmarks.harness.figures import ratio
from benchmarks.harness.report import Page, describe_torch_machine, row, spread, table
from common.engine.llm import LLM
from common.types import SamplingParams

DECODES = (1, 8)  # sequences
PROMPT, NUM_TOKENS = 64, 33
PREFILLS = (256, 1024)
VOCAB_SIZE = 8192
_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
MODELS: dict[str, PreTrainedConfig] = {
    "Jamba": JambaConfig(**_SIZES, attn_layer_period=4, attn_layer_offset=2, num_experts=1),
    "Qwen3-Next": Qwen3NextConfig(
        **_SIZES,
        head_dim=64,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=512,
        shared_expert_intermediate_size=512,
    ),
}
Answer = Callable[[list[list[int]], int], object]
"""Has a side answer prompts with so many tokens each."""


def main() -> int:
    """Measures and prints."""
    args = make_parser("benchmarks.states", __doc__, repeats=5).parse_args()
    page = Page("Layers that keep a state", "`python -m benchmarks.states`.", describe_torch_machine())
    page.add("", *table("model | step | Baton, ms | transformers, ms | ratio"))
    for name, config in MODELS.items():
        with tempfile.TemporaryDirectory() as directory:
            for line in measure(name, config, Path(directory), args.repeats):
                page.add(line)
    page.write(args.markdown)
    return 0


def measure(name: str, config: PreTrainedConfig, directory: Path, repeats: int) -> Iterator[str]:
    """The rows of a model."""
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(directory)
    with LLM(directory, block_size=64, kv_cache_memory=1 << 30, max_num_seqs=16, enable_prefix_caching=False) as llm:
        sides = [_by_baton(llm), _by_transformers(model)]
        for num_sequences in DECODES:
            times = [[_between_tokens(side, num_sequences) for side in sides] for _ in range(repeats)]
            yield _row(name, f"decode of {num_sequences}", times)
        for length in PREFILLS:
            times = [[_seconds(side, 1, length, 1) for side in sides] for _ in range(repeats)]
            yield _row(name, f"prefill of {length}", times)


def _by_baton(llm: LLM) -> Answer:
    def answer(prompts: list[list[int]], num_tokens: int) -> object:
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        return llm.generate(prompts, sampling, use_tqdm=False)

    return answer


def _by_transformers(model: Any) -> Answer:
    @torch.inference_mode()
    def answer(prompts: list[list[int]], num_tokens: int) -> object:
        ids = torch.tensor(prompts)
        return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, do_sample=False)

    return answer


def _between_tokens(answer: Answer, num_sequences: int) -> float:
    first, all_tokens = (
        min(_seconds(answer, num_sequences, PROMPT, number) for _ in range(2)) for number in (1, NUM_TOKENS)
    )
    return (all_tokens - first) / (NUM_TOKENS - 1)


def _seconds(answer: Answer, num_sequences: int, length: int, num_tokens: int) -> float:
    prompts = torch.randint(3, VOCAB_SIZE, (num_sequences, length)).tolist()
    started = time.perf_counter()
    answer(prompts, num_tokens)
    return time.perf_counter() - started


def _row(name: str, step: str, times: list[list[float]]) -> str:
    ours, theirs = ([1000 * pair[side] for pair in times] for side in range(2))
    return row(name, step, spread(ours), spread(theirs), f"{ratio(theirs, ours):.2f}")


if __name__ == "__main__":
    raise SystemExit(main())

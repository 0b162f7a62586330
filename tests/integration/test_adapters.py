"""Models whose own attention code is replaced: their variants generate what transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.engine.llm import LLM
from common.errors import ModelLoadError
from common.types import SamplingParams
from tests.tiny_models import prompt_of, random_model, reference_generate, tiny_config

SIZES = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 256}
OF_GPTS = {"n_embd": 48, "n_layer": 3, "n_head": 6, "vocab_size": 256, "n_positions": 128}
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "bloom, whose heads are no power of two": ("BloomConfig", {"n_layer": 3, "n_head": 6, **SIZES}),
    "falcon of 7B": ("FalconConfig", {"multi_query": True, **SIZES}),
    "falcon with biases, and heads that are not shared": (
        "FalconConfig",
        {"multi_query": False, "parallel_attn": False, "bias": True, **SIZES},
    ),
    "falcon of 40B": ("FalconConfig", {"new_decoder_architecture": True, "num_kv_heads": 2, **SIZES}),
    "gpt-j that rotates a part of its heads": ("GPTJConfig", {"rotary_dim": 4, **OF_GPTS}),
    "gpt-neo with short windows": (
        "GPTNeoConfig",
        {
            "hidden_size": 48,
            "num_layers": 4,
            "num_hidden_layers": 4,
            "num_heads": 6,
            "attention_types": [[["global", "local"], 2]],
            "window_size": 8,
            "vocab_size": 256,
            "max_position_embeddings": 128,
        },
    ),
    "mpt that clips": (
        "MptConfig",
        {
            "d_model": 48,
            "n_layers": 3,
            "n_heads": 6,
            "vocab_size": 256,
            "max_seq_len": 128,
            "attn_config": {"clip_qkv": 0.1, "softmax_scale": 0.2},
        },
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_tokens_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    """In chunks, beside each other, in so few blocks that some are preempted, and with prefix hits."""
    class_name, settings = VARIANTS[variant]
    random_model(tiny_config(class_name, **settings)).save_pretrained(tmp_path)
    prompts = [prompt_of(length) for length in (1, 5, 33, 70)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    num_groups = 2 if "windows" in variant else 1
    with LLM(tmp_path, block_size=4, num_blocks=1 + 23 * num_groups, max_num_batched_tokens=16, num_threads=1) as llm:
        assert len(llm.spec.layout.groups) == num_groups
        for _ in range(2):
            answers = llm.generate(prompts, params, use_tqdm=False)
            assert [each.token_ids for each in answers] == [reference_generate(tmp_path, each, 20) for each in prompts]
        assert llm._client.stats().num_preemptions > 0 or num_groups > 1, "windows give blocks back"
        assert llm.check_integrity().violations == []


def test_falcons_that_round_their_alibi_are_refused(tmp_path: Path) -> None:
    random_model(tiny_config("FalconConfig", alibi=True, **SIZES)).save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="falcon with ALiBi, whose terms it rounds to bfloat16, cannot be served"):
        LLM(tmp_path)

"""Tiny models with random weights, one of each architecture, by the `model_type` of transformers.

`python -m tests.architectures.models qwen3_next DIRECTORY` writes one that has the demo model's tokenizer, so that
`baton up DIRECTORY` serves it.
"""

from __future__ import annotations

import functools
import inspect
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import transformers
from transformers import CONFIG_MAPPING, PreTrainedConfig

from common.demo_model import demo_model_path
from tests.tiny_models import MAX_MODEL_LEN, SLIDING_WINDOW, VOCAB_SIZE, random_model, scratch_dir

MODEL_TYPES = (
    "afmoe",
    "apertus",
    "arcee",
    "aria_text",
    "axk1",
    "bamba",
    "bart",
    "beam",
    "biogpt",
    "bitnet",
    "bloom",
    "codegen",
    "cohere",
    "cohere2",
    "cohere2_moe",
    "ctrl",
    "cwm",
    "deepseek_v2",
    "deepseek_v3",
    "deepseek_v32",
    "deepseek_v4",
    "diffllama",
    "doge",
    "dots1",
    "ernie4_5",
    "ernie4_5_moe",
    "exaone4",
    "exaone_moe",
    "falcon",
    "falcon_mamba",
    "flex_olmo",
    "flint",
    "gemma",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gemma4_unified_text",
    "glm",
    "glm4",
    "glm4_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "gpt-sw3",
    "gpt2",
    "gpt_bigcode",
    "gpt_neo",
    "gpt_neox",
    "gpt_neox_japanese",
    "gpt_oss",
    "gptj",
    "granite",
    "granite_swa",
    "granitemoe",
    "granitemoe_swa",
    "granitemoehybrid",
    "granitemoeshared",
    "helium",
    "hrm_text",
    "hunyuan_v1_dense",
    "hunyuan_v1_moe",
    "hy_v3",
    "hy_v4",
    "hyperclovax",
    "internlm3",
    "iquestcoder",
    "jais2",
    "jamba",
    "jetmoe",
    "kimi_linear",
    "kolibri1",
    "laguna",
    "lfm2",
    "lfm3",
    "llama",
    "llama4_text",
    "mamba",
    "marian",
    "mbart",
    "mellum",
    "mimo_v2_flash",
    "minicpm3",
    "minimax",
    "minimax_m2",
    "minimax_m3_vl_text",
    "ministral",
    "ministral3",
    "mistral",
    "mixtral",
    "modernbert-decoder",
    "mpt",
    "nanochat",
    "nemotron",
    "nemotron_h",
    "olmo",
    "olmo2",
    "olmo3",
    "olmo_hybrid",
    "olmoe",
    "openai-gpt",
    "opt",
    "persimmon",
    "phi",
    "phi3",
    "phimoe",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_moe",
    "qwen3_next",
    "recurrent_gemma",
    "rwkv",
    "seed_oss",
    "smollm3",
    "solar_open",
    "stablelm",
    "starcoder2",
    "vaultgemma",
    "xglm",
    "youtu",
    "zamba",
)

# By the names that configurations have for them; each takes those that it knows.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 48),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff", "ffn_hidden_size"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    "num_key_value_heads": 2,
    "head_dim": 16,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), MAX_MODEL_LEN),
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "sliding_window": SLIDING_WINDOW,
    "query_pre_attn_scalar": 16,
    "rotary_dim": 8,
    **dict.fromkeys(("dropout", "hidden_dropout", "attention_dropout"), 0.0),
    # Experts.
    **dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"), 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 32),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts", "first_k_dense_replace", "topk_group"), 1),
    "n_group": 2,
    # Latent attention.
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    # Layers with a state.
    **dict.fromkeys(("state_size", "d_state", "mamba_d_state", "ssm_state_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads"), 8),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 12),
    **dict.fromkeys(("n_groups", "mamba_n_groups"), 1),
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim"), 16),
    "linear_num_heads": 4,
}
_LATENT = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
_MIXED = ("afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "gemma3_text", "kolibri1", "olmo3")
_WITH_STATES = (
    "granitemoehybrid",
    "nemotron_h",
    "olmo_hybrid",
    "qwen3_5_moe_text",
    "qwen3_5_text",
    "qwen3_next",
)
_OWN: dict[str, dict[str, Any]] = {
    **{name: {"layer_types": ["linear_attention", "linear_attention", "full_attention"]} for name in _WITH_STATES},
    "bamba": {"attn_layer_indices": [2]},
    "jamba": {"attn_layer_period": 3, "attn_layer_offset": 1},
    **{name: {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]} for name in _MIXED},
    **{name: {"num_key_value_heads": 4} for name in _LATENT},
    "kimi_linear": {
        "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "num_key_value_heads": 4,
    },
    "ernie4_5_moe": {"moe_k": 2, "moe_num_experts": 4},
    "phimoe": {"sliding_window": MAX_MODEL_LEN},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]], "window_size": SLIDING_WINDOW},
    "helium": {"head_dim": 12},
    "stablelm": {"partial_rotary_factor": 0.5},
    "llama4_text": {
        "no_rope_layers": [1, 0, 1],
        "attention_chunk_size": SLIDING_WINDOW,
        "floor_scale": 8,  # tokens, after each of which queries of layers without rotary embeddings grow
        "interleave_moe_layer_step": 2,
        "intermediate_size_mlp": 96,
    },
    "xglm": {"attention_heads": 4},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"]},  # of which two share weights
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
}


@functools.cache
def model_dir(model_type: str, times: int = 1) -> Path:
    """Directory of the tiny model, of which stages may need the layers several times."""
    directory = scratch_dir(model_type)
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    config = _config(model_type)
    if times > 1:
        layer_types = config.layer_types * times
        config = _config(model_type, num_hidden_layers=len(layer_types), layer_types=layer_types)
    random_model(config).save_pretrained(directory)
    return directory


def write_model(model_type: str, directory: Path) -> None:
    """Writes a tiny model with the demo model's tokenizer to a directory."""
    of_demo = json.loads((demo_model_path() / "config.json").read_text())
    sizes = {name: of_demo[name] for name in ("vocab_size", "max_position_embeddings")}
    random_model(_config(model_type, **sizes)).save_pretrained(directory)
    for path in demo_model_path().glob("token*"):
        shutil.copy(path, directory)


def _config(model_type: str, **own: Any) -> PreTrainedConfig:
    config_class = CONFIG_MAPPING[model_type]
    known = set(inspect.signature(config_class).parameters)
    sizes = {name: value for name, value in _SIZES.items() if name in known}
    return config_class(**sizes | _OWN.get(model_type, {}) | own)


if __name__ == "__main__":
    write_model(sys.argv[1], Path(sys.argv[2]))

"""Random-weight models of a few kilobytes per architecture, and what transformers generates with them.

`tiny_model_dir(name)` makes the model once per process; `reference_generate` is greedy `generate` in float32, cached.
Weights are scaled up so that logits are far apart: greedy tokens neither tie nor repeat one token for ever.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

VOCAB_SIZE = 256
MAX_MODEL_LEN = 512
SLIDING_WINDOW = 12  # smaller than the prompts of the tests

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


def _config(class_name: str, **overrides: object) -> Callable[[], PreTrainedConfig]:
    return lambda: getattr(transformers, class_name)(**{**_COMMON, **overrides})


_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": _config("LlamaConfig"),
    "qwen3": _config("Qwen3Config", head_dim=16),
    "mistral": _config("MistralConfig", sliding_window=SLIDING_WINDOW),
    "gemma2": _config(
        "Gemma2Config", head_dim=16, sliding_window=SLIDING_WINDOW, query_pre_attn_scalar=16, tie_word_embeddings=True
    ),
    "gemma3": _config(
        "Gemma3TextConfig",
        head_dim=16,
        sliding_window=SLIDING_WINDOW,
        query_pre_attn_scalar=16,
        tie_word_embeddings=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "phi3": _config("Phi3Config"),
    "opt": _config("OPTConfig", ffn_dim=96, word_embed_proj_dim=48, dropout=0.0),
    "gpt2": _config("GPT2Config", n_embd=48, n_layer=3, n_head=4, n_positions=MAX_MODEL_LEN),
    "mixtral": _config("MixtralConfig", num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": _config("Qwen3MoeConfig", head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "gpt_oss": _config(
        "GptOssConfig",
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=SLIDING_WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "deepseek_v3": _config(
        "DeepseekV3Config",
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        moe_intermediate_size=32,
    ),
}

TINY_MODELS: tuple[str, ...] = tuple(_CONFIGS)


@functools.cache
def tiny_model_dir(name: str, *, seed: int = 0) -> Path:
    """Directory of the tiny model: config.json and model.safetensors. The same files in every process."""
    directory = _root() / f"{name}-{seed}"
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    random_model(_CONFIGS[name](), seed=seed).save_pretrained(directory)
    return directory


def tiny_config(class_name: str, **overrides: object) -> PreTrainedConfig:
    """The configuration of a tiny model with other settings than those above."""
    return _config(class_name, **overrides)()


def reference_generate(model_dir: Path, prompt_token_ids: Sequence[int], max_tokens: int) -> list[int]:
    """Greedy tokens of transformers' `generate` with eager attention in float32."""
    return list(_generate(model_dir, tuple(prompt_token_ids), max_tokens))


def reference_logprobs(model_dir: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """transformers' log-softmax in float32 after each token: [tokens, vocabulary]."""
    with torch.inference_mode():
        logits = _reference_model(model_dir)(torch.tensor([list(token_ids)])).logits[0]
    return torch.log_softmax(logits, dim=-1)


def reference_model(model_dir: Path) -> transformers.PreTrainedModel:
    """transformers' model in float32."""
    return _reference_model(model_dir)


def prompt_of(length: int, *, seed: int = 0) -> list[int]:
    """A random prompt of tiny-model tokens, special ones excluded."""
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


@functools.cache
def _root() -> Path:
    return scratch_dir("tiny-models")


def scratch_dir(name: str) -> Path:
    """A new directory, removed as this process ends."""
    directory = Path(tempfile.mkdtemp(prefix=f"baton-{name}-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def random_model(config: PreTrainedConfig, *, seed: int = 0) -> transformers.PreTrainedModel:
    """A model with random weights, the same for each seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter_name, parameter in model.named_parameters():
            if "emb" in parameter_name or "wte" in parameter_name or "wpe" in parameter_name:
                torch.nn.init.normal_(parameter, std=0.03)
            elif parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=2.0 / parameter.shape[-1] ** 0.5)
            elif not parameter_name.endswith(".weight"):
                torch.nn.init.normal_(parameter, std=0.1)
    return model


@functools.lru_cache(maxsize=4)
def _reference_model(model_dir: Path) -> transformers.PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()


@functools.cache
def _generate(model_dir: Path, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    model = _reference_model(model_dir)
    prompt_ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            prompt_ids,
            attention_mask=torch.ones_like(prompt_ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=set(getattr(model.config, "layer_types", None) or [""]) != {"linear_attention"},
        )
    return tuple(output[0, len(prompt) :].tolist())

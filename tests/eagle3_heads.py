"""EAGLE-3 heads of a few kilobytes for the tiny models, and what they propose by plain torch in float32: all tokens at
once, nothing cached."""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from tests.tiny_models import MAX_MODEL_LEN, reference_model, scratch_dir

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, HIDDEN, INNER = 4, 2, 8, 40, 64  # of heads of their own size
DRAFT_SIZE = 100
NUM_FIRST = 10  # tokens of the vocabulary that all heads propose
EPSILON = 1e-5
THETA = 10000.0


@functools.cache
def tiny_head_dir(target: Path, *, seed: int = 0, has_embedding: bool = True, is_normed: bool = False) -> Path:
    """Directory of a random head for a tiny model. `has_embedding`: of its own, and its own hidden size;
    `is_normed`: norm_before_residual."""
    directory = scratch_dir("tiny-heads")
    config = json.loads((target / "config.json").read_text())
    target_size, vocab_size, num_layers = (config[name] for name in ("hidden_size", "vocab_size", "num_hidden_layers"))
    hidden = HIDDEN if has_embedding else target_size
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 2.0 / shape[-1] ** 0.5

    weights = {
        "fc.weight": random(hidden, 3 * target_size),
        "midlayer.self_attn.q_proj.weight": random(NUM_HEADS * HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": random(NUM_KV_HEADS * HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": random(NUM_KV_HEADS * HEAD_DIM, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": random(hidden, NUM_HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": random(INNER, hidden),
        "midlayer.mlp.up_proj.weight": random(INNER, hidden),
        "midlayer.mlp.down_proj.weight": random(hidden, INNER),
        "lm_head.weight": random(DRAFT_SIZE, hidden),
    }
    for name in ("midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm"):
        weights[f"{name}.weight"] = 1 + random(hidden) / 8
    if has_embedding:
        weights["embed_tokens.weight"] = random(vocab_size, hidden)
    others = torch.randperm(vocab_size - NUM_FIRST, generator=generator)[: DRAFT_SIZE - NUM_FIRST]
    chosen = torch.cat([torch.arange(NUM_FIRST), others.sort().values + NUM_FIRST])
    weights["d2t"] = chosen - torch.arange(DRAFT_SIZE)
    weights["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, chosen, True)
    save_file(weights, directory / "model.safetensors")
    own = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": hidden,
        "target_hidden_size": target_size,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": EPSILON,
        "rope_theta": THETA,
        "max_position_embeddings": MAX_MODEL_LEN,
        "vocab_size": vocab_size,
        "draft_vocab_size": DRAFT_SIZE,
        "norm_before_residual": is_normed,
    }
    if len(_default_layers(num_layers)) != 3:
        own["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [0, num_layers // 2, num_layers - 1]}
    (directory / "config.json").write_text(json.dumps(own))
    return directory


def reference_drafts(
    target: Path, head: Path, token_ids: Sequence[int], num_drafts: int, start: int = 0, allowed: Sequence[int] = ()
) -> list[int]:
    """Greedy drafts of a head that begins at the place `start`. `allowed`: none but these; empty: any."""
    weights, config = _head(head)
    model = reference_model(target)
    with torch.inference_mode():
        states = model(torch.tensor([list(token_ids)]), output_hidden_states=True).hidden_states
        named = config.get("eagle_config", {}).get("eagle_aux_hidden_state_layer_ids")
        layers = named or _default_layers(len(states) - 1)
        features = torch.cat([states[layer][0] for layer in layers], -1) @ weights["fc.weight"].T
        table = weights.get("embed_tokens.weight", model.get_input_embeddings().weight)
        features, tokens = features[start:-1], list(token_ids[start + 1 :])
        chosen = torch.arange(len(weights["d2t"])) + weights["d2t"]
        drafts: list[int] = []
        for _ in range(num_drafts):
            hidden = _layer(weights, table[tokens], features, is_normed=config["norm_before_residual"])
            logits = _norm(hidden[-1], weights["norm.weight"]) @ weights["lm_head.weight"].T
            if allowed:
                logits[~torch.isin(chosen, torch.tensor(allowed))] = -torch.inf
            drafts.append(int(chosen[logits.argmax()]))
            features = torch.cat([features, hidden[-1:]])
            tokens.append(drafts[-1])
    return drafts


def _default_layers(num_layers: int) -> list[int]:
    return sorted({2, num_layers // 2, num_layers - 3})


@functools.cache
def _head(directory: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    return load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())


def _layer(
    weights: dict[str, torch.Tensor], embeddings: torch.Tensor, features: torch.Tensor, *, is_normed: bool
) -> torch.Tensor:
    def linear(name: str, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ weights[f"midlayer.{name}.weight"].T

    def norm(name: str, inputs: torch.Tensor) -> torch.Tensor:
        return _norm(inputs, weights[f"midlayer.{name}.weight"])

    num_tokens = len(features)
    normed = norm("hidden_norm", features)
    inputs = torch.cat([norm("input_layernorm", embeddings), normed], -1)
    query, key, value = (
        linear(f"self_attn.{name}_proj", inputs).view(num_tokens, -1, HEAD_DIM).transpose(0, 1) for name in "qkv"
    )
    query, key = _rotated(query), _rotated(key)
    key, value = (each.repeat_interleave(NUM_HEADS // NUM_KV_HEADS, 0) for each in (key, value))
    scores = query @ key.transpose(1, 2) / HEAD_DIM**0.5
    scores += torch.full((num_tokens, num_tokens), -torch.inf).triu(1)
    attended = (scores.softmax(-1) @ value).transpose(0, 1).flatten(1)
    hidden = linear("self_attn.o_proj", attended) + (normed if is_normed else features)
    inner = norm("post_attention_layernorm", hidden)
    gated = functional.silu(linear("mlp.gate_proj", inner)) * linear("mlp.up_proj", inner)
    return hidden + linear("mlp.down_proj", gated)


def _norm(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return inputs * (inputs.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight


def _rotated(states: torch.Tensor) -> torch.Tensor:
    frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    angles = (torch.arange(states.shape[1])[:, None] * frequencies).repeat(1, 2)
    first, second = states.chunk(2, -1)
    return states * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

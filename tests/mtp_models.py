"""A tiny model of DeepSeek-V3's shape with a multi-token head, and what the head proposes by `transformers`' layers in
float32: all tokens at once, nothing cached."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3ForCausalLM

from tests.tiny_models import reference_model, scratch_dir, tiny_model_dir

PREFIX = "model.layers.3."
EPSILON = 1e-6


@functools.cache
def mtp_model_dir() -> Path:
    """The tiny model, whose head has the weights of its last layer, and some of its own."""
    directory = scratch_dir("tiny-mtp")
    shutil.copytree(tiny_model_dir("deepseek_v3"), directory, dirs_exist_ok=True)
    weights = load_file(directory / "model.safetensors")
    size = weights["model.norm.weight"].shape[0]
    generator = torch.Generator().manual_seed(0)
    last = {key: value for key, value in weights.items() if key.startswith("model.layers.2.")}
    for key, value in last.items():
        weights[key.replace("model.layers.2.", PREFIX)] = value.flip(0) if value.dim() == 2 else value.clone()
    weights[f"{PREFIX}eh_proj.weight"] = torch.randn((size, 2 * size), generator=generator) * 2 / size**0.5
    for name in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"{PREFIX}{name}.weight"] = 1 + torch.randn(size, generator=generator) / 8
    weights[f"{PREFIX}embed_tokens.weight"] = weights["model.embed_tokens.weight"].clone()
    weights[f"{PREFIX}shared_head.head.weight"] = weights["lm_head.weight"].flip(0)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def reference_mtp_drafts(token_ids: Sequence[int], num_drafts: int, start: int = 0) -> list[int]:
    """Greedy drafts of a head that begins at the place `start`."""
    weights, target, layered = _reference()
    with torch.inference_mode():
        states = target.model(torch.tensor([list(token_ids)])).last_hidden_state[0]
        features, tokens = states[start:-1], list(token_ids[start + 1 :])
        drafts: list[int] = []
        for _ in range(num_drafts):
            embeddings = _norm(weights["embed_tokens"][tokens], weights["enorm"])
            joined = torch.cat([embeddings, _norm(features, weights["hnorm"])], -1) @ weights["eh_proj"].T
            seen: list[torch.Tensor] = []
            hook = layered.model.layers[2].register_forward_hook(lambda _, args, out: seen.append(out))  # noqa: B023
            layered(inputs_embeds=joined[None], use_cache=False)
            hook.remove()
            hidden = seen[0][0]
            logits = _norm(hidden[-1], weights["shared_head.norm"]) @ weights["shared_head.head"].T
            drafts.append(int(logits.argmax()))
            features = torch.cat([features, hidden[-1:]])
            tokens.append(drafts[-1])
    return drafts


@functools.cache
def _reference() -> tuple[dict[str, torch.Tensor], Any, Any]:
    """Weights of the head, the model, and one whose last layer is the head's and whose others do nothing."""
    stored = load_file(mtp_model_dir() / "model.safetensors")
    own = {key.removeprefix(PREFIX).removesuffix(".weight"): stored[key] for key in stored if key.startswith(PREFIX)}
    with tempfile.TemporaryDirectory() as directory:
        shutil.copytree(tiny_model_dir("deepseek_v3"), directory, dirs_exist_ok=True)
        moved = {key: value for key, value in stored.items() if not key.startswith(PREFIX)}
        moved |= {key: stored[key.replace("model.layers.2.", PREFIX)] for key in moved if "model.layers.2." in key}
        save_file(moved, f"{directory}/model.safetensors", metadata={"format": "pt"})
        layered = DeepseekV3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for layer in layered.model.layers[:2]:
        layer.forward = lambda hidden, **_: hidden
    return own, reference_model(mtp_model_dir()), layered


def _norm(inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return inputs * (inputs.square().mean(-1, keepdim=True) + EPSILON).rsqrt() * weight

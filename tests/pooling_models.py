"""Tiny models that pool, on disk as they are published, and what transformers computes with them."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.tiny_models import reference_model, scratch_dir, tiny_config

LABELS = ("sad", "glad", "neither")


def embedding_model_dir(base: Path, directory: Path, *, mode: str = "lasttoken", normalizes: bool = True) -> Path:
    """Copies `base` and adds the files of sentence-transformers. `mode`: lasttoken, cls_token or mean_tokens."""
    shutil.copytree(base, directory, dirs_exist_ok=True)
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalizes else [])]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    pooling = directory / "1_Pooling" / "config.json"
    pooling.parent.mkdir(exist_ok=True)
    names = ["cls_token", "mean_tokens", "lasttoken", "max_tokens"]
    modes = {f"pooling_mode_{name}": name == mode for name in names}
    pooling.write_text(json.dumps({"word_embedding_dimension": 48, "include_prompt": True} | modes))
    return directory


def without_head(base: Path, directory: Path) -> Path:
    """Copies a Qwen3 model as its class without a head is saved: names without a prefix, and no head."""
    shutil.copytree(base, directory, dirs_exist_ok=True)
    weights = load_file(directory / "model.safetensors")
    kept = {name.removeprefix("model."): value.clone() for name, value in weights.items() if name != "lm_head.weight"}
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen3Model"]}))
    return directory


@functools.cache
def classifier_dir(num_labels: int = 3, kind: str = "Sequence", class_name: str = "Qwen3", **config: object) -> Path:
    """A tiny model with a classification head."""
    directory = scratch_dir("classifier")
    names = dict(enumerate(LABELS[:num_labels]))
    own = {"head_dim": 16} if class_name == "Qwen3" else {}
    settings = tiny_config(f"{class_name}Config", num_labels=num_labels, id2label=names, **own, **config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = getattr(transformers, f"{class_name}For{kind}Classification")._from_config(
            settings, dtype=torch.float32
        )
        for parameter in model.parameters():
            if parameter.dim() >= 2:
                torch.nn.init.normal_(parameter, std=1.0 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(directory)
    return directory


def hidden_states(directory: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """transformers' final hidden states in float32, [tokens, size]."""
    model = reference_model(directory)
    with torch.inference_mode():
        return model.base_model(torch.tensor([list(token_ids)])).last_hidden_state[0]


def embedding(
    directory: Path, token_ids: Sequence[int], mode: str = "lasttoken", *, normalizes: bool = True
) -> torch.Tensor:
    """The embedding [size] that sentence-transformers makes of transformers' hidden states."""
    hidden = hidden_states(directory, token_ids)
    match mode:
        case "lasttoken":
            vector = hidden[-1]
        case "cls_token":
            vector = hidden[0]
        case "mean_tokens":
            vector = hidden.mean(dim=0)
    return torch.nn.functional.normalize(vector, dim=0) if normalizes else vector


def class_logits(directory: Path, token_ids: Sequence[int]) -> torch.Tensor:
    """transformers' outputs of a classification head in float32, [labels], or [tokens, labels]."""
    config = transformers.AutoConfig.from_pretrained(directory)
    model = getattr(transformers, config.architectures[0]).from_pretrained(directory, dtype=torch.float32).eval()
    with torch.inference_mode():
        return model(torch.tensor([list(token_ids)])).logits[0]

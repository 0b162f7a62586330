"""LoRA adapters of tiny models, and the models that they are merged into."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


def write_adapter(
    directory: Path,
    model_dir: Path,
    *,
    seed: int = 0,
    rank: int = 4,
    alpha: float = 8,
    targets: Sequence[str] = ALL,
    config: Mapping[str, object] = {},
) -> Path:
    """Writes a random adapter for all layers whose names are among `targets`, as PEFT saves one."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for path, module in AutoModelForCausalLM.from_pretrained(model_dir).named_modules():
        if path.rpartition(".")[2] in targets and isinstance(module, torch.nn.Linear | Conv1D):
            sizes = (module.nf, module.nx) if isinstance(module, Conv1D) else module.weight.shape
            key = f"base_model.model.{path}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, sizes[1], generator=generator) / sizes[1] ** 0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(sizes[0], rank, generator=generator) / 2
    assert tensors
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    own = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps({**own, **config}))
    return directory


@functools.cache
def merged_dir(model_dir: Path, adapter: Path) -> Path:
    """The model whose weights the adapter is added to, beside the adapter."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    config = json.loads((adapter / "adapter_config.json").read_text())
    tensors = load_file(adapter / "adapter_model.safetensors")
    modules = dict(model.named_modules())
    for key in [each for each in tensors if each.endswith(".lora_A.weight")]:
        a, b = tensors[key], tensors[key.replace("lora_A", "lora_B")]
        module = modules[key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")]
        delta = b @ a * (config["lora_alpha"] / (len(a) ** (0.5 if config.get("use_rslora") else 1)))
        module.weight.data += delta.T if isinstance(module, Conv1D) else delta
    directory = adapter.with_name(f"{adapter.name}-merged")
    model.save_pretrained(directory)
    return directory

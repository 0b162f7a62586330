"""Copies of quantised checkpoints whose weights are float32: each number is computed from the bits of its own, as the
format's publication says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = Mapping[str, torch.Tensor]


def save_dequantized(source: Path, target: Path) -> Path:
    """Writes the copy to the directory `target`."""
    target.mkdir(exist_ok=True)
    config = json.loads((source / "config.json").read_text())
    settings = config.pop("quantization_config")
    dequantized = dequantize(load_file(source / "model.safetensors"), settings)
    save_file({name: tensor.contiguous() for name, tensor in dequantized.items()}, target / "model.safetensors")
    (target / "config.json").write_text(json.dumps(config))
    if (source / "generation_config.json").is_file():
        shutil.copy(source / "generation_config.json", target)
    return target


def dequantize(tensors: Tensors, settings: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, with float32 ones in place of those that are quantised."""
    suffix, others, weight_of = _METHODS[settings["quant_method"]]
    found = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.rpartition(".")
        if kind == suffix:
            of_layer = {each: tensors[f"{layer}.{each}"] for each in {suffix, *others} if f"{layer}.{each}" in tensors}
            found[f"{layer}.weight"] = weight_of(of_layer, settings)
        elif kind not in others or f"{layer}.{suffix}" not in tensors:
            found[name] = tensor.float()
    return found


def _bits(words: torch.Tensor, place: int, bits: int) -> np.ndarray:
    return (words.numpy().view(np.uint32) >> np.uint32(place)) & np.uint32((1 << bits) - 1)


def _gptq(tensors: Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    bits = settings["bits"]
    per_word = 32 // bits
    num_inputs = len(tensors["qweight"]) * per_word
    num_outputs = tensors["qweight"].shape[1]
    weight = np.zeros((num_outputs, num_inputs), np.float32)
    scales = tensors["scales"].float().numpy()
    for k in range(num_inputs):
        group = int(tensors["g_idx"][k])
        code = _bits(tensors["qweight"][k // per_word], k % per_word * bits, bits).astype(np.float32)
        for n in range(num_outputs):
            stored = int(_bits(tensors["qzeros"][group, n // per_word], n % per_word * bits, bits))
            weight[n, k] = (code[n] - (stored + 1) % (1 << bits)) * scales[group, n]
    return torch.from_numpy(weight)


def _awq(tensors: Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    num_inputs, num_outputs = len(tensors["qweight"]), tensors["scales"].shape[1]
    group_size = num_inputs // len(tensors["scales"])
    weight = np.zeros((num_outputs, num_inputs), np.float32)
    for n in range(num_outputs):
        place = 4 * [0, 2, 4, 6, 1, 3, 5, 7].index(n % 8)
        codes = _bits(tensors["qweight"][:, n // 8], place, 4).astype(np.float32)
        zeros = _bits(tensors["qzeros"][:, n // 8], place, 4).astype(np.float32)
        scales = tensors["scales"][:, n].float().numpy()
        weight[n] = (codes - zeros.repeat(group_size)) * scales.repeat(group_size)
    return torch.from_numpy(weight)


_METHODS: dict[str, tuple[str, set[str], Callable[[Tensors, Mapping[str, Any]], torch.Tensor]]] = {
    "gptq": ("qweight", {"qzeros", "scales", "g_idx"}, _gptq),
    "awq": ("qweight", {"qzeros", "scales"}, _awq),
}

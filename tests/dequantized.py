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
    scales, weight_of = _METHODS[settings["quant_method"]]
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        layer, _, suffix = name.rpartition(".")
        layers.setdefault(layer, {})[suffix] = tensor
    found = {}
    for layer, own in layers.items():
        plain = own
        if scales & own.keys():
            found[f"{layer}.weight"] = weight_of(own, settings)
            plain = {"bias": own["bias"]} if "bias" in own else {}
        found |= {f"{layer}.{suffix}": tensor.float() for suffix, tensor in plain.items()}
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


def _fp8(tensors: Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    weight = torch.zeros(tensors["weight"].shape)
    for code in range(256):
        sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
        number = (mantissa / 8 if exponent == 0 else 1 + mantissa / 8) * 2.0 ** (max(exponent, 1) - 7)
        weight[tensors["weight"].view(torch.uint8) == code] = -number if sign else number
    scale = tensors.get("weight_scale_inv", tensors.get("weight_scale"))
    assert scale is not None
    if scale.numel() == 1 or scale.shape[1] == 1:
        return weight * scale.float()
    height, width = settings["weight_block_size"]
    for row, column in np.ndindex(*scale.shape):
        weight[row * height : (row + 1) * height, column * width : (column + 1) * width] *= scale[row, column]
    return weight


def _compressed(tensors: Tensors, settings: Mapping[str, Any]) -> torch.Tensor:
    if "weight_packed" not in tensors:
        if tensors["weight"].dtype == torch.int8:
            return tensors["weight"] * tensors["weight_scale"]
        return _fp8(tensors, settings)
    num_outputs, num_inputs = tensors["weight_shape"].tolist()
    group_size = num_inputs // tensors["weight_scale"].shape[1]
    weight = np.zeros((num_outputs, num_inputs), np.float32)
    for n, k in np.ndindex(num_outputs, num_inputs):
        code, zero = int(_bits(tensors["weight_packed"][n, k // 8], k % 8 * 4, 4)) - 8, 0
        if "weight_zero_point" in tensors:
            zero = int(_bits(tensors["weight_zero_point"][n // 8, k // group_size], n % 8 * 4, 4)) - 8
        weight[n, k] = (code - zero) * float(tensors["weight_scale"][n, k // group_size])
    return torch.from_numpy(weight)


_METHODS: dict[str, tuple[set[str], Callable[[Tensors, Mapping[str, Any]], torch.Tensor]]] = {
    "gptq": ({"scales"}, _gptq),
    "awq": ({"scales"}, _awq),
    "fp8": ({"weight_scale", "weight_scale_inv"}, _fp8),
    "compressed-tensors": ({"weight_scale"}, _compressed),
}

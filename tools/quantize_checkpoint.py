"""Writes a copy of a checkpoint with quantised weights, for tests and benchmarks: each is rounded to the nearest.

    python -m tools.quantize_checkpoint SOURCE TARGET --format awq

Linear layers of the model are quantised, but for the output layer and routers of experts. Programs that look at
activations, such as llm-compressor or GPTQModel, make better models of the same formats.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from tools.gguf_writer import TYPES, write_gguf

Tensors = dict[str, torch.Tensor]

_LARGEST_FLOAT8 = 448.0
_AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # outputs in a word of AWQ, from its lowest bits
_EXPERT = re.compile(r".*\.experts\.\d+\..*")
_SEED = 0  # of the order of inputs in which gptq-act-order says that they were rounded


class Format(NamedTuple):
    """A format of quantised checkpoints."""

    settings: Callable[[int], dict[str, Any]]  # `quantization_config`, for groups of so many inputs
    quantize: Callable[[torch.Tensor, int], Tensors]  # of a weight [outputs, inputs], by the last parts of their names


def quantize_checkpoint(source: Path, target: Path, name: str, group_size: int = 128) -> None:
    """Writes the checkpoint `source` to the directory `target`, in one of FORMATS, or one of GGUF's types. Raises
    OSError."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != "model.safetensors.index.json":
            shutil.copy(path, target)
    if name in GGUF_TYPES:
        write_gguf(source, target / "model.gguf", GGUF_TYPES[name])
        return
    config = json.loads((source / "config.json").read_text())
    chosen, linears = FORMATS[name], set(_linear_names(source))
    tensors: Tensors = {}
    for path in sorted(source.glob("*.safetensors")):
        for key, tensor in load_file(path).items():
            layer = key.removesuffix(".weight")
            if key in linears or (_EXPERT.fullmatch(layer) and tensor.dim() == 2):
                parts = chosen.quantize(tensor.float(), group_size)
                tensors |= {f"{layer}.{suffix}": part.contiguous() for suffix, part in parts.items()}
            else:
                tensors[key] = tensor
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    settings = json.dumps(config | {"quantization_config": chosen.settings(group_size)}, indent=2)
    (target / "config.json").write_text(settings + "\n")


def _linear_names(source: Path) -> Iterator[str]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(source))
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module is not model.get_output_embeddings() and not name.endswith(".gate"):
            yield f"{name}.weight"


def _pack(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Words of 32 bits, each of several codes along a dimension, the first in its lowest bits."""
    words = sum(
        codes[(slice(None),) * dim + (slice(place, None, 32 // bits),)].to(torch.int64) << bits * place
        for place in range(32 // bits)
    )
    assert isinstance(words, torch.Tensor)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def _groups(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    return weight.reshape(len(weight), -1, group_size if group_size > 0 else weight.shape[1])


def _rounded(
    weight: torch.Tensor, group_size: int, bits: int, *, symmetric: bool, scale_type: torch.dtype = torch.float16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [outputs, inputs], scales and zero points [outputs, groups]: a weight is (code - zero) * scale."""
    groups, most = _groups(weight, group_size), (1 << bits) - 1
    if symmetric:
        scale = (groups.abs().amax(2) / (most // 2)).to(scale_type)
        zero = torch.full_like(scale, most // 2 + 1, dtype=torch.int64)
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scale = ((high - low) / most).to(scale_type)
        zero = (-low / scale.float().clamp(min=1e-8)).round().to(torch.int64).clamp(0, most)
    steps = groups / scale.float().clamp(min=1e-8)[:, :, None]
    codes = (steps.round() + zero[:, :, None]).clamp(0, most).to(torch.int64).flatten(1)
    return codes, scale, zero


def _gptq(weight: torch.Tensor, group_size: int, *, bits: int, symmetric: bool, act_order: bool = False) -> Tensors:
    num_inputs = weight.shape[1]
    order = torch.arange(num_inputs)
    if act_order:
        order = torch.randperm(num_inputs, generator=torch.Generator().manual_seed(_SEED))
    codes, scale, zero = _rounded(weight[:, order], group_size, bits, symmetric=symmetric)
    group_of, own = torch.empty_like(order), torch.empty_like(codes)
    group_of[order] = torch.arange(num_inputs) // (num_inputs // scale.shape[1])
    own[:, order] = codes
    return {
        "qweight": _pack(own.T, bits, 0),
        "qzeros": _pack((zero.T - 1) % (1 << bits), bits, 1),
        "scales": scale.T,
        "g_idx": group_of.to(torch.int32),
    }


def _gptq_settings(group_size: int, *, bits: int, symmetric: bool, act_order: bool = False) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": act_order, "sym": symmetric}


def _awq(weight: torch.Tensor, group_size: int) -> Tensors:
    codes, scale, zero = _rounded(weight, group_size, 4, symmetric=False)
    packed = [_pack(each.T.reshape(each.shape[1], -1, 8)[:, :, _AWQ_ORDER].flatten(1), 4, 1) for each in (codes, zero)]
    return {"qweight": packed[0], "qzeros": packed[1], "scales": scale.T}


def _awq_settings(group_size: int) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "gemm"}


def _largest(weight: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """The largest number of each block, the last of which may be smaller."""
    padding = (0, -weight.shape[1] % block[1], 0, -len(weight) % block[0])
    padded = nn.functional.pad(weight.abs(), padding)
    return padded.view(len(padded) // block[0], block[0], -1, block[1]).amax((1, 3)).clamp(min=1e-8)


def _float8(weight: torch.Tensor, block: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers and the scales of blocks."""
    scale = _largest(weight, block) / _LARGEST_FLOAT8
    of_weight = scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return (weight / of_weight[: len(weight), : weight.shape[1]]).to(torch.float8_e4m3fn), scale


def _fp8_block(weight: torch.Tensor, group_size: int) -> Tensors:
    numbers, scale = _float8(weight, (group_size, group_size))
    return {"weight": numbers, "weight_scale_inv": scale}


def _fp8_block_settings(group_size: int) -> dict[str, Any]:
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [group_size, group_size]}


def _fp8_tensor(weight: torch.Tensor, group_size: int) -> Tensors:
    numbers, scale = _float8(weight, (weight.shape[0], weight.shape[1]))
    return {"weight": numbers, "weight_scale": scale[0, 0], "input_scale": torch.tensor(1.0)}


def _compressed_float8(weight: torch.Tensor, group_size: int) -> Tensors:
    numbers, scale = _float8(weight, (1, weight.shape[1]))
    return {"weight": numbers, "weight_scale": scale.bfloat16()}


def _compressed_int8(weight: torch.Tensor, group_size: int) -> Tensors:
    scale = _largest(weight, (1, weight.shape[1])) / 127
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _compressed_packed(weight: torch.Tensor, group_size: int, *, symmetric: bool) -> Tensors:
    codes, scale, zero = _rounded(weight, group_size, 4, symmetric=symmetric, scale_type=torch.bfloat16)
    zeros = {} if symmetric else {"weight_zero_point": _pack(zero, 4, 0)}
    return {
        "weight_packed": _pack(codes, 4, 1),
        "weight_scale": scale,
        "weight_shape": torch.tensor(weight.shape),
        **zeros,
    }


def _compressed_format(
    form: str, weights: dict[str, Any], quantize: Callable[[torch.Tensor, int], Tensors], **others: Any
) -> Format:
    def settings(group_size: int) -> dict[str, Any]:
        own = weights | ({"group_size": group_size} if weights["strategy"] == "group" else {})
        groups = {"group_0": {"targets": ["Linear"], "weights": own, "input_activations": None} | others}
        return {
            "quant_method": "compressed-tensors",
            "format": form,
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": ["lm_head"],
        }

    return Format(settings, quantize)


def _scheme(bits: int, kind: str, strategy: str, *, symmetric: bool = True) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric}


def _gptq_format(**options: Any) -> Format:
    return Format(partial(_gptq_settings, **options), partial(_gptq, **options))


FORMATS: dict[str, Format] = {
    "gptq": _gptq_format(bits=4, symmetric=True),
    "gptq-zeros": _gptq_format(bits=4, symmetric=False),
    "gptq-act-order": _gptq_format(bits=4, symmetric=True, act_order=True),
    "gptq-8bit": _gptq_format(bits=8, symmetric=False),
    "awq": Format(_awq_settings, _awq),
    "fp8-block": Format(_fp8_block_settings, _fp8_block),
    "fp8-tensor": Format(lambda _: {"quant_method": "fp8", "activation_scheme": "static"}, _fp8_tensor),
    "compressed-w4a16": _compressed_format(
        "pack-quantized", _scheme(4, "int", "group"), partial(_compressed_packed, symmetric=True)
    ),
    "compressed-w4a16-zeros": _compressed_format(
        "pack-quantized", _scheme(4, "int", "group", symmetric=False), partial(_compressed_packed, symmetric=False)
    ),
    "compressed-w8a8": _compressed_format(
        "int-quantized",
        _scheme(8, "int", "channel"),
        _compressed_int8,
        input_activations={"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True},
    ),
    "compressed-float8": _compressed_format("float-quantized", _scheme(8, "float", "channel"), _compressed_float8),
}


GGUF_TYPES = {f"gguf-{name.lower()}": name for name in TYPES}


def main() -> int:
    """Writes a checkpoint."""
    parser = argparse.ArgumentParser("tools.quantize_checkpoint", description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--format", choices=[*FORMATS, *GGUF_TYPES], required=True)
    parser.add_argument("--group-size", type=int, default=128, help="inputs with a scale of their own, or -1 for all")
    args = parser.parse_args()
    if not (args.source / "config.json").is_file():
        parser.error(f"source: {args.source} is not the directory of a model")
    quantize_checkpoint(args.source, args.target, args.format, args.group_size)
    return 0


if __name__ == "__main__":
    sys.exit(main())

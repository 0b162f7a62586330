"""Writes a checkpoint of the Llama kind, or of Qwen3-MoE, as a GGUF file, for tests and benchmarks. llama.cpp loads it,
without a tokenizer."""

from __future__ import annotations

import json
import re
import struct
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.torch import load_file

_ALIGNMENT = 32
_PLAIN = 0  # the number of float32
_ROUTER = "ffn_gate_inp"
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "mlp.gate": _ROUTER,
    **{f"mlp.experts.{part}_proj": f"ffn_{part}_exps" for part in ("gate", "up", "down")},
}


class _Type(NamedTuple):
    number: int
    inputs: int  # of a block
    encode: Callable[[np.ndarray], list[np.ndarray]]
    """Weights [blocks, inputs] -> parts of the blocks, bytes [blocks, ...]."""


def _half(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float16)[:, None].view(np.uint8)


def _steps(weights: np.ndarray, scale: np.ndarray) -> np.ndarray:
    return np.rint(weights / np.where(scale == 0, 1, scale))


def _q8_0(weights: np.ndarray) -> list[np.ndarray]:
    scale = (np.abs(weights).max(1) / 127).astype(np.float16).astype(np.float32)
    return [_half(scale), _steps(weights, scale[:, None]).clip(-127, 127).astype(np.int8).view(np.uint8)]


def _q4_0(weights: np.ndarray) -> list[np.ndarray]:
    scale = (np.abs(weights).max(1) / 7).astype(np.float16).astype(np.float32)
    codes = (_steps(weights, scale[:, None]) + 8).clip(0, 15).astype(np.uint8)
    return [_half(scale), codes[:, :16] | codes[:, 16:] << 4]


def _q4_k(weights: np.ndarray) -> list[np.ndarray]:
    groups = weights.reshape(len(weights), 8, 32)
    low = -groups.min(2).clip(max=0)
    spread = (groups.max(2).clip(min=0) + low) / 15
    scale, minimum = ((each.max(1) / 63).astype(np.float16).astype(np.float32) for each in (spread, low))
    pairs = ((spread, scale), (low, minimum))
    factors, minima = (_steps(each, of_block[:, None]).clip(0, 63).astype(np.uint8) for each, of_block in pairs)
    step, start = (scale[:, None] * factors)[:, :, None], (minimum[:, None] * minima)[:, :, None]
    codes = _steps(groups + start, step).clip(0, 15).astype(np.uint8).reshape(-1, 4, 2, 32)
    packed = [
        factors[:, :4] | factors[:, 4:] >> 4 << 6,
        minima[:, :4] | minima[:, 4:] >> 4 << 6,
        (factors[:, 4:] & 15) | (minima[:, 4:] & 15) << 4,
    ]
    return [_half(scale), _half(minimum), *packed, (codes[:, :, 0] | codes[:, :, 1] << 4).reshape(len(weights), -1)]


def _q6_k(weights: np.ndarray) -> list[np.ndarray]:
    groups = weights.reshape(len(weights), 16, 16)
    step = np.abs(groups).max(2) / 31
    scale = (step.max(1) / 127).astype(np.float16).astype(np.float32)
    factors = _steps(step, scale[:, None]).clip(0, 127).astype(np.int8)
    codes = (_steps(groups, (scale[:, None] * factors)[:, :, None]) + 32).clip(0, 63).astype(np.uint8)
    quarters = codes.reshape(-1, 2, 4, 32)
    low = np.concatenate([(quarters[:, :, i] & 15) | (quarters[:, :, i + 2] & 15) << 4 for i in range(2)], 2)
    high = sum((quarters[:, :, i] >> 4 << 2 * i for i in range(4)), np.uint8(0))
    return [low.reshape(-1, 128), high.reshape(-1, 64), factors.view(np.uint8), _half(scale)]


def _bf16(weights: np.ndarray) -> list[np.ndarray]:
    bits = weights.astype(np.float32).view(np.uint32)
    return [((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16).view(np.uint8)]


FLOATS = {
    "F32": _Type(_PLAIN, 1, lambda weights: [weights.astype(np.float32).view(np.uint8)]),
    "BF16": _Type(30, 1, _bf16),
}
TYPES = {
    "Q4_0": _Type(2, 32, _q4_0),
    "Q8_0": _Type(8, 32, _q8_0),
    "Q4_K": _Type(12, 256, _q4_k),
    "Q6_K": _Type(14, 256, _q6_k),
}


def write_gguf(source: Path, path: Path, name: str) -> None:
    """Writes the safetensors of `source` to the file `path`, all matrices in one of TYPES or FLOATS. Raises OSError,
    and KeyError for a model of another kind."""
    config, kind = json.loads((source / "config.json").read_text()), (TYPES | FLOATS)[name]
    weights: dict[str, np.ndarray] = {}
    for file in sorted(source.glob("*.safetensors")):
        weights |= {key: tensor.float().numpy() for key, tensor in load_file(file).items()}
    tensors = [
        (name := _gguf_name(key), _encoded(_paired(key, each, config), FLOATS["F32"] if _ROUTER in name else kind))
        for key, each in _with_joined_experts(weights).items()
    ]
    header, place = b"", 0
    for key, (number, shape, raw) in tensors:
        header += _text(key) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], number, place)
        place += -(-len(raw) // _ALIGNMENT) * _ALIGNMENT
    values = _values(config)
    start = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(values)) + b"".join(values) + header
    with path.open("wb") as target:
        target.write(_padded(start))
        for _, (_, _, raw) in tensors:
            target.write(_padded(raw))


def _with_joined_experts(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """With the weights of a layer's experts in one array, by their numbers."""
    found: dict[str, np.ndarray] = {}
    experts: dict[str, dict[int, np.ndarray]] = defaultdict(dict)
    for key, each in weights.items():
        match = re.fullmatch(r"(.*\.experts)\.(\d+)\.(.*)", key)
        if match is None:
            found[key] = each
        else:
            experts[f"{match[1]}.{match[3]}"][int(match[2])] = each
    return found | {key: np.stack([each for _, each in sorted(own.items())]) for key, own in experts.items()}


def _gguf_name(key: str) -> str:
    layer, _, kind = key.rpartition(".")
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", layer)
    return f"{_NAMES[layer]}.{kind}" if match is None else f"blk.{match[1]}.{_NAMES[match[2]]}.{kind}"


def _paired(key: str, weights: np.ndarray, config: Mapping[str, Any]) -> np.ndarray:
    """Rows of heads in pairs, as llama.cpp rotates those of Llama."""
    match = re.search(r"\.self_attn\.([qk])_proj\.", key)
    if match is None or config["model_type"] not in ("llama", "mistral"):
        return weights
    num_heads = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"]
    return weights.reshape(num_heads, 2, -1, *weights.shape[1:]).swapaxes(1, 2).reshape(weights.shape)


def _encoded(weights: np.ndarray, kind: _Type) -> tuple[int, tuple[int, ...], bytes]:
    if weights.ndim == 1 or weights.shape[-1] % kind.inputs:
        return _PLAIN, weights.shape, weights.astype(np.float32).tobytes()
    blocks = np.concatenate(kind.encode(weights.reshape(-1, kind.inputs)), 1)
    return kind.number, weights.shape, blocks.tobytes()


def _values(config: Mapping[str, Any]) -> list[bytes]:
    architecture = {"mistral": "llama", "qwen3_moe": "qwen3moe"}.get(config["model_type"], config["model_type"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    texts = {"general.architecture": architecture, "tokenizer.ggml.model": "none"}
    integers = {
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "rope.dimension_count": head_dim,
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
    }
    if architecture == "qwen3moe":
        integers |= {
            "expert_count": config["num_local_experts"],
            "expert_used_count": config["num_experts_per_tok"],
            "expert_feed_forward_length": config["moe_intermediate_size"],
        }
    rope = config.get("rope_parameters") or config
    floats = {
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": rope.get("rope_theta", 10_000.0),
    }
    return [
        *(_text(key) + struct.pack("<I", 8) + _text(value) for key, value in texts.items()),
        *(_text(f"{architecture}.{key}") + struct.pack("<II", 4, value) for key, value in integers.items()),
        *(_text(f"{architecture}.{key}") + struct.pack("<If", 6, value) for key, value in floats.items()),
    ]


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _padded(raw: bytes) -> bytes:
    return raw + b"\0" * (-len(raw) % _ALIGNMENT)

"""Checkpoints for the sides: the same weights in each precision.

Baton rounds weights to int8 as it loads a model. vLLM loads a checkpoint whose weights are int8 already; it is written
here in the format of compressed-tensors, with the same rounding. vLLM's int8 kernels for CPUs multiply int8 with int8
(W8A8), so the checkpoint has it round activations as well, with a scale for each token. The output layer stays as it
is. With q4_k, Baton and llama.cpp load one GGUF file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from common.engine.devices.cpu.kernels.pairs import MULTIPLIES_PAIRS
from common.engine.quantization.int8 import Int8Linear
from tools.gguf_writer import write_gguf

MULTIPLIED = "bfloat16" if MULTIPLIES_PAIRS else "float32"  # the smaller type that the processor has products of
_CONFIG, _WEIGHTS = "config.json", "model.safetensors"
_EMBEDDINGS = "model.embed_tokens.weight"
_LINEAR = "_proj.weight"  # how the names of linear layers end, in models of the Llama kind
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_COMPRESSED_TENSORS = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {**_INT8, "strategy": "channel", "dynamic": False},
            "input_activations": {**_INT8, "strategy": "token", "dynamic": True},
        }
    },
    "ignore": ["lm_head"],
}


_GGUF_TYPES = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int8-dynamic": "Q8_0", "q4_k": "Q4_K"}
_WEIGHT_SIZES = {"int8": 1.0, "int8-dynamic": 1.0, "q4_k": 144 / 256}  # bytes; of q4_k a block has 256


class Precision(NamedTuple):
    """The types of numbers of a model."""

    name: str
    dtype: str  # of activations and KV; also of weights, unless they are quantised
    quantization: str | None = None

    @property
    def weight_size(self) -> float:
        """Bytes of a weight of a linear layer."""
        return self.dtype_size if self.quantization is None else _WEIGHT_SIZES[self.quantization]

    @property
    def dtype_size(self) -> int:
        """Bytes of a number of the `dtype`."""
        size: int = getattr(torch, self.dtype).itemsize
        return size

    def suits(self, side: str) -> bool:
        """Whether a side can compute in it."""
        if self.quantization == "q4_k":
            return side.startswith(("baton", "llamacpp"))
        return not side.startswith(("transformers", "generate_batch")) or self.quantization is None


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("float32", "float32"),
        Precision("bfloat16", "bfloat16"),
        Precision("int8", MULTIPLIED, "int8"),
        Precision("int8-dynamic", MULTIPLIED, "int8-dynamic"),
        Precision("q4_k", MULTIPLIED, "q4_k"),
    )
}


class Checkpoint(NamedTuple):
    """A side's checkpoint, and how it is loaded."""

    directory: Path  # for llama.cpp, a file
    dtype: str
    quantization: str | None  # that the side does itself


def checkpoint_of(side: str, directory: Path, precision: Precision, scratch: Path) -> Checkpoint:
    """A model's checkpoint for one of the sides; written to `scratch` if it is one of its own and is not there yet."""
    if side == "llamacpp" or precision.quantization == "q4_k":
        kind = _GGUF_TYPES[precision.name]
        packed = scratch / f"{directory.name}-{kind}"
        if not packed.exists():
            _start_checkpoint(directory, packed, {})
            write_gguf(directory, packed / "model.gguf", kind)
        return Checkpoint(packed / "model.gguf" if side == "llamacpp" else packed, precision.dtype, None)
    if not side.startswith("vllm") or precision.quantization is None:
        return Checkpoint(directory, precision.dtype, precision.quantization)
    quantized = scratch / f"{directory.name}-int8"
    if not quantized.exists():
        write_int8(directory, quantized)
    return Checkpoint(quantized, precision.dtype, None)


def write_int8(source: Path, directory: Path) -> None:
    """Writes a model whose weights are in one file to a new directory, the weights of its layers in int8."""
    _start_checkpoint(source, directory, {"quantization_config": _COMPRESSED_TENSORS})
    tensors: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / _WEIGHTS).items():
        if not name.endswith(_LINEAR):
            tensors[name] = weight
            continue
        num_rows, num_columns = weight.shape
        layer = nn.Linear(num_columns, num_rows, bias=False, device="meta")
        layer.weight = nn.Parameter(weight)
        rounded = Int8Linear.of(layer)
        tensors |= {name: rounded.integers, f"{name}_scale": rounded.scale[:, None]}
    save_file(tensors, directory / _WEIGHTS, {"format": "pt"})


def write_counting(source: Path, directory: Path) -> None:
    """Writes a model whose weights are in one file to a new directory, so that token t + 1 follows token t. Its layers
    stay and cost what they do, but what they add to embeddings as large as these decides nothing."""
    _start_checkpoint(source, directory, {"tie_word_embeddings": False})
    tensors = load_file(source / _WEIGHTS)
    own = tensors[_EMBEDDINGS]
    directions = functional.normalize(torch.randn(own.shape, generator=torch.Generator().manual_seed(0))).to(own.dtype)
    tensors |= {_EMBEDDINGS: directions * 1000, "lm_head.weight": directions.roll(1, 0)}
    save_file(tensors, directory / _WEIGHTS, {"format": "pt"})


def _start_checkpoint(source: Path, directory: Path, changed: Mapping[str, object]) -> None:
    """All but the weights, with these fields of the configuration."""
    directory.mkdir()
    for path in source.iterdir():
        if path.name not in (_CONFIG, _WEIGHTS):
            (directory / path.name).symlink_to(path.resolve())
    config = json.loads((source / _CONFIG).read_text())
    (directory / _CONFIG).write_text(json.dumps({**config, **changed}))

"""Loads one rank's part of a model.

The model is made without weights, which are then read part by part: no rank ever holds the whole model. So the
checkpoint must have them under the names and in the shapes of the model's parameters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping

from common.engine.model.attention_hook import ATTENTION_NAME
from common.engine.model.parallel_layers import CollectedLinear, CutEmbedding
from common.engine.model.parallel_plan import Part, heads_of, parts_of, refused
from common.engine.model.ranks import Ranks
from common.errors import ModelLoadError


def load_rank(
    directory: Path, weight_files: Sequence[Path], model_config: Any, dtype: torch.dtype, ranks: Ranks
) -> Any:
    """The rank's part of the model, on the host. Raises ConfigError if the model cannot be cut, before weights are
    read, and ModelLoadError if they are not there."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=dtype, attn_implementation=ATTENTION_NAME, trust_remote_code=False
        )
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    parts = parts_of(model, ranks.rank, ranks.size)
    _check_weights(model, dtype)
    _compute_buffers(model)
    with _WeightFiles(weight_files) as files:
        _fill(model, files, parts)
    for layer, part in parts.items():
        _cut(model, layer, part, ranks)
    heads = heads_of(model_config, ranks.size)
    for module in model.modules():
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = heads.of_rank // heads.kv_of_rank
    return model


def _check_weights(model: Any, dtype: torch.dtype) -> None:
    name = type(model).__name__
    if get_model_conversion_mapping(model, add_legacy=False):
        raise refused(f"{name} converts weights as they are loaded, which is not supported for parts of them")
    if dtype != torch.float32 and (model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict):  # noqa: SLF001
        raise refused(f"{name} keeps some weights in float32, which is supported with dtype float32 only")


def _compute_buffers(model: Any) -> None:
    """Those that are in no checkpoint, such as rotary frequencies, as `from_pretrained` does it."""
    computed = list(model.named_non_persistent_buffers())
    for name, buffer in computed:
        _set(model, name, torch.full_like(buffer, torch.nan if buffer.is_floating_point() else 0, device="cpu"))
    for module in model.modules():
        if dict(module.named_buffers(recurse=False)):
            model._init_weights(module)  # noqa: SLF001  of weights, which are on the meta device, it changes nothing
    for name, _ in computed:
        if bool(model.get_buffer(name).isnan().any()):
            raise refused(f"{type(model).__name__} does not say how to compute {name}")


class _WeightFiles:
    """Safetensors files, of which tensors are read in parts."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths
        self._stack = contextlib.ExitStack()
        self._file_of: dict[str, Any] = {}

    def __enter__(self) -> _WeightFiles:
        for path in self._paths:
            file = self._stack.enter_context(safe_open(path, framework="pt"))
            self._file_of.update(dict.fromkeys(file.keys(), file))
        return self

    def __exit__(self, *_: object) -> None:
        self._file_of.clear()
        self._stack.close()

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._file_of

    def read(self, name: str, like: torch.Tensor, part: Part | None) -> torch.Tensor:
        """A copy of a tensor, or of a part of it. Raises ModelLoadError if the whole has not the shape of `like`."""
        file = self._file_of[name]
        tensor = file.get_slice(name)
        if (shape := tensor.get_shape()) != list(like.shape):
            raise ModelLoadError(f"weight {name} is {shape}, but the model's is {list(like.shape)}", param="model")
        if part is None:
            whole: torch.Tensor = file.get_tensor(name).to(like.dtype, copy=True)
            return whole
        found = tensor[part.start : part.stop] if part.dim == 0 else tensor[:, part.start : part.stop]
        copy = torch.zeros((len(found) + part.padding, *found.shape[1:]), dtype=like.dtype)
        copy[: len(found)] = found
        return copy


def _fill(model: Any, files: _WeightFiles, parts: dict[str, Part]) -> None:
    """Puts the rank's parts of all weights in place of those on the meta device."""
    tied: dict[str, str] = model.all_tied_weights_keys
    weights = model.state_dict(keep_vars=True)
    sources = {name: name if files.has(name) else tied.get(name, name) for name in weights}
    missing = [source for source in sources.values() if not files.has(source)]
    if missing:
        reason = f"the weights lack {len(missing)} of {type(model).__name__}'s names, first {missing[0]}"
        raise ModelLoadError(f"{reason}; several ranks read weights by the names of the model's own", param="model")
    for name in sorted(weights, key=lambda name: sources[name] != name):  # tied ones last
        source, part = sources[name], _part_of(name, parts)
        if source != name and _same_rows(part, _part_of(source, parts)):
            tensor = model.get_parameter(source).detach()
            tensor = tensor if part is None else tensor[: part.stop - part.start + part.padding]
        else:
            tensor = files.read(source, weights[name], part)
        _set(model, name, tensor)


def _part_of(weight: str, parts: dict[str, Part]) -> Part | None:
    layer, _, kind = weight.rpartition(".")
    part = parts.get(layer)
    return None if part is not None and part.sums and kind == "bias" else part


def _same_rows(one: Part | None, other: Part | None) -> bool:
    return one is other is None or (one is not None and other is not None and one[1:4] == other[1:4])


def _set(model: Any, name: str, tensor: torch.Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    is_parameter = attribute in dict(module.named_parameters(recurse=False))
    setattr(module, attribute, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)


def _cut(model: Any, name: str, part: Part, ranks: Ranks) -> None:
    """Makes a layer that has the rank's weights one that gives what its style promises."""
    layer = model.get_submodule(name)
    num_rows, num_columns = layer.weight.shape
    if part.style == "embedding_rowwise":
        num_embeddings, layer.num_embeddings, layer.padding_idx = layer.num_embeddings, num_rows, None
        model.set_submodule(name, CutEmbedding(layer, part.start, num_embeddings, ranks.all_reduce))
        return
    num_outputs, layer.out_features, layer.in_features = layer.out_features, num_rows, num_columns
    if part.sums and ranks.rank > 0:
        layer.bias = None  # it counts once
    if part.sums:
        takes = slice(part.start, part.stop) if part.style == "rowwise_split_input" else None
        model.set_submodule(name, CollectedLinear(layer, ranks.all_reduce, takes))
    elif part.style == "colwise_gather_output":
        model.set_submodule(name, CollectedLinear(layer, partial(_gather, ranks, num_outputs)))


def _gather(ranks: Ranks, num_outputs: int, outputs: torch.Tensor) -> torch.Tensor:
    return ranks.all_gather_last(outputs)[..., :num_outputs]

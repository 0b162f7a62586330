"""Loads one rank's part of a model, cut along the model's own plan (`tp_plan` of transformers).

A plan names a style for layers by patterns of their names:

| style | a rank has | so that its outputs are |
|---|---|---|
| colwise | a part of the outputs: whole heads, or a part of the MLP's width | its part |
| rowwise | the inputs that such a part feeds | summed over the ranks |
| colwise_gather_output | a part of the outputs, of the output layer only | gathered from the ranks |
| replicated_with_grad_allreduce, embedding_rowwise | all of it | whole |

Where there are fewer KV heads than ranks, each rank has one, and some have the same. A model with any other style in
its plan is refused, as is one without a plan: a layer that is cut wrongly computes something else without an error.

Weights are read part by part. So the checkpoint must have them under the names and in the shapes of the model's
parameters.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping

from common.engine.model.attention_hook import ATTENTION_NAME
from common.engine.model.collected_linear import CollectedLinear
from common.engine.model.ranks import Ranks
from common.errors import ConfigError, ModelLoadError

_WHOLE = frozenset({"replicated_with_grad_allreduce", "embedding_rowwise", "replicate"})
_GATHERED = "colwise_gather_output"
_CUT = frozenset({"colwise", "rowwise", _GATHERED})
_KV_PROJECTIONS = frozenset({"k_proj", "v_proj"})


class Heads(NamedTuple):
    """Attention heads of the whole model and of a rank."""

    num_heads: int
    num_kv_heads: int
    size: int  # ranks

    @property
    def of_rank(self) -> int:
        """Query heads of a rank."""
        return self.num_heads // self.size

    @property
    def kv_of_rank(self) -> int:
        """KV heads of a rank; one where there are fewer than ranks."""
        return max(1, self.num_kv_heads // self.size)


def heads_of(model_config: Any, size: int) -> Heads:
    """The heads of a model on `size` ranks. Raises ConfigError if they cannot be shared out evenly."""
    text_config = model_config.get_text_config()
    num_heads = int(text_config.num_attention_heads)
    num_kv_heads = int(getattr(text_config, "num_key_value_heads", None) or num_heads)
    if num_heads % size:
        raise _refused(f"{size} ranks cannot share {num_heads} heads evenly")
    if num_kv_heads % size and size % num_kv_heads:
        raise _refused(f"{size} ranks cannot share {num_kv_heads} KV heads evenly")
    return Heads(num_heads, num_kv_heads, size)


def load_rank(
    directory: Path, weight_files: Sequence[Path], model_config: Any, dtype: torch.dtype, ranks: Ranks
) -> Any:
    """The rank's part of the model, on the host. Raises ConfigError if the model cannot be cut, before weights are
    read, and ModelLoadError if its weights are not there."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=dtype, attn_implementation=ATTENTION_NAME, trust_remote_code=False
        )
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    heads = heads_of(model_config, ranks.size)
    styles = _styles(model)
    _check_weights(model, dtype)
    parts = {name: _part(model, name, style, heads, ranks.rank) for name, style in styles.items()}
    _compute_buffers(model)
    with _WeightFiles(weight_files) as files:
        _fill(model, files, parts)
    for name, part in parts.items():
        _cut(model, name, part, ranks)
    for module in model.modules():
        if hasattr(module, "num_key_value_groups"):
            module.num_key_value_groups = heads.of_rank // heads.kv_of_rank
    return model


class _Part(NamedTuple):
    """What a rank has of a linear layer."""

    style: str
    dim: int  # of the weight
    start: int
    stop: int  # beyond the weight where ranks gather what they cannot share evenly: zeros

    def of(self, weights: Any) -> torch.Tensor:
        """Of a tensor, or a slice of a file."""
        part: torch.Tensor = weights[self.start : self.stop] if self.dim == 0 else weights[:, self.start : self.stop]
        return part


def _styles(model: Any) -> dict[str, str]:
    """Styles of the linear layers to cut, by name."""
    name = type(model).__name__
    plan: dict[str, str] = model.tp_plan
    if not set(plan.values()) - _WHOLE - {_GATHERED}:
        raise _refused(f"{name} has no plan of how to cut its layers")
    patterns = [(re.compile(re.escape(layers).replace(r"\*", r"\d+")), style) for layers, style in plan.items()]
    styles: dict[str, str] = {}
    for layer, planned in (*model.named_modules(), *model.named_parameters()):
        style = next((style for pattern, style in patterns if pattern.fullmatch(layer)), None)
        if style is None or style in _WHOLE:
            continue
        is_head = planned is model.get_output_embeddings()
        if style not in _CUT or type(planned) is not nn.Linear or (style == _GATHERED) != is_head:
            raise _refused(f"the plan of {name} has style {style} for {layer}, which is not supported")
        styles[layer] = style
    return styles


def _check_weights(model: Any, dtype: torch.dtype) -> None:
    name = type(model).__name__
    if get_model_conversion_mapping(model, add_legacy=False):
        raise _refused(f"{name} changes its weights as they are loaded, which is not supported for parts of them")
    if dtype != torch.float32 and (model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict):  # noqa: SLF001
        raise _refused(f"{name} keeps some weights in float32, which is supported with dtype float32 only")


def _part(model: Any, name: str, style: str, heads: Heads, rank: int) -> _Part:
    linear: nn.Linear = model.get_submodule(name)
    size = heads.size
    if style == _GATHERED:
        share = -(-linear.out_features // size)
        return _Part(style, 0, rank * share, (rank + 1) * share)
    dim, width = (0, linear.out_features) if style == "colwise" else (1, linear.in_features)
    if style == "colwise" and name.rpartition(".")[2] in _KV_PROJECTIONS:
        share = width // heads.num_kv_heads * heads.kv_of_rank
        start = rank * heads.num_kv_heads // size * (width // heads.num_kv_heads)
        return _Part(style, dim, start, start + share)
    if width % size:
        raise _refused(f"{size} ranks cannot share the {width} {'inputs' if dim else 'outputs'} of {name} evenly")
    return _Part(style, dim, rank * width // size, (rank + 1) * width // size)


def _compute_buffers(model: Any) -> None:
    """Those that are in no checkpoint, such as rotary frequencies, as `from_pretrained` does it."""
    for name, buffer in list(model.named_non_persistent_buffers()):
        _set(model, name, torch.empty_like(buffer, device="cpu"))
    for module in model.modules():
        if dict(module.named_buffers(recurse=False)):
            model._init_weights(module)  # noqa: SLF001  of weights, which are on the meta device, it changes nothing


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

    def read(self, name: str, expected: torch.Size, part: _Part | None, dtype: torch.dtype) -> torch.Tensor:
        """A copy of a tensor, or of a part of it."""
        tensor = self._file_of[name].get_slice(name)
        if (shape := tensor.get_shape()) != list(expected):
            raise ModelLoadError(
                f"the weights have {name} as {shape}, but the model as {list(expected)}", param="model"
            )
        found = tensor[:] if part is None else part.of(tensor)
        return found.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _fill(model: Any, files: _WeightFiles, parts: dict[str, _Part]) -> None:
    """Puts the rank's parts of all weights in place of those on the meta device."""
    tied: dict[str, str] = model.all_tied_weights_keys
    weights = model.state_dict(keep_vars=True)
    sources = {name: name if files.has(name) else tied.get(name, name) for name in weights}
    missing = [source for source in sources.values() if not files.has(source)]
    if missing:
        reason = f"the weights lack {len(missing)} of {type(model).__name__}'s names, first {missing[0]}"
        raise ModelLoadError(f"{reason}; several ranks read weights by the names of the model's own", param="model")
    for name, weight in weights.items():
        layer, _, kind = name.rpartition(".")
        part = parts.get(layer)
        if part is not None and kind == "bias":
            part = None if part.style == "rowwise" else part
        tensor = files.read(sources[name], weight.shape, part, weight.dtype)
        _set(model, name, tensor)


def _set(model: Any, name: str, tensor: torch.Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    is_parameter = attribute in dict(module.named_parameters(recurse=False))
    setattr(module, attribute, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)


def _cut(model: Any, name: str, part: _Part, ranks: Ranks) -> None:
    """Makes a linear layer with the rank's weights one that puts outputs together as its style wants it."""
    linear: nn.Linear = model.get_submodule(name)
    num_outputs = linear.out_features
    if part.style == "rowwise" and ranks.rank > 0:
        linear.register_parameter("bias", None)  # it counts once
    if part.style == _GATHERED:
        _pad(linear, part.stop - part.start)
    linear.out_features, linear.in_features = linear.weight.shape
    if part.style == "rowwise":
        model.set_submodule(name, CollectedLinear(linear, ranks.all_reduce))
    elif part.style == _GATHERED:
        model.set_submodule(name, CollectedLinear(linear, partial(_gather, ranks, num_outputs)))


def _pad(linear: nn.Linear, num_rows: int) -> None:
    """Adds zeros for outputs that are not there."""
    if missing := num_rows - len(linear.weight):
        linear.weight = nn.Parameter(functional.pad(linear.weight, (0, 0, 0, missing)), requires_grad=False)
        if linear.bias is not None:
            linear.bias = nn.Parameter(functional.pad(linear.bias, (0, missing)), requires_grad=False)


def _gather(ranks: Ranks, num_outputs: int, outputs: torch.Tensor) -> torch.Tensor:
    return ranks.all_gather_last(outputs)[..., :num_outputs]


def _refused(reason: str) -> ConfigError:
    return ConfigError(f"tensor_parallel_size: {reason}", param="tensor_parallel_size")

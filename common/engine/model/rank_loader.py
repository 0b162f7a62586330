"""Loads one rank's part of a model, or the whole of one whose weights are quantised.

The model is made without weights, which are then read part by part: no rank ever holds the whole model. Weights that
the checkpoint has under other names, or by themselves, as those of each expert, are found as `transformers` does it; a
model that wants anything else to be done with its weights is refused.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
)

from common.engine.devices.ranks import Ranks
from common.engine.model.attention_hook import ATTENTION_NAME, set_own_heads
from common.engine.model.expert_parallel import ExpertRanks, WholeExperts
from common.engine.model.head_inputs import replace_head
from common.engine.model.meta_weights import MetaKernelsOnDemand, on_meta
from common.engine.model.parallel_layers import CollectedExperts, CollectedLinear, CutEmbedding, CutLayer, OwnHeads
from common.engine.model.parallel_plan import (
    WHOLE_EXPERTS,
    Part,
    Place,
    RankPlan,
    heads_of,
    is_attention,
    plan_of,
    refused,
)
from common.engine.model.stage_links import StageLinks
from common.engine.model.stages import Stage, cut_stage, whole_model
from common.engine.quantization.base import QuantizedLinear
from common.engine.quantization.checkpoints.base import CheckpointFormat
from common.engine.quantization.checkpoints.gguf import GGUF_SUFFIX, GGUFFile
from common.engine.quantization.grouped import GroupedLinear
from common.errors import ModelLoadError

_ONLY = Place(0, 1)


def load_rank(
    directory: Path,
    weight_files: Sequence[Path],
    model_config: Any,
    dtype: torch.dtype,
    ranks: Ranks,
    experts: ExpertRanks | None,
    links: StageLinks,
    weight_format: CheckpointFormat | None = None,
    *,
    has_text_head: bool = True,
) -> tuple[Any, Stage]:
    """The rank's part of the model, on the host. `experts`: among which experts are cut whole. `weight_format`: of
    weights that are quantised; linear layers are so in the model, and what else has such weights gets them in `dtype`.
    `has_text_head`: else the model ends with its hidden states. Raises ConfigError if the model cannot be cut, before
    weights are read, and ModelLoadError if they are not there."""
    model, stage, plan, conversions = outline_of(
        model_config,
        dtype,
        Place(ranks.rank, ranks.size),
        None if experts is None else Place(experts.ranks.rank, experts.ranks.size),
        Place(links.stage, links.num_stages),
        is_quantized=weight_format is not None,
        has_text_head=has_text_head,
    )
    num_outputs = {layer: getattr(model.get_submodule(layer), "out_features", 0) for layer in plan.layers}
    if (directory / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(directory)
    naming = _Naming(f"{model.base_model_prefix}.", hasattr(model, model.base_model_prefix), has_text_head)
    with _WeightFiles(weight_files, conversions, naming, weight_format) as files:
        _fill(model, files, plan)
    (ranks if experts is None else experts.ranks).wait_for_all()
    for layer, part in plan.layers.items():
        _cut(model, layer, part, num_outputs[layer], ranks)
    if experts is not None:
        experts.clear()
    for layer in plan.experts:
        local = model.get_submodule(layer)
        model.set_submodule(
            layer,
            CollectedExperts(local, ranks.all_reduce) if experts is None else _own_experts(local, layer, plan, experts),
        )
    if ranks.size > 1 or experts is not None:
        heads = heads_of(model_config, ranks.size)
        for name, module in model.named_modules():
            if name in plan.attentions:
                set_own_heads(module, OwnHeads(ranks.rank, ranks.size, ranks.all_gather_last))
            elif is_attention(module):
                module.num_key_value_groups = heads.of_rank // heads.kv_of_rank
    return model, stage


def _own_experts(local: Any, layer: str, plan: RankPlan, experts: ExpertRanks) -> WholeExperts:
    part = next(part for name, part in plan.weights.items() if name.startswith(f"{layer}."))
    local.num_experts = part.stop - part.start
    local._is_expert_parallel = True  # noqa: SLF001  see WholeExperts
    return WholeExperts(local, part.start, experts)


class Outline(NamedTuple):
    """A rank's part of a model, before its weights are read."""

    model: Any  # without the layers of other stages; weights are whole, on the meta device
    stage: Stage
    plan: RankPlan
    conversions: list[WeightRenaming | WeightConverter]  # of the checkpoint's weights


def outline_of(
    model_config: Any,
    dtype: torch.dtype,
    rank: Place,
    experts: Place | None = None,
    stage: Place = _ONLY,
    *,
    is_quantized: bool = False,
    has_text_head: bool = True,
) -> Outline:
    """The part of a rank: `rank` of its stage, and of those among which experts are cut whole, if they are.
    `is_quantized`: the weights will be read here even if they are not cut. `has_text_head`: see load_rank. Raises
    ConfigError if the model cannot be cut so."""
    with on_meta():
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=dtype, attn_implementation=ATTENTION_NAME, trust_remote_code=False
        )
    if not has_text_head:
        replace_head(model, nn.Identity())
    is_planned = rank.size > 1 or experts is not None
    own = cut_stage(model, stage.rank, stage.size) if stage.size > 1 else whole_model(model)
    plan = plan_of(model, rank.rank, rank.size, experts) if is_planned else RankPlan({}, {}, [])
    if not is_planned and stage.size == 1 and not is_quantized:
        return Outline(model, own, plan, [])
    conversions = _conversions(model, dtype)
    _compute_buffers(model)
    return Outline(model, own, plan, conversions)


def weight_bytes(outline: Outline) -> int:
    """Bytes of the rank's weights."""
    plan, total = outline.plan, 0
    for name, weight in outline.model.named_parameters():
        part = _part_of(name, plan)
        num_own = weight.numel()
        if part is not None:
            dim = part.dim if weight.dim() > 1 else 0
            num_rows = (part.stop - part.start) * part.runs + part.padding
            num_own = num_own // weight.shape[dim] * num_rows
        total += num_own * weight.itemsize
    return total


def _conversions(model: Any, dtype: torch.dtype) -> list[WeightRenaming | WeightConverter]:
    """Returns the conversions of the checkpoint's weights. Raises ConfigError if one is not supported for parts of
    them."""
    name = type(model).__name__
    if dtype != torch.float32 and (model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict):  # noqa: SLF001
        raise refused(f"{name} keeps some weights in float32, which is supported with dtype float32 only")
    conversions: list[WeightRenaming | WeightConverter] = get_model_conversion_mapping(model, add_legacy=False)
    for conversion in conversions:
        is_supported = type(conversion) in (WeightRenaming, PrefixChange) or (
            type(conversion) is WeightConverter and (_joins(conversion) or _merges_experts(conversion))
        )
        if not is_supported:
            raise refused(f"{name} converts {conversion.source_patterns[0]} in a way that is not supported for parts")
    return conversions


def _joins(converter: WeightConverter) -> bool:
    """True if it makes one weight of several, one below the other."""
    return [(type(each), getattr(each, "dim", 0)) for each in converter.operations] == [(Concatenate, 0)]


def _merges_experts(converter: WeightConverter) -> bool:
    """True if it stacks the weights of experts, and joins those of gates with what they let through."""
    operations = [(type(operation), operation.dim) for operation in converter.operations if hasattr(operation, "dim")]
    wanted = [(MergeModulelist, 0), (Concatenate, 1)][: min(2, len(converter.source_patterns))]
    return len(operations) == len(converter.operations) and operations == wanted


def _compute_buffers(model: Any) -> None:
    """Computes the buffers that are in no checkpoint, such as rotary frequencies, like `from_pretrained`."""
    computed = list(model.named_non_persistent_buffers())
    for name, buffer in computed:
        _set(model, name, torch.full_like(buffer, torch.nan if buffer.is_floating_point() else 0, device="cpu"))
    with MetaKernelsOnDemand():
        for module in model.modules():
            if dict(module.named_buffers(recurse=False)):
                model._init_weights(module)  # noqa: SLF001  of weights, which are on the meta device, it changes nothing
    for name, _ in computed:
        if bool(model.get_buffer(name).isnan().any()):
            raise refused(f"{type(model).__name__} does not say how to compute {name}")


class _Naming(NamedTuple):
    """How the model's names differ from those in files, beside what conversions say."""

    prefix: str  # of what the class without a head has
    has_prefix: bool  # the model's names; else they are those of a language model beside others
    has_text_head: bool

    def own_names(self, stored: Sequence[str]) -> list[str]:
        """Returns the model's names of the weights in files."""
        if not self.has_prefix:
            return [name.removeprefix(self.prefix) for name in stored]
        if self.has_text_head or any(name.startswith(self.prefix) for name in stored):
            return list(stored)
        return [f"{self.prefix}{name}" for name in stored]  # saved by the class without a head


class _Stored(NamedTuple):
    """Names of a weight in files, by pattern of what converts it: of each expert's, of its parts, or one."""

    patterns: list[str]
    names: dict[str, list[str]]
    is_joined: bool  # of parts


class _WeightFiles:
    """Safetensors files, or one of GGUF, of which tensors are read in parts, by the model's names."""

    def __init__(
        self,
        paths: Sequence[Path],
        conversions: Sequence[WeightRenaming | WeightConverter],
        naming: _Naming,
        weight_format: CheckpointFormat | None,
    ) -> None:
        self._format = weight_format
        self._packed: dict[str, dict[str, str]] = {}  # names of the tensors of a quantised weight, by their suffixes
        self._paths = paths
        self._conversions = conversions
        self._naming = naming
        self._stack = contextlib.ExitStack()
        self._file_of: dict[str, Any] = {}
        self._stored: dict[str, _Stored] = {}

    def __enter__(self) -> _WeightFiles:
        for path in self._paths:
            opened = GGUFFile(path) if path.suffix == GGUF_SUFFIX else safe_open(path, framework="pt")
            file = self._stack.enter_context(opened)
            self._file_of.update(dict.fromkeys(file.keys(), file))
        names = sorted(self._weight_names(), key=dot_natural_key)  # experts by their numbers
        for name, own_name in zip(names, self._naming.own_names(names), strict=True):
            own_pattern, patterns, is_joined = "", [""], False
            for conversion in self._conversions:
                own_name, pattern = conversion.rename_source_key(own_name)
                if pattern is not None and isinstance(conversion, WeightConverter):
                    own_pattern, patterns, is_joined = pattern, conversion.source_patterns, _joins(conversion)
            stored = self._stored.setdefault(own_name, _Stored(patterns, {}, is_joined))
            stored.names.setdefault(own_pattern, []).append(name)
        return self

    def __exit__(self, *_: object) -> None:
        self._file_of.clear()
        self._stack.close()

    def _weight_names(self) -> Iterator[str]:
        """The names of the tensors, and those that quantised weights would have otherwise."""
        if self._format is None:
            yield from self._file_of
            return
        layers: dict[str, dict[str, str]] = {}
        for name in self._file_of:
            layer, _, suffix = name.rpartition(".")
            if suffix in self._format.suffixes:
                layers.setdefault(layer, {})[suffix] = name
            else:
                yield name
        for layer, names in layers.items():
            if self._format.is_quantized(names):
                self._packed[f"{layer}.weight"] = names
                yield f"{layer}.weight"
            elif set(names) == {"weight"}:
                yield from names.values()
            else:
                other = next(each for suffix, each in names.items() if suffix != "weight")
                raise refused(f"the weights have {other}, which is of no quantised layer and is not supported")

    def quantized(self, name: str, like: torch.Tensor, part: Part | None) -> GroupedLinear | None:
        """The linear layer with a part of a quantised weight, without a bias; None if the weight is not quantised, or
        is made of several. Raises as `read`, and ConfigError if it cannot be cut there."""
        patterns, names, is_joined = self._stored[name]
        stored = names[""][0] if patterns == [""] and not is_joined else ""
        if stored not in self._packed:
            return None
        layer = self._unpacked(stored, like.shape, like.dtype)
        if part is None:
            return layer
        if part.dim == 0:
            return layer.outputs(slice(part.start, part.stop), part.padding)
        try:
            return layer.inputs(part.start, part.stop)
        except ValueError as error:
            raise refused(f"{name} is not cut between inputs {part.start} and {part.stop}: {error}") from error

    def _unpacked(self, name: str, shape: torch.Size, dtype: torch.dtype) -> GroupedLinear:
        assert self._format is not None
        tensors = {suffix: self._file_of[each].get_tensor(each) for suffix, each in self._packed[name].items()}
        try:
            return self._format.linear(tensors, shape, dtype)
        except ModelLoadError as error:
            raise ModelLoadError(f"{name}: {error.message}", param="model") from error

    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""
        return name in self._stored

    def read(self, name: str, like: torch.Tensor, part: Part | None) -> torch.Tensor:
        """A copy of a tensor, or of a part of it. Raises ModelLoadError if the whole has not the shape of `like`, and
        ConfigError for a part of what is joined."""
        patterns, names, is_joined = self._stored[name]
        if is_joined and part is not None:
            raise refused(f"{name} is made of several weights, and is not cut")
        if is_joined:
            if any(each in self._packed for own in names.values() for each in own):
                raise refused(f"{name} is made of several quantised weights")
            stored = [each for pattern in patterns for each in names.get(pattern, ())]
            found = [_plain(each, self._file_of[each].get_tensor(each), like.dtype) for each in stored]
            joined = torch.cat(found).to(like.dtype)
            _check_shape(name, list(joined.shape), list(like.shape))
            return joined
        if patterns == [""]:
            return self._read(names[""][0], list(like.shape), like.dtype, part)
        num_experts, rows, *others = like.shape
        by_pattern = [names.get(pattern, []) for pattern in patterns]
        if any(len(found) != num_experts for found in by_pattern):
            raise ModelLoadError(f"{name} is of {num_experts} experts, but the weights have others", param="model")
        shape = [rows // len(patterns), *others]
        experts = list(zip(*by_pattern, strict=True))
        if part is not None and part.style == WHOLE_EXPERTS:
            experts, part = experts[part.start : part.stop], None
        if part is not None:
            part = part._replace(dim=part.dim - 1, runs=part.runs // len(patterns))
        return torch.stack([torch.cat([self._read(each, shape, like.dtype, part) for each in one]) for one in experts])

    def _read(self, name: str, shape: list[int], dtype: torch.dtype, part: Part | None) -> torch.Tensor:
        if name in self._packed:
            tensor: Any = self._unpacked(name, torch.Size(shape), dtype).dequantized().to(dtype)
        else:
            tensor = self._file_of[name].get_slice(name)
            _check_shape(name, tensor.get_shape(), shape)
        if part is None:
            whole: torch.Tensor = tensor[:] if shape else self._file_of[name].get_tensor(name)
            return _plain(name, whole, dtype).to(dtype, copy=True)
        before, run = (slice(None),) * part.dim, shape[part.dim] // part.runs
        places = [slice(start + part.start, start + part.stop) for start in range(0, run * part.runs, run)]
        cut = _plain(name, torch.cat([tensor[(*before, place)] for place in places], part.dim), dtype)
        copy = torch.zeros((len(cut) + part.padding, *cut.shape[1:]), dtype=dtype)
        copy[: len(cut)] = cut
        return copy


def _plain(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The tensor. Raises ConfigError for numbers that mean something with a scale only, which was not found."""
    if dtype.is_floating_point and (tensor.dtype.itemsize == 1 or not tensor.dtype.is_floating_point):
        kind = str(tensor.dtype).removeprefix("torch.")
        raise refused(f"{name} is of {kind}, and the weights have no scale for it that is supported")
    return tensor


def _check_shape(name: str, found: list[int], wanted: list[int]) -> None:
    if found != wanted:
        raise ModelLoadError(f"weight {name} is {found}, but the model's is {wanted}", param="model")


def _fill(model: Any, files: _WeightFiles, plan: RankPlan) -> None:
    """Puts the rank's parts of all weights in place of those on the meta device."""
    tied: dict[str, str] = model.all_tied_weights_keys
    weights = model.state_dict(keep_vars=True)
    sources = {name: name if files.has(name) else tied.get(name, name) for name in weights}
    missing = [source for source in sources.values() if not files.has(source)]
    if missing:
        reason = f"the weights lack {len(missing)} of {type(model).__name__}'s names, first {missing[0]}"
        raise ModelLoadError(f"{reason}; several ranks look for no others", param="model")
    quantized: dict[str, GroupedLinear] = {}
    for name in sorted(weights, key=lambda name: sources[name] != name):  # tied ones last
        source, part = sources[name], _part_of(name, plan)
        owner, _, kind = name.rpartition(".")
        if kind == "weight" and type(model.get_submodule(owner)) is nn.Linear:
            layer = files.quantized(source, weights[name], part)
            if layer is not None:
                quantized[owner] = layer
                continue
        if source != name and source in weights and _same_rows(part, _part_of(source, plan)):
            tensor = model.get_parameter(source).detach()
            tensor = tensor if part is None else tensor[: part.stop - part.start + part.padding]
        else:
            tensor = files.read(source, weights[name], part)
        _set(model, name, tensor)
    for owner, layer in quantized.items():
        layer.bias = model.get_submodule(owner).bias
        model.set_submodule(owner, layer)


def _part_of(weight: str, plan: RankPlan) -> Part | None:
    layer, _, kind = weight.rpartition(".")
    part = plan.layers.get(layer)
    return plan.weights.get(weight) if part is None or (part.sums and kind == "bias") else part


def _same_rows(one: Part | None, other: Part | None) -> bool:
    return one is other is None or (one is not None and other is not None and one[1:4] == other[1:4])


def _set(model: Any, name: str, tensor: torch.Tensor) -> None:
    owner, _, attribute = name.rpartition(".")
    module = model.get_submodule(owner)
    is_parameter = attribute in dict(module.named_parameters(recurse=False))
    setattr(module, attribute, nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)


def _cut(model: Any, name: str, part: Part, num_outputs: int, ranks: Ranks) -> None:
    """Makes a layer that has the rank's weights one that gives what its style promises."""
    layer = model.get_submodule(name)
    num_rows, num_columns = layer.weight.shape
    if part.style == "embedding_rowwise":
        num_embeddings, layer.num_embeddings, layer.padding_idx = layer.num_embeddings, num_rows, None
        model.set_submodule(name, CutEmbedding(layer, part.start, num_embeddings, ranks.all_reduce))
        return
    if not isinstance(layer, QuantizedLinear):
        layer.whole = CutLayer(part.dim, part.start, part.stop, layer.in_features, num_outputs)
    layer.out_features, layer.in_features = num_rows, num_columns
    if part.sums and ranks.rank > 0:
        layer.bias = None  # it counts once
    if part.sums:
        takes = slice(part.start, part.stop) if part.style == "rowwise_split_input" else None
        model.set_submodule(name, CollectedLinear(layer, ranks.all_reduce, takes, partial(_largest, ranks)))
    elif part.style == "colwise_gather_output":
        model.set_submodule(name, CollectedLinear(layer, partial(_gather, ranks, num_outputs)))


def _largest(ranks: Ranks, own: torch.Tensor) -> torch.Tensor:
    return ranks.all_gather_last(own[:, None]).amax(dim=1)


def _gather(ranks: Ranks, num_outputs: int, outputs: torch.Tensor) -> torch.Tensor:
    return ranks.all_gather_last(outputs)[..., :num_outputs]

"""Cuts layers into the parts of ranks, by the model's own plan (`tp_plan` of transformers).

A plan names a style for layers by patterns of their names:

| style | a rank has | so that its outputs are |
|---|---|---|
| colwise | a part of the outputs: whole heads, or a part of the MLP's width | its part |
| rowwise | the inputs that such a part feeds | summed over the ranks |
| colwise_gather_output | a part of the outputs | gathered from the ranks |
| rowwise_split_input | a part of the inputs, all of which it gets | summed over the ranks |
| embedding_rowwise | a part of the tokens | summed over the ranks |
| packed_colwise | a part of the gates, and the same part of what they let through, of each expert | its part |
| packed_rowwise | the same, of weights by which code multiplies from the right, as Llama 4's does | its part |
| moe_tp_experts | experts with such parts | summed over the ranks |
| grouped_gemm | with `enable_expert_parallel`, some of the experts, whole | summed over the ranks |
| replicated_with_grad_allreduce, replicate, mla_kv_a_proj | all of it | whole |

Where there are fewer KV heads than ranks, each rank has one, and some have the same. A model with any other style in
its plan is refused, as is one without a plan: a layer that is cut wrongly computes something else without an error.

Where a plan does not cut attention by heads, each rank has the queries, keys and values of all, attends with its own,
and caches no others (`OwnHeads`). Layers that keep a state are computed as a whole by each rank; a plan that leaves one
a part of such a layer's inputs or outputs is refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import nn

from common.engine.model.states import state_modules
from common.errors import ConfigError

_WHOLE = frozenset({"replicated_with_grad_allreduce", "replicate", "mla_kv_a_proj"})
_TAKES_AND_GIVES_ALL = frozenset({"colwise_gather_output", "rowwise_split_input"})
_KV_PROJECTIONS = frozenset({"k_proj", "v_proj"})
_EXPERTS = "moe_tp_experts"
_OF_EXPERTS = {  # the dimension that is cut, and its runs: those of gates and of what they let through
    "packed_colwise": (1, 2),
    "rowwise": (2, 1),
    "packed_rowwise": (2, 2),  # of weights by which code multiplies from the right, as is the next
    "colwise": (1, 1),
}
WHOLE_EXPERTS = "grouped_gemm"  # the style of experts that are cut whole
_CUTS_LAYERS = frozenset({"rowwise", "rowwise_split_input", _EXPERTS})


class Heads(NamedTuple):
    """Attention heads of the whole model, and of a rank of so many."""

    num_heads: int
    num_kv_heads: int
    size: int

    @property
    def of_rank(self) -> int:
        """Query heads of a rank."""
        return self.num_heads // self.size

    @property
    def kv_of_rank(self) -> int:
        """KV heads of a rank; one where there are fewer than ranks."""
        return max(1, self.num_kv_heads // self.size)


class Part(NamedTuple):
    """A rank's part of a layer's weight."""

    style: str
    dim: int  # of the weight, that is cut
    start: int
    stop: int
    padding: int = 0  # rows of zeros that follow
    runs: int = 1  # of the dimension, each of which is cut in this way

    @property
    def sums(self) -> bool:
        """True if outputs are summed over the ranks."""
        return self.style.startswith("rowwise")


def heads_of(model_config: Any, size: int) -> Heads:
    """The heads of a model on `size` ranks. Raises ConfigError if they cannot be shared out evenly."""
    text_config = model_config.get_text_config()
    num_heads = int(text_config.num_attention_heads)
    num_kv_heads = int(getattr(text_config, "num_key_value_heads", None) or num_heads)
    if num_heads % size:
        raise refused(f"{size} ranks cannot share {num_heads} heads evenly")
    if num_kv_heads % size and size % num_kv_heads:
        raise refused(f"{size} ranks cannot share {num_kv_heads} KV heads evenly")
    return Heads(num_heads, num_kv_heads, size)


class RankPlan(NamedTuple):
    """A rank's part of the model."""

    layers: dict[str, Part]  # linear layers and the embedding, by name
    weights: dict[str, Part]  # of experts, by name
    experts: list[str]  # modules whose outputs are summed
    attentions: Sequence[str] = ()  # modules that have all heads, see OwnHeads


class Place(NamedTuple):
    """A rank of so many."""

    rank: int
    size: int


def plan_of(model: Any, rank: int, size: int, experts_place: Place | None = None) -> RankPlan:
    """The plan of a model that may be on the meta device. Raises ConfigError if it cannot be cut. `experts_place`:
    experts are cut whole, among these ranks."""
    if experts_place is not None and size == 1:
        return RankPlan({}, *_whole_experts(model, _planned_experts(model), experts_place))
    styles = _styles(model)
    _check_states(model, styles)
    heads = heads_of(model.config, size)
    experts = [layer for layer, style in styles.items() if style == _EXPERTS]
    _check_complete(model, styles, experts)
    attentions = _with_all_heads(model, styles)
    weights = {
        name: _part_of_experts(weight, name, styles[name], rank, size)
        for name, weight in model.named_parameters()
        if name in styles
    }
    layers = {
        layer: _part(model, layer, style, heads, rank)
        for layer, style in styles.items()
        if layer not in weights and style != _EXPERTS
    }
    if experts_place is not None:
        return RankPlan(layers, *_whole_experts(model, experts, experts_place), attentions)
    return RankPlan(layers, weights, experts, attentions)


def _planned_experts(model: Any) -> list[str]:
    """Modules that the plan names as experts."""
    patterns = [_pattern(layers) for layers, style in (model.tp_plan or {}).items() if style == _EXPERTS]
    return [name for name, _ in model.named_modules() if any(pattern.fullmatch(name) for pattern in patterns)]


def _whole_experts(model: Any, experts: list[str], place: Place) -> tuple[dict[str, Part], list[str]]:
    """A rank's share of the experts of each mixture: their weights by name, and the mixtures."""
    name = type(model).__name__
    if not experts:
        raise _experts_refused(f"{name} has no mixture of experts, or no plan of how to cut it")
    weights: dict[str, Part] = {}
    for layer in experts:
        module = model.get_submodule(layer)
        # transformers marks the experts that can leave out those of other ranks.
        if not hasattr(module, "_is_expert_parallel"):
            raise _experts_refused(f"the experts of {name} ({layer}) cannot be cut whole")
        num_experts = int(module.num_experts)
        if num_experts % place.size:
            raise _experts_refused(f"{place.size} ranks cannot share the {num_experts} experts of {layer} evenly")
        start, stop = (number * num_experts // place.size for number in (place.rank, place.rank + 1))
        for parameter, weight in module.named_parameters():
            if weight.shape[0] != num_experts:
                raise _experts_refused(f"{layer}.{parameter} is not of each expert")
            weights[f"{layer}.{parameter}"] = Part(WHOLE_EXPERTS, 0, start, stop)
    return weights, experts


def _pattern(layers: str) -> re.Pattern[str]:
    return re.compile(re.escape(layers).replace(r"\*", r"\d+"))


def refused(reason: str) -> ConfigError:
    """Why a model cannot have several ranks."""
    return ConfigError.of("tensor_parallel_size", reason)


def _experts_refused(reason: str) -> ConfigError:
    return ConfigError.of("enable_expert_parallel", reason)


def _styles(model: Any) -> dict[str, str]:
    """Styles of the layers to cut, by name."""
    name = type(model).__name__
    plan: dict[str, str] = model.tp_plan
    if not _CUTS_LAYERS.intersection(plan.values()):
        raise refused(f"{name} has no plan of how to cut its layers")
    patterns = [(_pattern(layers), style) for layers, style in plan.items()]
    styles: dict[str, str] = {}
    for layer, planned in (*model.named_modules(), *model.named_parameters()):
        style = next((style for pattern, style in patterns if pattern.fullmatch(layer)), None)
        if style is None or style in _WHOLE or _is_elsewhere(planned):
            continue
        if not _is_supported(model, layer, planned, style):
            raise refused(f"the plan of {name} has style {style} for {layer}, which is not supported")
        styles[layer] = style
    if not _CUTS_LAYERS.intersection(styles.values()):
        raise refused(f"the plan of {name} cuts none of its layers")
    return styles


def _check_states(model: Any, styles: dict[str, str]) -> None:
    """Raises ConfigError if a rank would have a part of a state."""
    keeping = set(state_modules(model))
    for name, module in model.named_modules():
        if module in keeping:
            own = [layer for layer in styles if layer.startswith(f"{name}.")]
            cut = [layer for layer in own if styles[layer] not in _TAKES_AND_GIVES_ALL]
            if cut:
                raise refused(f"the plan of {type(model).__name__} cuts {cut[0]}, of a layer that keeps a state")


def _is_elsewhere(planned: object) -> bool:
    """True for what stands in the place of a layer of another stage."""
    return isinstance(planned, nn.Module) and next(planned.parameters(), None) is None


def _is_supported(model: Any, layer: str, planned: object, style: str) -> bool:
    if style == "embedding_rowwise":
        return isinstance(planned, nn.Embedding) and planned is model.get_input_embeddings()
    if style == _EXPERTS:
        return isinstance(planned, nn.Module)
    if isinstance(planned, nn.Parameter):
        return planned.dim() == 3 and style in _OF_EXPERTS
    return type(planned) is nn.Linear and style in ("colwise", "rowwise", *_TAKES_AND_GIVES_ALL)


def is_attention(module: nn.Module) -> bool:
    """True for attention that can have fewer KV heads than query heads."""
    return hasattr(module, "num_key_value_groups")


def _with_all_heads(model: Any, styles: dict[str, str]) -> list[str]:
    """Attention modules of which the plan cuts none by heads. Raises ConfigError if it cuts some of one."""
    found = []
    for name, module in model.named_modules():
        if not is_attention(module):
            continue
        own = {styles.get(f"{name}.{child}", "replicate") for child, _ in module.named_children()}
        if not own & {"colwise", "rowwise"}:
            found.append(name)
        elif own & _TAKES_AND_GIVES_ALL or "colwise" not in own:
            raise refused(f"the plan of {type(model).__name__} does not cut its attention by heads")
    return found


def _check_complete(model: Any, styles: dict[str, str], experts: list[str]) -> None:
    name = type(model).__name__
    for layer in experts:
        for parameter, _ in model.get_submodule(layer).named_parameters():
            if f"{layer}.{parameter}" not in styles:
                raise refused(f"the plan of {name} has no style for {layer}.{parameter}")


def _part(model: Any, layer: str, style: str, heads: Heads, rank: int) -> Part:
    size = heads.size
    num_outputs, num_inputs = model.get_submodule(layer).weight.shape
    if style == "embedding_rowwise":
        return _uneven(style, num_outputs, rank, size, padding=1)
    if style == "colwise_gather_output":
        return _uneven(style, num_outputs, rank, size)
    if style == "colwise" and layer.rpartition(".")[2] in _KV_PROJECTIONS:
        head = num_outputs // heads.num_kv_heads
        start = rank * heads.num_kv_heads // size * head
        return Part(style, 0, start, start + heads.kv_of_rank * head)
    dim, width = (0, num_outputs) if style == "colwise" else (1, num_inputs)
    if width % size:
        raise refused(f"{size} ranks cannot share the {width} {('outputs', 'inputs')[dim]} of {layer} evenly")
    return Part(style, dim, rank * width // size, (rank + 1) * width // size)


def _part_of_experts(weights: nn.Parameter, name: str, style: str, rank: int, size: int) -> Part:
    """Cuts the width of each expert in weights [experts, outputs, inputs], or, by which code multiplies from the right,
    [experts, inputs, outputs]."""
    dim, runs = _OF_EXPERTS[style]
    width = weights.shape[dim] // runs
    if width % size:
        raise refused(f"{size} ranks cannot share the width of {width} of {name} evenly")
    return Part(style, dim, rank * width // size, (rank + 1) * width // size, runs=runs)


def _uneven(style: str, num_rows: int, rank: int, size: int, padding: int = 0) -> Part:
    """Cuts rows that can be shared out unevenly: zeros follow the last."""
    share = -(-num_rows // size)
    start, stop = min(rank * share, num_rows), min((rank + 1) * share, num_rows)
    return Part(style, 0, start, stop, share - (stop - start) + padding)

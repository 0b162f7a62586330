"""Cuts a model into the stages of a pipeline: contiguous runs of its decoder layers.

The plan that comes with a model's code in `transformers` (`base_model_pp_plan`) names its layers. The modules of other
stages are taken out before weights are read; what is around the layers and small, such as rotary tables, all
stages have. In a stage that is not the first, the model's own code runs with placeholders for embeddings, and its first
layer takes what came from the stage before in their place. So whatever a model does to its embeddings is done once, in
the first stage. A model whose layers get anything else that depends on them is refused.

Where some layers keep a state, which has its place in blocks beside the KV of one layer (`block_layers_of`), a cut goes
between layers so that each stage has the states beside its KV.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from common.engine.model.states import block_layers_of, state_modules
from common.errors import ConfigError


def refused(reason: str) -> ConfigError:
    """Why a model cannot have several stages."""
    return ConfigError.of("pipeline_parallel_size", reason)


class Stage:
    """A stage's run of a model's layers, and the passage of hidden states through them."""

    def __init__(
        self, runs: Sequence[range], number: int, hidden_size: int, kv_runs: Sequence[range] | None = None
    ) -> None:
        """`runs`: the layers of each stage. `kv_runs`: the same, of the layers that have KV, which are counted by
        themselves; None: all have."""
        self.kv_runs = tuple(kv_runs or runs)
        self.kv_layers = self.kv_runs[number]
        self.layers = runs[number]
        self.hidden_size = hidden_size
        self.is_first = number == 0
        self.is_last = number == len(runs) - 1
        self._incoming: torch.Tensor | None = None
        self._outgoing: Any = None

    def forward(
        self, model: Any, inputs: torch.Tensor, positions: torch.Tensor, logits_to_keep: int | torch.Tensor
    ) -> torch.Tensor:
        """Logits [tokens, vocabulary] of a transformers model; of a stage that is not the last, hidden states [tokens,
        size]. `inputs` are token ids [tokens]; of a stage that is not the first, hidden states."""
        if self.is_first:
            arguments: dict[str, Any] = {"input_ids": inputs[None]}
        else:
            self._incoming = inputs[None]
            arguments = {"inputs_embeds": inputs[None]}
        output = model(
            **arguments,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=logits_to_keep if self.is_last else 1,
        )
        found: torch.Tensor = (output.logits if self.is_last else self._outgoing)[0]
        self._incoming = self._outgoing = None
        return found

    def attach(self, layers: nn.ModuleList) -> None:
        """From now on the first and the last of the stage's layers take and leave hidden states here."""
        if not self.is_first:
            layers[self.layers.start].register_forward_pre_hook(self._enter, with_kwargs=True)
        if not self.is_last:
            layers[self.layers.stop - 1].register_forward_hook(self._leave)

    def _enter(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (self._incoming, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self._incoming}

    def _leave(self, layer: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._outgoing = output[0] if isinstance(output, tuple) else output


class OtherLayer(nn.Module):
    """Stands where a layer of another stage is."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        own = {name: value for name, value in vars(layer).items() if not name.startswith("_") and name != "training"}
        self.__dict__.update(own)  # which the model's code may ask for, such as the type of its attention

    def forward(self, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Passes on something of the right shape."""
        return hidden_states.reshape(1, -1, hidden_states.shape[-1])  # the code of some models takes the first of one


class OtherEmbedding(nn.Module):
    """Stands where the embedding of another stage is."""

    def __init__(self, num_embeddings: int) -> None:
        super().__init__()
        self.num_embeddings = num_embeddings


def whole_model(model: Any) -> Stage:
    """The only stage of a model that is not cut."""
    text_config = model.config.get_text_config()
    num_layers = int(text_config.num_hidden_layers)
    return Stage([range(num_layers)], 0, int(getattr(text_config, "hidden_size", 0)))


def cut_stage(model: Any, number: int, num_stages: int) -> Stage:
    """Takes the layers of other stages out of a model on the meta device. Raises ConfigError if it cannot be cut."""
    base = model.base_model
    layers = layers_of(model)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    costs = [_num_parameters(layer) for layer in layers]
    costs[0] += _num_parameters(embedding)
    costs[-1] += _num_parameters(head)
    num_states = [len(state_modules(layer)) for layer in layers]
    pieces = _pieces_of(num_states)
    if any(num_states) and num_stages > len(pieces):
        reason = f"{num_stages} stages of {type(model).__name__} cannot each have KV and the states beside it"
        raise refused(f"{reason}; at most {len(pieces)} can")
    shared = share_layers([sum(costs[layer] for layer in piece) for piece in pieces], num_stages)
    runs = [range(pieces[run.start].start, pieces[run.stop - 1].stop) for run in shared]
    kv_runs = [_counted(num_states, run) for run in runs]
    stage = Stage(runs, number, int(model.config.get_text_config().hidden_size), kv_runs)
    stage.attach(layers)
    for index in set(range(len(layers))) - set(stage.layers):
        layers[index] = OtherLayer(layers[index])
    if not stage.is_first:
        _replace(base, embedding, OtherEmbedding(embedding.num_embeddings))
    if not stage.is_last:
        _replace(model, head, nn.Identity())
    return stage


def _pieces_of(num_states: Sequence[int]) -> list[range]:
    """Runs of layers that are in one stage, by how many states each layer keeps: those without one have KV."""
    places = block_layers_of(sum(num_states), num_states.count(0))
    ends = [
        stop
        for stop in range(1, len(num_states))
        if _divides(places, sum(num_states[:stop]), num_states[:stop].count(0))
    ]
    return [range(*pair) for pair in itertools.pairwise([0, *ends, len(num_states)])]


def _divides(places: Sequence[int], num_states: int, num_kv_layers: int) -> bool:
    """Whether the first so many states are beside the first so many layers with KV, and the others are not."""
    return all((place < num_kv_layers) == (number < num_states) for number, place in enumerate(places))


def _counted(num_states: Sequence[int], run: range) -> range:
    """The layers of a run that have KV, counted by themselves."""
    return range(num_states[: run.start].count(0), num_states[: run.stop].count(0))


def layers_of(model: Any) -> nn.ModuleList:
    """The decoder layers, by the model's plan. Raises ConfigError if that does not name them."""
    name = type(model).__name__
    plan = model.base_model.config.base_model_pp_plan or {}
    layers = [found for each in plan if isinstance(found := getattr(model.base_model, each, None), nn.ModuleList)]
    if not plan:
        raise refused(f"{name} has no plan of how to cut it into stages")
    if len(layers) != 1 or len(layers[0]) != model.config.get_text_config().num_hidden_layers:
        raise refused(f"the plan of {name} has no single list of its layers")
    return layers[0]


def check_stage(model: Any, stage: Stage) -> None:
    """Raises ConfigError if the stage's layers get anything but hidden states that depends on embeddings, which only
    the first stage has."""
    if stage.is_first:
        return
    layer = layers_of(model)[stage.layers.start]
    seen: list[list[torch.Tensor]] = []

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args[1:], *(value for name, value in kwargs.items() if name != "hidden_states")]
        seen.append([each for value in given for each in (value if isinstance(value, tuple | list) else (value,))])

    hook = layer.register_forward_pre_hook(record, with_kwargs=True)
    try:
        for fill in (0.0, 1.0):
            inputs = torch.full((2, stage.hidden_size), fill, dtype=model.dtype, device=device_of(model))
            with torch.inference_mode():
                stage.forward(model, inputs, torch.arange(2, device=device_of(model))[None], 1)
    finally:
        hook.remove()
    for one, other in zip(*seen, strict=True):
        if isinstance(one, torch.Tensor) and not torch.equal(one, other):
            raise refused(f"the layers of {type(model).__name__} depend on more than what the layer before computes")


def device_of(model: nn.Module) -> torch.device:
    """Returns the device of its weights. Those of quantised layers are on none."""
    return next(weight.device for weight in model.parameters() if not weight.is_meta)


def share_layers(costs: Sequence[int], num_stages: int) -> list[range]:
    """Contiguous runs of layers, one for each stage, of which the most expensive costs as little as possible; of equal
    ones, those whose costs differ least. Raises ConfigError if there are fewer layers than stages."""
    num_layers = len(costs)
    if num_stages > num_layers:
        raise refused(f"{num_stages} stages cannot share {num_layers} layers")
    sums = [0, *itertools.accumulate(costs)]
    # By number of layers in the stages so far: (highest cost, sum of squares, ends of stages).
    best: list[tuple[int, int, list[int]] | None] = [(0, 0, [0]), *[None] * num_layers]
    for stage in range(1, num_stages + 1):
        best = [
            min(
                (
                    (max(before[0], cost), before[1] + cost * cost, [*before[2], stop])
                    for start, before in enumerate(best[:stop])
                    if before is not None
                    for cost in (sums[stop] - sums[start],)
                ),
                default=None,
            )
            if stop >= stage
            else None
            for stop in range(num_layers + 1)
        ]
    found = best[num_layers]
    assert found is not None
    return [range(start, stop) for start, stop in itertools.pairwise(found[2])]


def _num_parameters(module: nn.Module | None) -> int:
    return 0 if module is None else sum(parameter.numel() for parameter in module.parameters())


def _replace(owner: nn.Module, module: nn.Module, other: nn.Module) -> None:
    for name, found in list(owner.named_modules()):
        if found is module:
            owner.set_submodule(name, other)

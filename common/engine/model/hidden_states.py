"""Keeps hidden states of a model, for heads that predict from them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from common.engine.model.loader import LoadedModel
from common.engine.model.stages import layers_of
from common.errors import ConfigError


class HiddenStates:
    """The hidden states of a forward pass, in one place that recorded steps write to as well."""

    def __init__(self, loaded: LoadedModel, num_states: int, num_tokens: int) -> None:
        """`num_states`: of each token. `num_tokens`: most of a forward pass."""
        self.places = loaded.device.memory.zeros((num_tokens, num_states, loaded.stage.hidden_size), loaded.dtype)
        self._side_by_side = self.places.flatten(1)

    def of_last(self, num_tokens: int) -> torch.Tensor:
        """Returns the states of the last forward pass, which had so many tokens, side by side: [num_tokens, states *
        size]"""
        return self._side_by_side[:num_tokens]


def layer_inputs(layers: Sequence[int], loaded: LoadedModel, num_tokens: int) -> HiddenStates:
    """From now on what is kept is the residual stream before these layers."""
    kept = HiddenStates(loaded, len(layers), num_tokens)
    places = {layer: kept.places[:, number] for number, layer in enumerate(layers)}
    if loaded.decoder is not None:
        loaded.decoder.keep_inputs(places)
    else:
        for layer, place in places.items():
            layers_of(loaded.model)[layer].register_forward_pre_hook(partial(_keep_input, place), with_kwargs=True)
    return kept


def final_states(loaded: LoadedModel, num_tokens: int) -> HiddenStates:
    """From now on what is kept is what the model's last norm gives. Raises ConfigError for a fused decoder, which
    computes that of some tokens only."""
    if loaded.decoder is not None:
        raise ConfigError.of("speculative", "mtp: not for a model of the Llama kind on compiled kernels")
    kept = HiddenStates(loaded, 1, num_tokens)
    loaded.model.base_model.register_forward_hook(partial(_keep_output, kept.places[:, 0]))
    return kept


def can_keep_inputs(text_config: Any) -> bool:
    """True if the model's code says which its layers are."""
    return "layers" in (text_config.base_model_pp_plan or {})


def _keep_input(place: torch.Tensor, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hidden = args[0] if args else kwargs["hidden_states"]
    place[: hidden.shape[1]] = hidden[0]


def _keep_output(place: torch.Tensor, model: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    hidden = output.last_hidden_state
    place[: hidden.shape[1]] = hidden[0]

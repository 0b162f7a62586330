"""Keeps what some decoder layers of a model are given, for heads that predict from it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from common.engine.model.loader import LoadedModel
from common.engine.model.stages import layers_of


class LayerInputs:
    """The residual stream of a forward pass before some layers, in one place that recorded steps write to as well."""

    def __init__(self, loaded: LoadedModel, layers: Sequence[int], num_tokens: int) -> None:
        """`num_tokens`: most of a forward pass."""
        size = loaded.stage.hidden_size
        kept = loaded.device.memory.zeros((num_tokens, len(layers), size), loaded.dtype)
        self._side_by_side = kept.flatten(1)
        places = {layer: kept[:, number] for number, layer in enumerate(layers)}
        if loaded.decoder is not None:
            loaded.decoder.keep_inputs(places)
            return
        for layer, place in places.items():
            layers_of(loaded.model)[layer].register_forward_pre_hook(partial(_keep, place), with_kwargs=True)

    def of_last(self, num_tokens: int) -> torch.Tensor:
        """Those of the last forward pass, which had so many tokens, side by side: [num_tokens, layers * size]"""
        return self._side_by_side[:num_tokens]


def can_keep_inputs(text_config: Any) -> bool:
    """True if the model's code says which its layers are."""
    return "layers" in (text_config.base_model_pp_plan or {})


def _keep(place: torch.Tensor, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    hidden = args[0] if args else kwargs["hidden_states"]
    place[: hidden.shape[1]] = hidden[0]

"""Weights without data, of linear layers that keep their numbers in another form.

Most models only call their layers. Some read a layer's `weight` themselves, and torch computes with such a weight as if
it had data: with what happens to lie in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch import nn

from common.engine.meta_kernels import on_demand


class WeightReadError(RuntimeError):
    """The model's code computes with the weight of such a layer. `layer`: the attribute that the layer is."""

    def __init__(self, layer: str) -> None:
        super().__init__(f"the model's own code reads the weights of {layer!r}")
        self.layer = layer


class AbsentWeight(nn.Parameter):
    """Shape and type of a weight. To compute with it, or with a view of it, raises WeightReadError."""

    layer = "a linear layer"

    @classmethod
    def like(cls, weight: torch.Tensor) -> Self:
        """In place of this weight."""
        return cls.of(weight.shape, weight.dtype)

    @classmethod
    def of(cls, shape: torch.Size, dtype: torch.dtype) -> Self:
        """[out_features, in_features]"""
        return cls(torch.empty(shape, dtype=dtype, device="meta"), requires_grad=False)

    @classmethod
    def __torch_function__(
        cls,
        function: Callable[..., Any],
        types: Iterable[type],
        args: Any = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """See torch.overrides."""
        given = [*args, *(kwargs or {}).values()]
        absent = next((each for each in given if isinstance(each, cls)), None)
        if absent is not None and any(_has_data(each) for each in given):
            raise WeightReadError(absent.layer)
        compute = torch.Tensor.__torch_function__.__func__  # type: ignore[attr-defined]
        found = on_demand(compute, (cls, function, types, args, kwargs))
        if absent is not None and isinstance(found, cls):
            found.layer = absent.layer
        return found


def _has_data(given: object) -> bool:
    return isinstance(given, torch.Tensor) and not isinstance(given, AbsentWeight) and not given.is_meta


class ReadLinear(nn.Linear):
    """A linear layer whose weight the model's code reads itself. It stays as it is."""


def name_absent_weights(model: nn.Module) -> None:
    """Lets errors name the layers."""
    for name, module in model.named_modules():
        if isinstance(weight := getattr(module, "weight", None), AbsentWeight):
            weight.layer = name.rpartition(".")[2]


def keep_weights(model: nn.Module, layers: Iterable[str]) -> None:
    """Marks the linear layers that are one of these attributes, so that they are neither packed nor quantised."""
    for name, module in model.named_modules():
        if type(module) is nn.Linear and name.rpartition(".")[2] in layers:
            module.__class__ = ReadLinear

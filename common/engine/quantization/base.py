"""Formats of quantised weights, in which a model's linear layers are computed.

A format is a kind of linear layer. It computes with torch's operators itself; devices may have kernels for it, which
are compared with that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, Self

import torch
from torch import nn

from common.engine.quantization.absent_weight import AbsentWeight
from common.errors import ConfigError

OverRanks = Callable[[torch.Tensor], torch.Tensor]
"""The largest of each number over the ranks that have parts of the same outputs."""


def of_one_rank(largest: torch.Tensor) -> torch.Tensor:
    """See OverRanks. There are no others."""
    return largest


class QuantizedLinear(nn.Module):
    """A linear layer in some format. `weight` keeps shape and type of the layer's own but no data."""

    needs_kernels: ClassVar[bool] = False  # it is of use on devices with kernels for it only
    rounds_inputs: ClassVar[bool] = False  # to few steps: inputs that hardly differ may differ by one

    def __init__(self, shape: torch.Size, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        """`shape`: [out_features, in_features]"""
        super().__init__()
        self.out_features, self.in_features = shape
        self.weight = AbsentWeight.of(shape, dtype)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    @classmethod
    def of(cls, linear: nn.Linear, over_ranks: OverRanks) -> Self:
        """The layer with its weight rounded. `over_ranks`: of weights of which this rank has some inputs only."""
        raise NotImplementedError

    @classmethod
    def can_join(cls, linears: Sequence[QuantizedLinear]) -> bool:
        """Whether these, one of which is of this class, can be one layer."""
        return all(type(linear) is cls for linear in linears)

    @classmethod
    def joined(cls, linears: Sequence[Self]) -> Self:
        """One layer with the outputs of several."""
        raise NotImplementedError

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        raise NotImplementedError

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Moves all but the weight, which has no data."""
        weight = self._parameters.pop("weight")
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self._parameters["weight"] = weight
        return self


AnyLinear = nn.Linear | QuantizedLinear


def can_join(linears: Sequence[AnyLinear]) -> bool:
    """Whether these layers can be one: none is quantised, or all are in a way that allows it."""
    quantized = [linear for linear in linears if isinstance(linear, QuantizedLinear)]
    return not quantized or (len(quantized) == len(linears) and type(quantized[0]).can_join(quantized))


def quantize_linears(model: nn.Module, layer: type[QuantizedLinear]) -> float:
    """Quantises the model's linear layers but ReadLinear, one after the other; returns their share of the weights that
    are multiplied. Raises ConfigError if there are none. A module whose layer has some inputs only says so by
    `over_ranks`."""
    for parent, name in places_of(model, lambda child: type(child) is nn.Linear):
        setattr(parent, name, layer.of(getattr(parent, name), getattr(parent, "over_ranks", of_one_rank)))
    num_quantized = sum(module.weight.numel() for module in model.modules() if isinstance(module, QuantizedLinear))
    if not num_quantized:
        raise ConfigError.of("quantization", f"{type(model).__name__} has no linear layers that it is for")
    return num_quantized / sum(weight.numel() for weight in _multiplied(model))


def places_of(model: nn.Module, is_wanted: Callable[[nn.Module], bool]) -> list[tuple[nn.Module, str]]:
    """The parents of some modules and their names there, without the modules: who replaces them one after the other
    has the memory of one more, not of all."""
    return [(parent, name) for parent in model.modules() for name, child in parent.named_children() if is_wanted(child)]


def joined_bias(linears: Sequence[AnyLinear]) -> torch.Tensor | None:
    """The biases of several layers, with zeros where some have none; None if all have none."""
    some = next((linear.bias for linear in linears if linear.bias is not None), None)
    if some is None:
        return None
    biases = [some.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears]
    return torch.cat([bias.detach() for bias in biases])


def _multiplied(model: nn.Module) -> Iterator[torch.Tensor]:
    for module in model.modules():
        if not isinstance(module, nn.Embedding):
            yield from (weight for weight in module.parameters(recurse=False) if weight.dim() > 1)

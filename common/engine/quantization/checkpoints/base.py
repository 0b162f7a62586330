"""Formats of checkpoints whose weights are quantised, which their config.json names (`quantization_config`).

A weight is stored as several tensors, whose names differ in their last parts. A format makes a linear layer of them, in
the form that kernels read; no package of those who make such checkpoints is needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Protocol

import torch

from common.engine.quantization.grouped import GroupedLinear
from common.errors import ConfigError, ModelLoadError


class CheckpointFormat(Protocol):
    """The format of one checkpoint."""

    @property
    def suffixes(self) -> frozenset[str]:
        """Last parts of the names of tensors that stand for a weight; those of no use included."""

    def is_quantized(self, suffixes: Iterable[str]) -> bool:
        """Whether tensors with these suffixes are a quantised weight; else `weight` is one as it is."""

    def linear(self, tensors: Mapping[str, torch.Tensor], shape: torch.Size, dtype: torch.dtype) -> GroupedLinear:
        """The layer with a weight of `shape`, [out_features, in_features], without a bias. `tensors` are by their
        suffixes. Raises ModelLoadError if they are not what the format says."""


class Packed:
    """The tensors of one weight, checked as they are taken. Errors name what is wrong with them."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def take(self, suffix: str, shape: Iterable[int] | None = None, *dtypes: torch.dtype) -> torch.Tensor:
        """One that must be there, in this shape and in one of these types."""
        tensor = self._tensors.get(suffix)
        if tensor is None:
            bad_weight(f"there is no {suffix}")
        if shape is not None and list(tensor.shape) != list(shape):
            bad_weight(f"its {suffix} is {list(tensor.shape)} instead of {list(shape)}")
        if dtypes and tensor.dtype not in dtypes:
            bad_weight(f"its {suffix} is {tensor.dtype}")
        return tensor

    def find(self, *suffixes: str) -> torch.Tensor | None:
        """The first that is there."""
        return next((self._tensors[suffix] for suffix in suffixes if suffix in self._tensors), None)


def bad_weight(reason: str) -> NoReturn:
    """Raises the error of a weight that is not what its format says."""
    raise ModelLoadError(f"a quantised weight cannot be read: {reason}", param="model")


def unsupported(method: str, reason: str) -> ConfigError:
    """Why a checkpoint of a known format is not supported."""
    return ConfigError.of("model", f"a checkpoint that {method} has quantised {reason}")


def setting(settings: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """One of a checkpoint's settings. Raises ConfigError if it is of another type."""
    value = settings.get(name, default)
    if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
        raise ConfigError.of("model", f"quantization_config.{name} in config.json is not {kind.__name__}: {value!r}")
    return value

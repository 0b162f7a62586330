"""Steps of recurrences on kernels: what a layer with a state computes for one token of each of some sequences."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch


class NoKernelError(Exception):
    """There is no kernel for a layer of this shape."""


class Recurrences(Protocol):
    """Computes steps of sequences, and reads and writes their states in slots."""

    functions: Mapping[str, Callable[..., Any]]
    """By the names of the functions of transformers that they stand for, with the same arguments but for states, of
    which there are those of all slots, [slots, ...]; a function that returns a state returns those. Raise
    NoKernelError."""

    def begin_step(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Names the slots [sequences] of the states before and after the next steps."""

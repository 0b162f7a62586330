"""The parts of a fused decoder, on each kind of device: linear layers, and compiled kernels between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from common.engine.devices.attention import ProjectionAttention
from common.engine.devices.rms_norm import RMSNorm
from common.engine.quantization.base import AnyLinear

Embed = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""Token ids [tokens] -> their embeddings, float32, and zeros, both [tokens, size]: the residual stream, and what is to
be added to it."""

AddNorm = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""(hidden, delta): hidden += delta, in place; returns the RMS norm of hidden. Both are [tokens, size], hidden is
float32."""

PerToken = Callable[[torch.Tensor], torch.Tensor]
"""[tokens, size] -> [tokens, another size]"""


Adapt = Callable[[PerToken], PerToken]
"""Adds adapters to a linear layer; returns it as it is if it can have none."""


class Operators(Protocol):
    """Builds the operators of one kind of device. Weights and activations are of one type but
    for quantised layers, sums are float32."""

    def split(self, num_tokens: int) -> list[int]:
        """Into how many tokens each a step is best cut for linear layers and what is between them."""

    def supports(self, model: Any) -> bool:
        """True if the device and the types of a transformers model are those of these operators."""

    def attention(self, kv_cache: torch.Tensor, dtype: torch.dtype) -> ProjectionAttention:
        """Attention of queries of `dtype` over the KV cache, which may be quantised."""

    def embed(self, table: torch.Tensor, first: int | None = None) -> Embed:
        """Embeddings from a table [vocabulary, size]; or of the tokens from `first` on, which the last row, of zeros,
        follows for all others."""

    def resume(self, dtype: torch.dtype) -> Embed:
        """Takes the residual stream of the stage before in place of token ids."""

    def linear(self, linear: AnyLinear) -> PerToken:
        """The linear layer; its own weight may be given up."""

    def add_norm(self, norm: RMSNorm, dtype: torch.dtype) -> AddNorm:
        """Residual and RMS norm."""

    def copy(self, hidden: torch.Tensor, out: torch.Tensor) -> None:
        """Writes a residual stream [tokens, size] to `out`, of the same shape, whose rows may be apart."""

    def gated_linear(self, gate_up: AnyLinear, adapted: Adapt | None = None) -> PerToken:
        """silu(gate) * up, where gate and up are the halves of the linear layer's outputs; see `linear`. `adapted`:
        adds its adapters to the layer."""


def rows_of_part(token_ids: torch.Tensor, first: int, zeros: int) -> torch.Tensor:
    """Rows in a table of the tokens from `first` on, where row `zeros`, the last, stands for all others."""
    rows = token_ids - first
    return torch.where((rows >= 0) & (rows < zeros), rows, zeros)

"""A device from outside the project, with fused decoders: --device tests.extensions.device:ExampleDevice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from common.engine.config import Kernels
from common.engine.devices.attention import AttentionBackend, AttentionMetadata, ProjectedArgs, Rotary
from common.engine.devices.operators import Adapt, AddNorm, Embed, PerToken
from common.engine.devices.rms_norm import RMSNorm
from common.engine.devices.torch.attention import TorchAttention
from common.engine.devices.torch.device import TorchDevice
from common.engine.quantization.base import AnyLinear


class ExampleDevice(TorchDevice):
    name = "example"

    def operators(self) -> ExampleOperators:
        return ExampleOperators()

    def attention(self, kv_cache: torch.Tensor, kernels: Kernels, dtype: torch.dtype) -> AttentionBackend:
        return ExampleAttention(kv_cache, dtype)


class ExampleOperators:
    def split(self, num_tokens: int) -> list[int]:
        return [num_tokens]

    def supports(self, model: Any) -> bool:
        return True

    def attention(self, kv_cache: torch.Tensor, dtype: torch.dtype) -> ExampleAttention:
        return ExampleAttention(kv_cache, dtype)

    def embed(self, table: torch.Tensor) -> Embed:
        return lambda token_ids: (table[token_ids].float(), table.new_zeros(len(token_ids), table.shape[1]))

    def resume(self, dtype: torch.dtype) -> Embed:
        return lambda stream: (stream.to(torch.float32, copy=True), torch.zeros_like(stream, dtype=dtype))

    def linear(self, linear: AnyLinear) -> PerToken:
        return linear

    def add_norm(self, norm: RMSNorm, dtype: torch.dtype) -> AddNorm:
        return lambda hidden, delta: _normed(hidden.add_(delta), norm.weight, norm.epsilon).to(dtype)

    copy = staticmethod(lambda hidden, out: out.copy_(hidden))

    def gated_linear(self, gate_up: AnyLinear, adapted: Adapt | None = None) -> PerToken:
        linear = gate_up if adapted is None else adapted(gate_up)
        return lambda inputs: functional.silu((parts := linear(inputs).chunk(2, -1))[0]) * parts[1]


class ExampleAttention(TorchAttention):
    def begin_parts(self, parts: Sequence[AttentionMetadata]) -> None:
        self.begin_step(*parts)

    def attend_projections(
        self, layer: int, part: int, qkv: torch.Tensor, projected: ProjectedArgs, rotary: Rotary
    ) -> torch.Tensor:
        heads, num_heads = qkv.view(1, len(qkv), -1, rotary.cosines.shape[1]), projected.num_heads
        query, (key, value) = heads[:, :, :num_heads], heads[:, :, num_heads:].chunk(2, 2)
        if (norms := projected.norms) is not None:
            query, key = _normed(query, norms.query, norms.epsilon), _normed(key, norms.key, norms.epsilon)
        return self.attend(layer, _turned(query, rotary), _turned(key, rotary), value, projected.args)[0].flatten(1)


def _normed(inputs: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    return functional.rms_norm(inputs, weight.shape, weight, epsilon)


def _turned(heads: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    cosines, sines = (table[rotary.positions][:, None] for table in (rotary.cosines, rotary.sines))
    first, second = heads.chunk(2, -1)
    return heads * cosines + torch.cat([-second, first], -1) * sines

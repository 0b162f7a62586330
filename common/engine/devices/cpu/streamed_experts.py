"""Mixtures of experts with kernels of our own, for models that run their own code.

transformers sorts the tokens by expert, multiplies those of each and sorts them back, by some thirty operators. Where
those are fast with many tokens, which is in bfloat16 with matrix instructions, kernels for few tokens read the weights
where they lie.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from common.engine.devices.cpu.kernels.compiled import Call, threads_for
from common.engine.devices.cpu.kernels.experts import (
    BLOCK,
    MAX_TOKENS,
    can_multiply,
    gated_experts_kernel,
    sum_experts_kernel,
)
from common.engine.devices.cpu.kernels.language import element_type_of
from common.engine.devices.cpu.kernels.linear import ROWS_PER_TASK
from common.engine.devices.cpu.kernels.threads import can_run_kernels
from common.engine.devices.cpu.packed_experts import PackedExperts
from common.engine.devices.cpu.streamed_linear import only_widens_bfloat16
from common.engine.quantization.base import places_of

_TYPES = (torch.float32, torch.bfloat16)
_TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 0.03}  # of the norm
_PER_NUMBER = 4  # weights that are multiplied in the time of a number of elementwise kernels
_CHECKED = 5  # tokens
_MAX_ROWS = {torch.float32: 64, torch.bfloat16: 16}  # of an expert on average; for more, torch's products are faster


class _Routes(NamedTuple):
    """Pairs of tokens and experts, as the kernels take them."""

    pairs: torch.Tensor
    experts: torch.Tensor
    starts: torch.Tensor


class StreamedExperts(nn.Module):
    """The experts of a mixture, of which some compute each token: for inference on CPU."""

    def __init__(self, experts: nn.Module) -> None:
        """`experts`: a module of transformers that `stream_experts` replaces."""
        super().__init__()
        self.experts = experts
        self.num_experts = int(experts.num_experts)  # type: ignore[arg-type]
        gate_up: torch.Tensor = experts.gate_up_proj.detach()  # type: ignore[operator]
        down: torch.Tensor = experts.down_proj.detach()  # type: ignore[operator]
        self._size, self._width = down.shape[1:]
        self._dtype = down.dtype
        self._takes_all = down.dtype == torch.bfloat16 and only_widens_bfloat16()
        self._max_pairs = sys.maxsize if self._takes_all else _MAX_ROWS[down.dtype] * self.num_experts
        element = element_type_of(down.dtype)
        self._gate = Call(gated_experts_kernel(element, self._size, self._width))
        self._gate.keep("weight", gate_up)
        self._sum = Call(sum_experts_kernel(element, self._size, self._width))
        self._sum.keep("weight", down)

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[tokens, size], and each token's experts and their weights, [tokens, choices] -> [tokens, size]. The expert
        after the last is none."""
        num_tokens, choices = index.shape
        if num_tokens > MAX_TOKENS and self._takes_all:
            parts = zip(*(torch.split(each, MAX_TOKENS) for each in (hidden, index, weights)), strict=True)
            return torch.cat([self.forward(*part) for part in parts])
        if not 0 < num_tokens <= MAX_TOKENS or index.numel() > self._max_pairs:
            out: torch.Tensor = self.experts(hidden, index, weights)
            return out
        routes = self._routes(index.flatten().tolist())
        hidden, shares = hidden.contiguous(), weights.float().contiguous()
        gated = torch.empty((len(routes.pairs), self._width), dtype=self._dtype)
        found = torch.empty((num_tokens, self._size), dtype=self._dtype)
        for call in (self._gate, self._sum):
            call.point("pairs", routes.pairs)
            call.point("experts", routes.experts)
            call.point("starts", routes.starts)
            call.point("gated", gated)
            call.set("choices", choices)
        num_experts = len(routes.experts)
        num_weights = num_experts * self._size * self._width
        self._gate.point("inputs", hidden)
        self._gate.run(num_experts * (self._width // BLOCK), threads_for(2 * num_weights // _PER_NUMBER))
        self._sum.point("shares", shares)
        self._sum.point("out", found)
        self._sum.set("num_experts", num_experts)
        self._sum.set("num_tokens", num_tokens)
        self._sum.run(self._size // BLOCK, threads_for(num_weights // _PER_NUMBER))
        return found

    def _routes(self, experts: Sequence[int]) -> _Routes:
        """`experts`: of each pair."""
        pairs = [pair for pair, expert in enumerate(experts) if expert < self.num_experts]
        pairs.sort(key=experts.__getitem__)
        starts = [place for place, pair in enumerate(pairs) if not place or experts[pair] != experts[pairs[place - 1]]]
        own = [experts[pairs[start]] for start in starts]
        joined = torch.tensor([*pairs, *own, *starts, len(pairs)])
        return _Routes(*joined.split([len(pairs), len(own), len(starts) + 1]))  # type: ignore[no-untyped-call]


def stream_experts(model: nn.Module) -> int:
    """Replaces the experts of the model's mixtures that the kernels compute; returns how many."""
    num_replaced = 0
    for parent, name in places_of(model, lambda child: getattr(child, "gate_up_proj", None) is not None):
        if (streamed := _streamed(getattr(parent, name))) is not None:
            setattr(parent, name, streamed)
            num_replaced += 1
    return num_replaced


@torch.inference_mode()
def _streamed(module: Any) -> StreamedExperts | PackedExperts | None:
    """A module's experts on kernels, if it is experts with SwiGLU that the kernels compute, tried on a few tokens. Of
    limits of what they multiply a trial would see nothing: such modules have a gate of their own. Nor would it, in
    bfloat16, tell apart activations that differ little from SiLU for the numbers that come."""
    gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not (
        can_run_kernels() and isinstance(gate_up, nn.Parameter) and isinstance(down, nn.Parameter) and down.dim() == 3
    ):
        return None
    num_experts, size, width = down.shape
    if gate_up.shape != (num_experts, 2 * width, size) or getattr(module, "num_experts", None) != num_experts:
        return None
    if down.dtype not in _TYPES or gate_up.dtype != down.dtype:
        return None
    has_usual_gate = getattr(getattr(module, "_apply_gate", None), "__name__", "") == "_default_apply_gate"
    if not (has_usual_gate and _is_silu(getattr(module, "act_fn", None))):
        return None
    if gate_up.is_meta or not (gate_up.is_contiguous() and down.is_contiguous()):
        return None
    streamed: StreamedExperts | PackedExperts
    if PackedExperts.takes(size, width, down.dtype) and _takes_many(size, width, down.dtype):
        streamed = PackedExperts(gate_up.detach(), down.detach())
    elif can_multiply(size, width):
        streamed = StreamedExperts(module)
    else:
        return None
    few = _random_tokens(_CHECKED, size, num_experts, down.dtype)
    return streamed if _is_like(streamed(*few), module(*few)) else None


@cache
def _takes_many(size: int, width: int, dtype: torch.dtype) -> bool:
    """Whether experts of this size and width give many tokens what they give few at a time; torch may take minutes for
    many."""
    generator = torch.Generator().manual_seed(0)
    gate_up = torch.randn(2, 2 * width, size, generator=generator) / size**0.5
    down = torch.randn(2, size, width, generator=generator) / width**0.5
    streamed = PackedExperts(gate_up.to(dtype), down.to(dtype))
    tokens = _random_tokens(ROWS_PER_TASK + 4, size, 2, dtype)
    parts = zip(*(each.split(_CHECKED) for each in tokens), strict=True)  # type: ignore[no-untyped-call]
    return _is_like(streamed(*tokens), torch.cat([streamed(*part) for part in parts]))


def _random_tokens(
    num_tokens: int, size: int, num_experts: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, the experts of each, and their weights."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(num_tokens, size, generator=generator).to(dtype)
    weights = torch.rand(num_tokens, 2, generator=generator).to(dtype)
    return inputs, (torch.arange(2 * num_tokens) % num_experts).view(num_tokens, 2), weights


def _is_silu(activation: Any) -> bool:
    numbers = torch.linspace(-8.0, 8.0, 257)
    return callable(activation) and bool(torch.allclose(activation(numbers), functional.silu(numbers), atol=1e-6))


def _is_like(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((found - expected).norm() <= _TOLERANCES[expected.dtype] * expected.norm())

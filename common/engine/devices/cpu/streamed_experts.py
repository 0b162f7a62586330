"""Mixtures of experts with kernels of our own for few tokens, for models that run their own code.

transformers sorts the tokens by expert, multiplies those of each and sorts them back, by some thirty operators. The
kernels read the weights where they lie.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from common.engine.devices.cpu.kernels.compiled import Call, threads_for
from common.engine.devices.cpu.kernels.experts import (
    BLOCK,
    MAX_TOKENS,
    can_multiply,
    gated_experts_kernel,
    sum_experts_kernel,
)
from common.engine.devices.cpu.kernels.language import element_type_of
from common.engine.devices.cpu.kernels.threads import can_run_kernels
from common.engine.devices.cpu.streamed_linear import only_widens_bfloat16

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
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _can_stream(child):
                setattr(parent, name, StreamedExperts(child))
                num_replaced += 1
    return num_replaced


@torch.inference_mode()
def _can_stream(module: Any) -> bool:
    """Whether a module is experts with SwiGLU that the kernels compute, tried on a few tokens. Of limits of what they
    multiply a trial would see nothing: such modules have a gate of their own."""
    gate_up, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not (
        can_run_kernels() and isinstance(gate_up, nn.Parameter) and isinstance(down, nn.Parameter) and down.dim() == 3
    ):
        return False
    num_experts, size, width = down.shape
    if gate_up.shape != (num_experts, 2 * width, size) or getattr(module, "num_experts", None) != num_experts:
        return False
    if down.dtype not in _TYPES or gate_up.dtype != down.dtype or not can_multiply(size, width):
        return False
    has_usual_gate = getattr(getattr(module, "_apply_gate", None), "__name__", "") == "_default_apply_gate"
    if not (has_usual_gate and gate_up.is_contiguous() and down.is_contiguous()):
        return False
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(_CHECKED, size, generator=generator).to(down.dtype)
    index = (torch.arange(2 * _CHECKED) % num_experts).view(_CHECKED, 2)
    weights = torch.rand(_CHECKED, 2, generator=generator).to(down.dtype)
    expected = module(inputs, index, weights)
    found = StreamedExperts(module)(inputs, index, weights)
    return bool((found - expected).norm() <= _TOLERANCES[down.dtype] * expected.norm())

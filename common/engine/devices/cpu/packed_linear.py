"""Linear layers with weights laid out for the CPU's matrix kernels.

`torch.nn.functional.linear` packs the weight again at each call. oneDNN, which torch ships, can keep it packed:
measured on one core in float32, the layers of a 100M-parameter model take 93 % of the time for one token, 55 % for
eight, 81 % for thirty-two and about 85 % for a thousand. The result differs from `linear` in rounding only.

The two operators are torch's own for compiled graphs, not its public interface: where they are missing, or the model
does not run with them, its layers stay as they are.
"""

from __future__ import annotations

import sys
from functools import cache

import torch
from torch import nn
from torch.nn import functional

from common.engine.quantization.absent_weight import AbsentWeight
from common.engine.quantization.base import places_of

_TOKENS_HINT = 8  # the layout chosen for this many tokens was the best, or close to it, from 2 to 1024
# A call of the packed kernel costs 10 us more than `linear`. Smaller weights do not win that back ...
_MIN_WEIGHTS = 1 << 15
_MIN_WEIGHTS_FOR_ONE_TOKEN = 1 << 19  # ... and up to here not for one token, so that both layouts are kept.
_MULTIPLE, _MAX_EXACT_ROWS = 32, 128  # of rows; see `missing_rows`


class PackedLinear(nn.Module):
    """nn.Linear for inference on CPU, in float32, or in bfloat16 where the processor has instructions for it. The
    `weight` of a large layer keeps shape and type but no data."""

    def __init__(self, linear: nn.Linear, *, is_packed: bool = False) -> None:
        """`is_packed`: a subclass has the weight already, and multiplies all rows."""
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight = linear.weight.detach()
        self._packed: torch.Tensor | None = None
        is_large = weight.numel() >= _MIN_WEIGHTS_FOR_ONE_TOKEN
        if is_packed:
            self._plain_below = 0
        elif weight.numel() < _MIN_WEIGHTS or not _can_pack(weight.dtype):
            self._plain_below = sys.maxsize  # elements of the input
        else:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _TOKENS_HINT)  # noqa: SLF001
            self._plain_below = 0 if is_large else 2 * self.in_features
        if is_large and (is_packed or self._packed is not None):
            weight = torch.empty_like(weight, device="meta")
        self.weight = AbsentWeight.like(weight) if weight.is_meta else nn.Parameter(weight, requires_grad=False)
        self.bias = linear.bias
        self._weight = weight  # plain attributes, found without nn.Module's search
        self._bias = None if linear.bias is None else linear.bias.detach()

    @staticmethod
    def takes(linear: nn.Linear) -> bool:
        """True if it can take the place of this layer."""
        return _can_pack(linear.weight.dtype)

    @property
    def packed(self) -> torch.Tensor | None:
        """The weight as oneDNN packs it; None for small weights."""
        return self._packed

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features]"""
        if inputs.numel() < self._plain_below:
            return functional.linear(inputs, self._weight, self._bias)
        op = torch.ops.mkldnn._linear_pointwise  # noqa: SLF001
        num_rows = inputs.shape[-2] if inputs.dim() > 1 else 1
        if missing := missing_rows(num_rows):
            inputs = functional.pad(inputs, (0, 0, 0, missing))
        out: torch.Tensor = op(inputs, self._packed, self._bias, "none", [], "")
        return out[..., :num_rows, :] if missing else out

    __call__ = forward  # without nn.Module's hooks, which take as long as a small operator


def missing_rows(num_rows: int) -> int:
    """Rows that are added, so that there are few numbers of rows: oneDNN compiles a kernel for each number that it has
    not met, and prompts are of any length."""
    return -num_rows % _MULTIPLE if num_rows > _MAX_EXACT_ROWS else 0


def pack_linears(model: nn.Module, kind: type[PackedLinear] = PackedLinear) -> int:
    """Replaces the model's linear layers where that is possible; returns how many were replaced."""
    places = places_of(model, lambda child: type(child) is nn.Linear and kind.takes(child))
    for parent, name in places:
        setattr(parent, name, kind(getattr(parent, name)))
    return len(places)


@cache
def _can_pack(dtype: torch.dtype) -> bool:
    operators = ("_reorder_linear_weight", "_linear_pointwise", "_is_mkldnn_bf16_supported")
    available: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if not available or not all(hasattr(torch.ops.mkldnn, name) for name in operators):
        return False
    if dtype == torch.bfloat16:
        supported: bool = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001
        return supported
    return dtype == torch.float32

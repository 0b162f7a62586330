"""Mixtures of experts over weights that are packed for the kernels of linear layers, for any number of tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from common.engine.devices.cpu.huge_pages import use_huge_pages
from common.engine.devices.cpu.kernels.compiled import Call, threads_for
from common.engine.devices.cpu.kernels.experts import combine_kernel
from common.engine.devices.cpu.kernels.language import element_type_of
from common.engine.devices.cpu.kernels.linear import (
    BLOCKS,
    ROWS,
    ROWS_PER_TASK,
    can_stream,
    linear_kernel,
    pair_of,
)
from common.engine.devices.cpu.kernels.pairs import MULTIPLIES_PAIRS
from common.engine.devices.cpu.kernels.tiles import has_tiles
from common.engine.devices.cpu.streamed_linear import only_widens_bfloat16

_PER_NUMBER = 4  # weights that are multiplied in the time of a number of elementwise kernels


class PackedExperts(nn.Module):
    """The experts of a mixture, of which some compute each token: for inference on CPU."""

    def __init__(self, gate_up: torch.Tensor, down: torch.Tensor) -> None:
        """`gate_up` [experts, 2 * width, size] and `down` [experts, size, width] may be given up."""
        super().__init__()
        self.num_experts, self._size, _ = down.shape
        self._dtype = down.dtype
        self._gated = _RoutedLinear(gate_up, gated=True)
        self._down = _RoutedLinear(down)
        self._combine = Call(combine_kernel(element_type_of(down.dtype), self._size))

    @staticmethod
    def takes(size: int, width: int, dtype: torch.dtype) -> bool:
        """True if there are kernels for experts of this size and width, as fast as any with all numbers of tokens."""
        is_fast = dtype == torch.float32 or (
            dtype == torch.bfloat16 and (only_widens_bfloat16() or (MULTIPLIES_PAIRS and not has_tiles()))
        )
        return is_fast and bool(_block_of(dtype, size, width) and _block_of(dtype, width, size))

    def forward(self, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[tokens, size], and each token's experts and their weights, [tokens, choices] -> [tokens, size]. The expert
        after the last is none."""
        num_tokens, choices = index.shape
        out = torch.empty((num_tokens, self._size), dtype=self._dtype)
        if not num_tokens:
            return out
        experts = index.numpy().ravel()
        order = experts.argsort(kind="stable")
        numbers, places = np.arange(len(order)), np.empty_like(order)
        places[order] = numbers
        routed = [torch.from_numpy(each) for each in (order // choices, numbers, places)]
        parts, num_results = self._parts(experts)
        results = out[:0]
        if num_results:
            gated = self._gated(hidden.contiguous(), routed[0], parts, num_results)
            results = self._down(gated, routed[1], parts, num_results)
        shares = weights.float().contiguous()
        self._combine.point("results", results)
        self._combine.point("places", routed[2])
        self._combine.point("shares", shares)
        self._combine.point("out", out)
        self._combine.set("choices", choices)
        self._combine.set("num_results", num_results)
        self._combine.run(num_tokens, threads_for(index.numel() * self._size))
        return out

    def _parts(self, experts: NDArray[np.int64]) -> tuple[torch.Tensor, int]:
        """Pairs of a token and an expert, sorted by expert, as `linear_kernel` takes them, and how many there are."""
        counts = np.bincount(experts, minlength=self.num_experts)[: self.num_experts]
        parts: list[tuple[int, int, int]] = []
        first = 0
        for expert in counts.nonzero()[0].tolist():
            count = int(counts[expert])
            last, num_parts = first + count, -(-count // ROWS_PER_TASK)
            most = -(-count // (num_parts * ROWS)) * ROWS
            while first < last:
                num_rows = min(last - first, most)
                parts.append((expert, first, num_rows))
                first += num_rows
        return torch.tensor(parts), first


class _RoutedLinear:
    """The weights of one linear layer of all experts."""

    def __init__(self, weight: torch.Tensor, *, gated: bool = False) -> None:
        """`weight`: [experts, outputs, inputs]; `gated`: see `linear_kernel`."""
        num_experts, out_features, self._in_features = weight.shape
        self._out_features = out_features // 2 if gated else out_features
        self._dtype = weight.dtype
        element = element_type_of(weight.dtype)
        self._block, pair = _block_of(weight.dtype, self._in_features, self._out_features), pair_of(element)
        words = weight if pair == 1 else weight.view(torch.int32)  # pairs move together
        blocks = words.view(num_experts, -1, self._block, self._in_features // pair).transpose(2, 3).contiguous()
        use_huge_pages(blocks.data_ptr(), blocks.nbytes)
        self._call = Call(linear_kernel(element, self._block, has_bias=False, gated=gated, routed=True))
        self._call.keep("weight", blocks)
        self._call.set("in_features", self._in_features)
        self._call.set("out_features", out_features)

    def __call__(self, inputs: torch.Tensor, rows: torch.Tensor, parts: torch.Tensor, num_rows: int) -> torch.Tensor:
        """`rows`: numbers of rows of `inputs`; `parts` of them: see `linear_kernel`. -> [num_rows, outputs]"""
        if inputs.dtype != self._dtype:
            raise TypeError(f"inputs are of {inputs.dtype}, weights of {self._dtype}")
        out = torch.empty((num_rows, self._out_features), dtype=self._dtype)
        self._call.point("inputs", inputs)
        self._call.point("rows", rows)
        self._call.point("parts", parts)
        self._call.point("out", out)
        self._call.set("num_parts", len(parts))
        num_weights = len(parts) * self._in_features * self._out_features
        self._call.run(len(parts) * (self._out_features // self._block), threads_for(num_weights // _PER_NUMBER))
        return out


def _block_of(dtype: torch.dtype, in_features: int, out_features: int) -> int:
    """Outputs in a block of such a weight; 0 if the kernels do not take it."""
    element: Any = element_type_of(dtype)
    return next((width for width in BLOCKS if can_stream(element, in_features, out_features, width)), 0)

"""LoRA adapters by torch's operators, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from common.engine.devices.adapters import AdapterBatch, LoraPair, Low

_ALIGNMENT = 16  # ranks, which kernels take at once


class LayerMatrices(NamedTuple):
    """An adapter's matrices for a layer of several parts, with zeros in the place of those that it has not."""

    a: torch.Tensor  # [ranks of all parts, one after the other, and as many zeros as align them; in_features]
    b: torch.Tensor  # [rank of a part, out_features]
    parts: list[int]  # that it changes

    @property
    def rank(self) -> int:
        """Rows of a part in `a`."""
        return len(self.b)


class TorchLayerAdapters:
    """See LayerAdapters."""

    def __init__(self, batch: AdapterBatch, in_features: int, sizes: Sequence[int]) -> None:
        """`sizes`: outputs of each of the layers."""
        self.batch = batch
        self._in_features = in_features
        ends = list(accumulate(sizes))
        self._outputs = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        self.adapters: dict[int, LayerMatrices] = {}  # by slot

    def prepare(self) -> None:
        """See LayerAdapters."""

    def put(self, slot: int, pairs: Sequence[LoraPair | None]) -> None:
        """See LayerAdapters."""
        given = {part: pair for part, pair in enumerate(pairs) if pair is not None}
        if not given:
            return
        like, rank = next(iter(given.values())).a, max(len(pair.a) for pair in given.values())
        a = like.new_zeros((aligned(rank * len(pairs)), self._in_features))
        b = like.new_zeros((rank, self._outputs[-1].stop))
        for part, pair in given.items():
            a[part * rank : part * rank + len(pair.a)] = pair.a
            b[: len(pair.a), self._outputs[part]] = pair.b.T
        self.adapters[slot] = LayerMatrices(a, b, list(given))

    def remove(self, slot: int) -> None:
        """See LayerAdapters."""
        self.adapters.pop(slot, None)

    def down(self, inputs: torch.Tensor) -> Low:
        """See LayerAdapters."""
        rows = self.batch.rows
        assert rows is not None
        runs = [run for run in rows.runs if run.slot in self.adapters]
        return [(run, inputs[rows.of(run)] @ self.adapters[run.slot].a.T) for run in runs]

    def up(self, low: Low, out: torch.Tensor) -> None:
        """See LayerAdapters."""
        rows = self.batch.rows
        assert rows is not None
        assert low is not None
        for run, products in low:
            adapter, own = self.adapters[run.slot], rows.of(run)
            for part in adapter.parts:
                outputs = self._outputs[part]
                of_part = products[:, part * adapter.rank : (part + 1) * adapter.rank]
                if isinstance(own, slice):
                    out[own, outputs].addmm_(of_part, adapter.b[:, outputs])
                else:
                    out[:, outputs].index_add_(0, own, of_part @ adapter.b[:, outputs])


def aligned(rank: int) -> int:
    """The next multiple of the ranks that kernels take at once."""
    return -(-rank // _ALIGNMENT) * _ALIGNMENT

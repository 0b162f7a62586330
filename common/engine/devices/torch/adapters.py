"""LoRA adapters by torch's operators, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from common.engine.devices.adapters import AdapterBatch, LoraPair, Low


class _Part(NamedTuple):
    """The second product for some of the outputs."""

    outputs: slice
    ranks: slice  # of the first product's results
    b: torch.Tensor  # transposed, [rank, outputs]


class _Adapter(NamedTuple):
    a: torch.Tensor  # transposed, [in_features, sum of ranks]
    parts: list[_Part]


class TorchLayerAdapters:
    """See LayerAdapters."""

    def __init__(self, batch: AdapterBatch, in_features: int, sizes: Sequence[int]) -> None:
        """`sizes`: outputs of each of the layers."""
        self.batch = batch
        ends = list(accumulate(sizes))
        self.outputs = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
        self._adapters: dict[int, _Adapter] = {}

    def prepare(self) -> None:
        """See LayerAdapters."""

    def put(self, slot: int, pairs: Sequence[LoraPair | None]) -> None:
        """See LayerAdapters."""
        parts: list[_Part] = []
        end = 0
        for pair, outputs in zip(pairs, self.outputs, strict=True):
            if pair is not None:
                start, end = end, end + len(pair.a)
                parts.append(_Part(outputs, slice(start, end), pair.b.T))
        if parts:
            a = torch.cat([pair.a for pair in pairs if pair is not None]) if len(parts) > 1 else _only(pairs).a
            self._adapters[slot] = _Adapter(a.T, parts)

    def remove(self, slot: int) -> None:
        """See LayerAdapters."""
        self._adapters.pop(slot, None)

    def down(self, inputs: torch.Tensor) -> Low:
        """See LayerAdapters."""
        rows = self.batch.rows
        assert rows is not None
        runs = [run for run in rows.runs if run.slot in self._adapters]
        return [(run, inputs[rows.of(run)] @ self._adapters[run.slot].a) for run in runs]

    def up(self, low: Low, out: torch.Tensor) -> None:
        """See LayerAdapters."""
        rows = self.batch.rows
        assert rows is not None
        assert low is not None
        for run, products in low:
            own = rows.of(run)
            for outputs, ranks, b in self._adapters[run.slot].parts:
                if isinstance(own, slice):
                    out[own, outputs].addmm_(products[:, ranks], b)
                else:
                    out[:, outputs].index_add_(0, own, products[:, ranks] @ b)


def _only(pairs: Sequence[LoraPair | None]) -> LoraPair:
    return next(pair for pair in pairs if pair is not None)

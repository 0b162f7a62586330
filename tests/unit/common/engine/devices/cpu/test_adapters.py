"""Adapters by kernels and by torch's operators, next to the definition: to each row B A x of its adapter."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from common.engine.devices.adapters import NO_ADAPTER, AdapterBatch, LoraPair, StepAdapters
from common.engine.devices.cpu.adapters import CpuLayerAdapters
from common.engine.devices.torch.adapters import TorchLayerAdapters

NUM_SLOTS = 8
IN_FEATURES = 48
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.05}


def pair_of(rank: int | None, out_features: int, dtype: torch.dtype) -> LoraPair | None:
    if rank is None:
        return None
    return LoraPair(
        (torch.randn(rank, IN_FEATURES) / 8).to(dtype), (torch.randn(out_features, rank) / rank**0.5).to(dtype)
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("sizes", [(64, 32, 32), (128,), (80, 80), (24,)])
@pytest.mark.parametrize("kind", ["kernels", "torch"])
def test_each_row_gets_what_its_adapter_gives(kind: str, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch = AdapterBatch(NUM_SLOTS, torch.device("cpu"))
    own = (batch, IN_FEATURES, sizes)
    layer = CpuLayerAdapters(*own, dtype, 64) if kind == "kernels" else TorchLayerAdapters(*own)
    layer.prepare()
    ranks = [8, 16, 5, 64, 1]
    adapters: list[list[LoraPair | None]] = [[pair_of(rank, size, dtype) for size in sizes] for rank in ranks]
    adapters.append([None, *(pair_of(40, size, dtype) for size in sizes[1:])])  # of the last parts, or of none
    adapters.append([pair_of(3 + part, size, dtype) for part, size in enumerate(sizes)])
    for slot, pairs in enumerate(adapters):
        layer.put(slot, adapters[0])  # what was in a slot before does not count
        layer.remove(slot)
        layer.put(slot, pairs)
    for num_rows in (1, 3, 17, 64, 70):
        slots = np.random.default_rng(num_rows).integers(NO_ADAPTER, len(adapters), num_rows)
        for chosen in (slots, np.sort(slots)):  # of an adapter apart, or consecutive
            batch.begin_step(StepAdapters(chosen, chosen))
            if not batch.is_active:
                continue
            inputs, before = torch.randn(num_rows, IN_FEATURES).to(dtype), torch.randn(num_rows, sum(sizes)).to(dtype)
            out = before.clone()
            layer.up(layer.down(inputs), out)
            torch.testing.assert_close(
                out.float(),
                expected(inputs.float(), before.float(), chosen.tolist(), adapters, sizes),
                rtol=TOLERANCE[dtype],
                atol=TOLERANCE[dtype],
            )


def expected(
    inputs: torch.Tensor,
    before: torch.Tensor,
    slots: list[int],
    adapters: list[list[LoraPair | None]],
    sizes: tuple[int, ...],
) -> torch.Tensor:
    out = before.clone()
    for row, slot in enumerate(slots):
        start = 0
        for part, size in enumerate(sizes if slot != NO_ADAPTER else ()):
            if (pair := adapters[slot][part]) is not None:
                out[row, start : start + size] += pair.b.float() @ (pair.a.float() @ inputs[row])
            start += size
    return out

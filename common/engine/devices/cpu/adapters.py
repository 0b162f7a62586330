"""LoRA adapters on CPU: by kernels for few rows, which may be recorded, else by torch's operators, unless a row's
results may not depend on how many there are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.engine.devices.adapters import AdapterBatch, LoraPair, Low
from common.engine.devices.cpu.kernels.compiled import Call, CannotRecordError, is_recording, threads_for
from common.engine.devices.cpu.kernels.experts import BLOCK
from common.engine.devices.cpu.kernels.language import element_type_of
from common.engine.devices.cpu.kernels.lora import (
    MAX_PARTS,
    MAX_ROWS,
    TABLE_WIDTH,
    can_add,
    lora_down_kernel,
    lora_up_kernel,
    width_of,
)
from common.engine.devices.torch.adapters import TorchLayerAdapters, aligned


class CpuLayerAdapters(TorchLayerAdapters):
    """See LayerAdapters."""

    def __init__(
        self,
        batch: AdapterBatch,
        in_features: int,
        sizes: Sequence[int],
        dtype: torch.dtype,
        max_rank: int,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """`batch_invariant`: of sizes that kernels take."""
        super().__init__(batch, in_features, sizes)
        self._sizes = tuple(sizes)
        self._dtype = dtype
        self._is_invariant = batch_invariant
        self._stride = MAX_PARTS * aligned(max_rank)
        self._table = torch.zeros((batch.num_slots, TABLE_WIDTH), dtype=torch.int64)
        self._max_blocks = self._stride // BLOCK
        self._num_weights = in_features * aligned(max_rank)
        self._has_kernels = can_add(in_features, sizes)
        self._low = batch.scratch
        self._calls: tuple[Call, Call] | None = None  # once there is an adapter

    def prepare(self) -> None:
        """See LayerAdapters."""
        if self._calls is None and self._has_kernels:
            element, num_slots = element_type_of(self._dtype), self.batch.num_slots
            down = Call(lora_down_kernel(element, self._in_features, num_slots, self._max_blocks), stride=self._stride)
            up = Call(lora_up_kernel(element, self._sizes, num_slots), stride=self._stride)
            for call in (down, up):
                call.keep("table", self._table)
            self._calls = down, up

    def put(self, slot: int, pairs: Sequence[LoraPair | None]) -> None:
        """See LayerAdapters."""
        super().put(slot, pairs)
        if (adapter := self.adapters.get(slot)) is not None:
            addresses = adapter.a.data_ptr(), adapter.b.data_ptr()
            self._table[slot] = torch.tensor([*addresses, len(adapter.a), adapter.rank])

    def remove(self, slot: int) -> None:
        """See LayerAdapters."""
        super().remove(slot)
        self._table[slot] = 0

    def down(self, inputs: torch.Tensor) -> Low:
        """See LayerAdapters."""
        are_many = len(inputs) > MAX_ROWS
        if is_recording() and (self._calls is None or are_many):
            raise CannotRecordError(f"adapters of {len(inputs)} rows are not recorded")
        if self._calls is None or (are_many and not self._is_invariant):
            return super().down(inputs)
        batch, call = self.batch, self._calls[0]
        if batch.scratch.numel() < MAX_ROWS * self._stride:
            batch.scratch = torch.empty(MAX_ROWS * self._stride)
        self._low = torch.empty(len(inputs) * self._stride) if are_many else batch.scratch
        inputs = inputs.contiguous()
        self._point(call)
        call.point("inputs", inputs)
        call.run(batch.num_slots * self._max_blocks, threads_for(self._num_weights))
        return None

    def up(self, low: Low, out: torch.Tensor) -> None:
        """See LayerAdapters."""
        if low is not None:
            super().up(low, out)
            return
        assert self._calls is not None
        assert out.is_contiguous()
        call = self._calls[1]
        self._point(call)
        call.point("out", out)
        call.run(sum(self._sizes) // width_of(self._sizes), threads_for(self._num_weights))

    def _point(self, call: Call) -> None:
        assert self.batch.rows is not None
        call.point("routes", self.batch.rows.routes)
        call.point("low", self._low)

"""Slots of host memory in which the ranks of an engine put blocks together, for connectors that move whole blocks.

The driver has the connector, over the slots as if they were its KV cache; each rank copies its layers and KV heads
between its own KV cache and the slots. A rank on another machine has slots of its own, and its heads travel with its
jobs. See `common.engine.executor.staged_connector`.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from common.engine.contract.layout import KVLayout, Part, map_layouts
from common.engine.kv_connector import (
    NO_FENCES,
    BlockTransfer,
    ConnectorFacts,
    Fences,
    SplitConnector,
    TransferResult,
    WorkerConnector,
)
from common.errors import TransferError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

ELSEWHERE = "elsewhere"  # path for a rank that cannot open the file
_SLOTS_BYTES = 32 << 20
_MIN_SLOTS = 4
_MAX_SLOTS = 64
_FENCE_PAUSE_S = 200e-6
_CLOSE_TIMEOUT_S = 5.0


def slots_shape(layout: KVLayout) -> tuple[int, ...]:
    """[num_slots, num_layers, planes, num_kv_heads, block_size, row_numbers]: as many slots as fit into a few MiB."""
    group = layout.groups[0]  # blocks of all groups have one shape
    num_layers = layout.num_layers + layout.num_feature_layers
    block = (num_layers, layout.num_planes, layout.num_kv_heads, layout.block_size, group.row_numbers)
    block_bytes = math.prod(block) * _dtype(layout).itemsize
    return (min(max(_MIN_SLOTS, _SLOTS_BYTES // block_bytes), _MAX_SLOTS), *block)


def slots_bytes(layout: KVLayout) -> int:
    """Bytes of all slots."""
    return math.prod(slots_shape(layout)) * _dtype(layout).itemsize


def open_slots(path: str, layout: KVLayout) -> torch.Tensor:
    """Maps the slots in this file, which grows to their size."""
    import torch

    shape = slots_shape(layout)
    return torch.from_file(path, shared=True, size=math.prod(shape), dtype=_dtype(layout)).view(shape)


def _dtype(layout: KVLayout) -> torch.dtype:
    import torch

    dtype = getattr(torch, layout.groups[0].dtype)
    assert isinstance(dtype, torch.dtype)
    return dtype


class SlotHeads:
    """The KV heads of one rank in the slots."""

    def __init__(self, slots: torch.Tensor, layout: KVLayout, rank: int) -> None:
        whole = layout.of_store
        self._saved = [_narrow(slots, part.target) for part in map_layouts(layout, whole) if part.producer_rank == rank]
        self._loaded = [
            _narrow(slots, part.source) for part in map_layouts(whole, layout) if part.consumer_rank == rank
        ]

    def loaded(self, slots: Sequence[int]) -> bytes:
        """Returns the content of these slots that the rank loads."""
        return _pack(self._loaded, slots)

    def put_loaded(self, slots: Sequence[int], content: bytes) -> None:
        """Puts that into other slots."""
        _unpack(self._loaded, slots, content)

    def saved(self, slots: Sequence[int]) -> bytes:
        """Returns the content that the rank has saved to these slots."""
        return _pack(self._saved, slots)

    def put_saved(self, slots: Sequence[int], content: bytes) -> None:
        """Puts that into other slots."""
        _unpack(self._saved, slots, content)


class SlotConnector:
    """See WorkerConnector. That of one rank: it does jobs that name slots, one by one on a thread, and leaves others to
    the rank's part of a direct connector, if there is one."""

    def __init__(self, path: str, direct: WorkerConnector | None = None) -> None:
        """`path`: of the file with the slots, or ELSEWHERE."""
        self._path = path
        self._direct = direct
        self._jobs: queue.SimpleQueue[tuple[BlockTransfer, bool] | None] = queue.SimpleQueue()  # None closes
        self._thread = threading.Thread(target=self._run, name="kv-slots", daemon=True)
        self._heads: SlotHeads | None = None  # of slots of its own
        self._lock = threading.Lock()  # guards the next
        self._results: list[TransferResult] = []

    def register_kv_cache(
        self,
        kv_cache: torch.Tensor,
        fingerprint: bytes,
        layout: KVLayout,
        on_settled: Callable[[], None],
        fences: Fences = NO_FENCES,
        rank: int = 0,
    ) -> ConnectorFacts:
        """See WorkerConnector."""
        if self._path == ELSEWHERE:
            slots = kv_cache.new_empty(slots_shape(layout), device="cpu")
            self._heads = SlotHeads(slots, layout, rank)
        else:
            slots = open_slots(self._path, layout)
        whole = layout.of_store
        self._out = [
            (_narrow(kv_cache, part.source), _narrow(slots, part.target))
            for part in map_layouts(layout, whole)
            if part.producer_rank == rank
        ]
        self._in = [
            (_narrow(slots, part.source), _narrow(kv_cache, part.target))
            for part in map_layouts(whole, layout)
            if part.consumer_rank == rank
        ]
        self._fences, self._on_settled = fences, on_settled
        self._thread.start()
        if self._direct is None:
            return ConnectorFacts()
        return self._direct.register_kv_cache(kv_cache, fingerprint, layout, on_settled, fences, rank)

    def split(self) -> SplitConnector:
        """See WorkerConnector."""
        return SplitConnector(per_rank=self, per_engine=None)

    def start_load(self, transfer: BlockTransfer) -> None:
        """See WorkerConnector. From slots."""
        if transfer.slots:
            self._jobs.put((transfer, True))
        elif self._direct is not None:
            self._direct.start_load(transfer)

    def start_save(self, transfer: BlockTransfer) -> None:
        """See WorkerConnector. To slots."""
        if transfer.slots:
            self._jobs.put((transfer, False))
        elif self._direct is not None:
            self._direct.start_save(transfer)

    def start_lookup(self, transfer: BlockTransfer) -> None:
        """See WorkerConnector. Never called: nothing is kept here."""
        raise RuntimeError("a rank keeps no blocks")

    def cancel(self, job_id: int) -> None:
        """See WorkerConnector. A copy settles soon."""
        if self._direct is not None:
            self._direct.cancel(job_id)

    def poll(self) -> list[TransferResult]:
        """See WorkerConnector."""
        with self._lock:
            results, self._results = self._results, []
        return results if self._direct is None else [*results, *self._direct.poll()]

    def close(self) -> None:
        """See WorkerConnector. Copies that have not begun are abandoned."""
        self._jobs.put(None)
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)
        if self._direct is not None:
            self._direct.close()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            transfer, is_load = job
            error, content = "", b""
            try:
                while not self._fences.is_over(transfer.fence):
                    time.sleep(_FENCE_PAUSE_S)
                if is_load:
                    if self._heads is not None:
                        self._heads.put_loaded(transfer.slots, transfer.content)
                    _copy(self._in, transfer.slots, transfer.block_ids)
                else:
                    _copy(self._out, transfer.block_ids, transfer.slots)
                    if self._heads is not None:
                        content = self._heads.saved(transfer.slots)
            except Exception:  # a bug may cost a recompute, but not the thread that all later jobs need
                logger.exception("blocks could not be copied to or from slots")
                error = TransferError.reason
            self._settle(transfer, error, content)

    def _settle(self, transfer: BlockTransfer, error: str, content: bytes) -> None:
        num_ok = 0 if error else len(transfer.block_ids)
        with self._lock:
            self._results.append(TransferResult(transfer.job_id, num_ok, error, content=content))
        self._on_settled()


def _narrow(blocks: torch.Tensor, part: Part) -> torch.Tensor:
    return blocks.narrow(1, part.layer, part.num_layers).narrow(3, part.head, part.num_heads)


def _copy(parts: Sequence[tuple[torch.Tensor, torch.Tensor]], from_ids: Sequence[int], to_ids: Sequence[int]) -> None:
    for source, target in parts:
        for from_id, to_id in zip(from_ids, to_ids, strict=True):
            target[to_id].copy_(source[from_id])  # also from and to a GPU: over when it returns


def _pack(parts: Sequence[torch.Tensor], ids: Sequence[int]) -> bytes:
    import torch

    return b"".join(part[each].contiguous().view(torch.uint8).numpy().tobytes() for part in parts for each in ids)


def _unpack(parts: Sequence[torch.Tensor], ids: Sequence[int], content: bytes) -> None:
    """Raises RuntimeError if the content is not of these blocks."""
    import torch

    wanted = sum(part[0].nbytes for part in parts) * len(ids)
    if len(content) != wanted:
        raise RuntimeError(f"{len(content)} bytes for blocks of {wanted}")
    rest = memoryview(bytearray(content))
    for part in parts:
        for each in ids:
            count = part[each].numel()
            part[each].copy_(torch.frombuffer(rest, dtype=part.dtype, count=count).view(part[each].shape))
            rest = rest[part[each].nbytes :]

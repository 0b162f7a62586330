"""Connectors of an engine of several ranks as one, over the KV cache of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from common.engine.contract.layout import KVLayout
from common.engine.executor.ranked_connector import join_ranks
from common.engine.executor.staged_connector import StagedStore
from common.engine.kv_connector import (
    BlockTransfer,
    Connector,
    ConnectorFacts,
    OpenConnector,
    TransferResult,
    WorkerConnector,
)
from common.engine.worker.slots import SlotConnector
from common.types import BlockHash
from kv_store.base import BlockStore
from tests.contract.connector_rig import Medium


class RankedConnectors:
    """A WorkerConnector made of one of the engine and those of its ranks."""

    def __init__(self, create: Callable[[], WorkerConnector], num_ranks: int) -> None:
        self._num_ranks = num_ranks
        whole = create()
        self._staged = None if whole.split().per_engine is None else StagedStore(whole.split().per_engine)
        if whole.split().per_rank is None:
            self._of_ranks: list[WorkerConnector | None] = [None] * num_ranks
        else:
            self._of_ranks = [create().split().per_rank for _ in range(num_ranks)]
        self.workers: list[WorkerConnector] = []
        self.parts: list[torch.Tensor] = []  # of the KV cache, by rank
        self._open: Connector | None = None
        self._unsettled: set[int] = set()

    def register_kv_cache(
        self, kv_cache: torch.Tensor, fingerprint: bytes, layout: KVLayout, on_settled: Callable[[], None]
    ) -> ConnectorFacts:
        layout = replace(layout, tensor_parallel_size=self._num_ranks)
        self.parts = [
            kv_cache[:, layers.start : layers.stop, :, heads.start : heads.stop] for layers, heads in layout.shards
        ]
        if self._of_ranks[0] is not None:  # a rank's own memory, where bytes are written by address
            self.parts = [part.contiguous() for part in self.parts]
        if self._staged is not None:
            self._staged.allocate(layout)
            self.workers = [SlotConnector(self._staged.path, each) for each in self._of_ranks]
        else:
            self.workers = [each for each in self._of_ranks if each is not None]
        ranks = join_ranks(
            [
                OpenConnector(worker, worker.register_kv_cache(part, fingerprint, layout, on_settled, rank=rank))
                for rank, (worker, part) in enumerate(zip(self.workers, self.parts, strict=True))
            ]
        )
        opened = ranks if self._staged is None else self._staged.open(ranks, fingerprint, layout, on_settled)
        self._open = opened.connector
        return opened.facts

    def start_load(self, transfer: BlockTransfer) -> None:
        self._unsettled.add(transfer.job_id)
        self._open.start_load(transfer)

    def start_save(self, transfer: BlockTransfer) -> None:
        self._unsettled.add(transfer.job_id)
        self._open.start_save(transfer)

    def start_lookup(self, transfer: BlockTransfer) -> None:
        self._open.start_lookup(transfer)

    def cancel(self, job_id: int) -> None:
        self._open.cancel(job_id)

    def poll(self) -> list[TransferResult]:
        settled = self._open.poll()
        self._unsettled.difference_update(result.job_id for result in settled)
        return settled

    def close(self) -> None:
        """Cancels what has not settled, as an executor may abandon it."""
        for job_id in list(self._unsettled):
            self._open.cancel(job_id)
        for worker in self.workers:
            worker.close()
        if self._staged is not None:
            self._staged.close()


def whole_blocks(parts: Sequence[torch.Tensor], num_heads: int, block_ids: Iterable[int]) -> list[bytes]:
    """The bytes of these blocks with all heads; ranks that have the same head agree."""
    ids = list(block_ids)
    copies = max(1, len(parts) // num_heads)
    bits = [part.contiguous().view(torch.uint8)[ids] for part in parts]
    assert all(torch.equal(part, bits[rank // copies * copies]) for rank, part in enumerate(bits))
    return [block.numpy().tobytes() for block in torch.cat(bits[::copies], dim=3)]


class RankedMedium:
    """A Medium whose connectors are those of engines of several ranks."""

    def __init__(self, medium: Medium, num_ranks: int) -> None:
        self._medium = medium
        self._num_ranks = num_ranks

    def connector(self) -> RankedConnectors:
        return RankedConnectors(self._medium.connector, self._num_ranks)

    def store(self) -> BlockStore:
        return self._medium.store()

    def frames(self) -> dict[BlockHash, bytes]:
        return self._medium.frames()

    def put(self, key: BlockHash, frame: bytes) -> None:
        self._medium.put(key, frame)

    def remove(self, key: BlockHash) -> None:
        self._medium.remove(key)

    def clear(self) -> None:
        self._medium.clear()

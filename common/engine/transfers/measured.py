"""A connector that counts what the connector below it moves, and how long that takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from common.engine.kv_connector import BlockTransfer, Connector, TransferResult
from common.engine.messages import EngineStats, TransferFigures


@dataclass(slots=True)
class _Totals:
    """Sums of the transfers in one direction."""

    num_transfers: int = 0
    num_failed: int = 0
    num_blocks: int = 0
    seconds: float = 0.0

    @property
    def figures(self) -> TransferFigures:
        return TransferFigures(self.num_transfers, self.num_failed, self.num_blocks, self.seconds)


@dataclass(slots=True)
class _Directions:
    saves: _Totals = field(default_factory=_Totals)
    loads: _Totals = field(default_factory=_Totals)
    offloads: _Totals = field(default_factory=_Totals)
    restores: _Totals = field(default_factory=_Totals)


class _Running(NamedTuple):
    totals: _Totals  # that it counts for
    num_blocks: int
    started_at: float


class MeasuredConnector:
    """Forwards jobs to a connector. All methods but `figures` are called on the transfer thread. Lookups move nothing
    and are not counted."""

    def __init__(self, connector: Connector, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._connector = connector
        self._clock = clock
        self._directions = _Directions()
        self._running: dict[int, _Running] = {}  # by job id

    def figures(self, stats: EngineStats) -> EngineStats:
        """`stats` with the figures of the transfers. May be called from any thread."""
        totals = self._directions
        return msgspec.structs.replace(
            stats,
            saves=totals.saves.figures,
            loads=totals.loads.figures,
            offloads=totals.offloads.figures,
            restores=totals.restores.figures,
        )

    def start_load(self, transfer: BlockTransfer) -> None:
        """See Connector."""
        totals = self._directions.restores if transfer.is_for_tier else self._directions.loads
        self._begin(transfer, totals)
        self._connector.start_load(transfer)

    def start_save(self, transfer: BlockTransfer) -> None:
        """See Connector."""
        totals = self._directions.offloads if transfer.is_for_tier else self._directions.saves
        self._begin(transfer, totals)
        self._connector.start_save(transfer)

    def start_lookup(self, transfer: BlockTransfer) -> None:
        """See Connector."""
        self._connector.start_lookup(transfer)

    def cancel(self, job_id: int) -> None:
        """See Connector."""
        self._connector.cancel(job_id)

    def poll(self) -> list[TransferResult]:
        """See Connector."""
        results = self._connector.poll()
        now = self._clock()
        for result in results:
            running = self._running.pop(result.job_id, None)
            if running is not None:
                self._count(running, result, now)
        return results

    def _begin(self, transfer: BlockTransfer, totals: _Totals) -> None:
        self._running[transfer.job_id] = _Running(totals, len(transfer.block_ids), self._clock())

    def _count(self, running: _Running, result: TransferResult, now: float) -> None:
        totals = running.totals
        totals.num_transfers += 1
        totals.num_failed += result.num_blocks_ok < running.num_blocks
        totals.num_blocks += min(max(result.num_blocks_ok, 0), running.num_blocks)
        totals.seconds += now - running.started_at

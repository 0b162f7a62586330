"""The connectors of several ranks as one.

Each rank's connector moves the rank's part of each block, over its own KV cache. A job goes to all of them and settles
when it has settled on all; what the ranks have in common holds.
"""

from __future__ import annotations

from collections.abc import Sequence

from common.engine.kv_connector import BlockTransfer, Connector, ConnectorFacts, OpenConnector, TransferResult


def join_ranks(opened: Sequence[OpenConnector]) -> OpenConnector:
    """The connector over these of all ranks, rank 0 first, which are of one kind."""
    if len(opened) == 1:
        return opened[0]
    facts = [each.facts for each in opened]
    part_blocks = [each.part_blocks for each in facts if each.part_blocks is not None]
    joined = ConnectorFacts(
        is_direct=facts[0].is_direct,
        max_write_s=max(each.max_write_s for each in facts),
        part_blocks=min(part_blocks, default=None),
        address=b"".join(each.address for each in facts),
        keeps_blocks=all(each.keeps_blocks for each in facts),
        wants_offloads=all(each.wants_offloads for each in facts),
    )
    return OpenConnector(RankedConnector([each.connector for each in opened]), joined)


class RankedConnector:
    """See Connector. Addresses and digests are those of all ranks, one after the other; each rank's connector takes the
    parts that concern it."""

    def __init__(self, ranks: Sequence[Connector]) -> None:
        self._ranks = ranks
        self._results: dict[int, list[TransferResult | None]] = {}  # by rank, of jobs that some have settled

    def start_load(self, transfer: BlockTransfer) -> None:
        """See Connector."""
        for connector in self._ranks:
            connector.start_load(transfer)

    def start_save(self, transfer: BlockTransfer) -> None:
        """See Connector."""
        for connector in self._ranks:
            connector.start_save(transfer)

    def start_lookup(self, transfer: BlockTransfer) -> None:
        """See Connector."""
        for connector in self._ranks:
            connector.start_lookup(transfer)

    def cancel(self, job_id: int) -> None:
        """See Connector."""
        for connector in self._ranks:
            connector.cancel(job_id)

    def poll(self) -> list[TransferResult]:
        """See Connector."""
        settled: list[TransferResult] = []
        for rank, connector in enumerate(self._ranks):
            for result in connector.poll():
                results = self._results.setdefault(result.job_id, [None] * len(self._ranks))
                results[rank] = result
                known = [each for each in results if each is not None]
                if len(known) == len(results):
                    del self._results[result.job_id]
                    settled.append(_join_results(known))
        return settled


def _join_results(results: Sequence[TransferResult]) -> TransferResult:
    return TransferResult(
        results[0].job_id,
        min(result.num_blocks_ok for result in results),
        next((result.error for result in results if result.error), ""),
        tuple(b"".join(parts) for parts in zip(*(result.digests for result in results), strict=False)),
        tuple(all(each) for each in zip(*(result.found for result in results), strict=False)),
    )

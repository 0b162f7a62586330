"""Connectors of several ranks as one."""

from __future__ import annotations

import pytest

from common.engine.executor.ranked_connector import RankedConnector, join_ranks
from common.engine.kv_connector import BlockTransfer, ConnectorFacts, Destination, OpenConnector, TransferResult
from common.types import BlockHash, RequestId

HASHES = (BlockHash(b"a"), BlockHash(b"b"), BlockHash(b"c"))
TRANSFER = BlockTransfer(1, RequestId("r"), (4, 5, 6), HASHES, 4, fence=3)


class RankConnector:
    """Notes what it is asked; its jobs settle as the test says."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, BlockTransfer | int]] = []
        self.settled: list[TransferResult] = []

    def start_load(self, transfer: BlockTransfer) -> None:
        self.asked.append(("load", transfer))

    def start_save(self, transfer: BlockTransfer) -> None:
        self.asked.append(("save", transfer))

    def start_lookup(self, transfer: BlockTransfer) -> None:
        self.asked.append(("lookup", transfer))

    def cancel(self, job_id: int) -> None:
        self.asked.append(("cancel", job_id))

    def poll(self) -> list[TransferResult]:
        settled, self.settled = self.settled, []
        return settled


def two_ranks(*facts: ConnectorFacts) -> tuple[OpenConnector, list[RankConnector]]:
    ranks = [RankConnector(), RankConnector()]
    facts = facts or (ConnectorFacts(), ConnectorFacts())
    return join_ranks([OpenConnector(*each) for each in zip(ranks, facts, strict=True)]), ranks


def joined(*results: TransferResult) -> TransferResult:
    opened, ranks = two_ranks()
    for rank, result in zip(ranks, results, strict=True):
        rank.settled.append(result)
    (found,) = opened.connector.poll()
    return found


def test_all_ranks_are_asked() -> None:
    (connector, _), ranks = two_ranks()
    connector.start_load(TRANSFER)
    connector.start_save(TRANSFER)
    connector.start_lookup(TRANSFER)
    connector.cancel(1)
    for rank in ranks:
        assert rank.asked == [("load", TRANSFER), ("save", TRANSFER), ("lookup", TRANSFER), ("cancel", 1)]


def test_a_job_settles_when_it_has_settled_on_all_ranks() -> None:
    (connector, _), (first, second) = two_ranks()
    second.settled = [TransferResult(2, 3), TransferResult(1, 3)]
    assert connector.poll() == []
    first.settled = [TransferResult(1, 3), TransferResult(3, 1)]
    assert connector.poll() == [TransferResult(1, 3)]
    first.settled, second.settled = [TransferResult(2, 3)], [TransferResult(3, 1)]
    assert sorted(result.job_id for result in connector.poll()) == [2, 3]
    assert connector.poll() == []


@pytest.mark.parametrize(
    ("first", "second", "num_ok", "error"),
    [
        ((3, ""), (3, ""), 3, ""),
        ((3, ""), (1, "block_missing"), 1, "block_missing"),
        ((0, "store_failed"), (1, "block_missing"), 0, "store_failed"),
        ((2, "block_corrupt"), (1, "block_missing"), 1, "block_corrupt"),
    ],
)
def test_the_least_holds(first: tuple[int, str], second: tuple[int, str], num_ok: int, error: str) -> None:
    result = joined(TransferResult(1, *first), TransferResult(1, *second))
    assert result == TransferResult(1, num_ok, error)


def test_a_block_is_found_where_all_ranks_have_it() -> None:
    result = joined(
        TransferResult(1, 2, found=(True, True, False, True)), TransferResult(1, 1, found=(True, False, False, True))
    )
    assert (result.num_blocks_ok, result.found) == (1, (True, False, False, True))


def direct(address: bytes) -> ConnectorFacts:
    return ConnectorFacts(is_direct=True, address=address, max_write_s=len(address), part_blocks=len(address))


def test_addresses_and_digests_are_those_of_all_ranks() -> None:
    (connector, facts), ranks = two_ranks(direct(b"first"), direct(b"second"))
    assert facts.address == b"firstsecond"
    to = Destination(b"their addresses", (7, 8, 9))
    save = BlockTransfer(1, RequestId("r"), (4, 5, 6), HASHES, 4, to)
    load = BlockTransfer(2, RequestId("r"), (7, 8), HASHES[:2], 4, digests=(b"0a1a", b"0b1b"))
    connector.start_save(save)
    connector.start_load(load)
    assert [rank.asked for rank in ranks] == [[("save", save), ("load", load)]] * 2

    ranks[0].settled = [TransferResult(1, 3, "", (b"0a", b"0b", b"0c"))]
    ranks[1].settled = [TransferResult(1, 2, "transfer", (b"1a", b"1b"))]
    (saved,) = connector.poll()
    assert saved == TransferResult(1, 2, "transfer", (b"0a1a", b"0b1b"))


def test_facts_that_hold_for_all_ranks() -> None:
    (_, facts), _ = two_ranks(direct(b"long"), direct(b"it"))
    assert (facts.is_direct, facts.max_write_s, facts.part_blocks) == (True, 4.0, 2)
    assert not facts.keeps_blocks
    (_, kept), _ = two_ranks(ConnectorFacts(keeps_blocks=True, wants_offloads=True), ConnectorFacts(keeps_blocks=True))
    assert kept == ConnectorFacts(keeps_blocks=True)


def test_one_rank_is_left_as_it_is() -> None:
    opened = OpenConnector(RankConnector(), direct(b"x"))
    assert join_ranks([opened]) is opened
    assert not isinstance(opened.connector, RankedConnector)

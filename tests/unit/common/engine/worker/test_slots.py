"""A rank's copies between its KV cache and the slots."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.contract.layout import KVLayout
from common.engine.executor.fake import MemoryConnector
from common.engine.kv_connector import NO_FENCES, BlockTransfer, Fences, TransferResult
from common.engine.worker.slots import SlotConnector, open_slots, slots_bytes, slots_shape
from common.types import BlockHash, RequestId

LAYOUT = KVLayout(4, (KVGroupSpec((0, 1), 2, 8, 8, "bfloat16"),), 2)


class Rank:
    def __init__(self, path: Path, layout: KVLayout, rank: int, fences: Fences = NO_FENCES) -> None:
        heads = layout.heads_by_rank[rank]
        self.kv_cache = torch.randn(6, 2, 2, len(heads), 4, 8).to(torch.bfloat16)
        self.connector = SlotConnector(str(path))
        self._wake = threading.Semaphore(0)
        self.connector.register_kv_cache(self.kv_cache, bytes(32), layout, self._wake.release, fences, rank)

    def save(self, block_ids: tuple[int, ...], slots: tuple[int, ...]) -> TransferResult:
        self.connector.start_save(transfer(block_ids, slots))
        return self.result()

    def load(self, block_ids: tuple[int, ...], slots: tuple[int, ...]) -> TransferResult:
        self.connector.start_load(transfer(block_ids, slots))
        return self.result()

    def result(self) -> TransferResult:
        assert self._wake.acquire(timeout=60)
        (result,) = self.connector.poll()
        return result


def transfer(block_ids: tuple[int, ...], slots: tuple[int, ...]) -> BlockTransfer:
    return BlockTransfer(-1, RequestId("r"), block_ids, (BlockHash(b"h"),) * len(block_ids), 4, slots=slots)


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "slots").touch()
    return tmp_path / "slots"


def test_ranks_put_blocks_together_and_take_them_apart(path: Path) -> None:
    first, second = (Rank(path, LAYOUT, rank) for rank in range(2))
    slots = open_slots(str(path), LAYOUT)
    for rank in (first, second):
        assert rank.save((1, 2), (3, 0)) == TransferResult(-1, 2)
    whole = torch.cat([first.kv_cache, second.kv_cache], dim=3)
    assert torch.equal(slots[[3, 0]], whole[[1, 2]])
    for rank in (first, second):
        assert rank.load((5, 4), (3, 0)) == TransferResult(-1, 2)
    assert torch.equal(torch.cat([first.kv_cache, second.kv_cache], dim=3)[[5, 4]], whole[[1, 2]])
    first.connector.close()
    second.connector.close()


def test_one_of_the_ranks_that_have_a_head_writes_it(path: Path) -> None:
    layout = KVLayout(4, LAYOUT.groups, 4)
    ranks = [Rank(path, layout, rank) for rank in range(4)]
    slots = open_slots(str(path), layout)
    for rank in ranks:
        assert rank.save((1,), (2,)) == TransferResult(-1, 1)
    assert torch.equal(slots[2], torch.cat([ranks[0].kv_cache[1], ranks[2].kv_cache[1]], dim=2))
    for rank in ranks:
        rank.load((3,), (2,))
    assert torch.equal(ranks[1].kv_cache[3], ranks[0].kv_cache[1])
    for rank in ranks:
        rank.connector.close()


def test_a_copy_that_fails_costs_one_job(path: Path) -> None:
    rank = Rank(path, LAYOUT, 0)
    assert rank.save((1, 99), (0, 1)) == TransferResult(-1, 0, "transfer")
    assert rank.save((1,), (0,)) == TransferResult(-1, 1)
    rank.connector.close()


def test_blocks_are_copied_after_the_step_that_writes_them(path: Path) -> None:
    class Step:
        over = threading.Event()

        def is_over(self, fence: int) -> bool:
            return self.over.is_set()

        def wait(self, fence: int) -> None: ...

    rank = Rank(path, LAYOUT, 0, Step())
    slots = open_slots(str(path), LAYOUT)
    rank.connector.start_save(transfer((1,), (0,)))
    rank.kv_cache[1] = 7
    assert rank.connector.poll() == []
    Step.over.set()
    assert rank.result() == TransferResult(-1, 1)
    assert (slots[0, :, :, :1] == 7).all()
    rank.connector.close()


def test_jobs_without_slots_go_to_the_direct_part(path: Path) -> None:
    direct = MemoryConnector({})
    connector = SlotConnector(str(path), direct)
    connector.register_kv_cache(torch.ones(6, 2, 2, 1, 4, 8, dtype=torch.bfloat16), bytes(32), LAYOUT, lambda: None)
    connector.start_save(transfer((1,), ()))
    assert connector.poll() == [TransferResult(-1, 1)]
    connector.start_load(transfer((2,), ()))
    assert connector.poll() == [TransferResult(-1, 1)]
    assert len(direct.store) == 1
    connector.close()


@pytest.mark.parametrize(("head_dim", "num_slots"), [(8, 64), (1 << 16, 8), (1 << 22, 4)])
def test_slots_are_few_mebibytes_or_four_blocks(head_dim: int, num_slots: int) -> None:
    layout = KVLayout(4, (KVGroupSpec((0, 1), 2, head_dim, head_dim, "bfloat16"),), 2)
    assert slots_shape(layout) == (num_slots, 2, 2, 2, 4, head_dim)
    assert slots_bytes(layout) == num_slots * 2 * 2 * 2 * 4 * head_dim * 2

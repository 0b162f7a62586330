"""Whole blocks through slots that ranks fill and empty."""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest

import common.engine.executor.staged_connector as staged_connector
from common.engine.config import EngineConfig, KVConnectorConfig, ParallelConfig
from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.contract.layout import KVLayout
from common.engine.executor.fake import MemoryConnector
from common.engine.executor.staged_connector import StagedConnector, StagedStore, stage_connector
from common.engine.kv_connector import BlockTransfer, ConnectorFacts, OpenConnector, TransferResult
from common.engine.worker.connector import create_connector
from common.engine.worker.slots import SlotConnector
from common.errors import ConfigError
from common.types import BlockHash, RequestId

NUM_SLOTS = 4  # so batches are of two
BLOCK_SIZE = 8


class Half:
    """One of the two connectors. Jobs settle as the test says; it knows what is in the slots."""

    def __init__(self) -> None:
        self.jobs: dict[int, tuple[str, BlockTransfer]] = {}
        self.cancelled: list[int] = []
        self._settled: list[TransferResult] = []

    def start_load(self, transfer: BlockTransfer) -> None:
        self.jobs[transfer.job_id] = ("load", transfer)

    def start_save(self, transfer: BlockTransfer) -> None:
        self.jobs[transfer.job_id] = ("save", transfer)

    def start_lookup(self, transfer: BlockTransfer) -> None:
        self.jobs[transfer.job_id] = ("lookup", transfer)

    def cancel(self, job_id: int) -> None:
        self.cancelled.append(job_id)

    def poll(self) -> list[TransferResult]:
        settled, self._settled = self._settled, []
        return settled

    @property
    def asked(self) -> list[tuple[str, tuple[int, ...]]]:
        """Kinds and blocks of what has not settled."""
        return [(kind, transfer.block_ids) for kind, transfer in self.jobs.values()]

    def settle(self, num_ok: int | None = None, error: str = "", *, newest: bool = False) -> None:
        job_id = [*self.jobs][-1 if newest else 0]
        _, transfer = self.jobs.pop(job_id)
        num_ok = len(transfer.block_ids) if num_ok is None else num_ok
        self._settled.append(TransferResult(job_id, num_ok, error))


class Rig:
    def __init__(self, *, is_direct: bool = False) -> None:
        self.whole, self.ranks = Half(), Half()
        self.wakeups = 0
        opened = OpenConnector(self.ranks, ConnectorFacts(is_direct=is_direct))
        self.connector = StagedConnector(self.whole, opened, NUM_SLOTS, BLOCK_SIZE, self._wake)

    def _wake(self) -> None:
        self.wakeups += 1

    def run(self) -> list[TransferResult]:
        """Lets all go well, in turn."""
        results = self.connector.poll()
        while self.whole.jobs or self.ranks.jobs:
            used = [slot for _, part in self.ranks.jobs.values() for slot in part.slots]
            used += [slot for _, part in self.whole.jobs.values() for slot in part.block_ids]
            assert len(used) == len(set(used))
            for half in (self.whole, self.ranks):
                while half.jobs:
                    half.settle()
            results += self.connector.poll()
        return results


def transfer(job_id: int, block_ids: Iterable[int], **how: object) -> BlockTransfer:
    ids = tuple(block_ids)
    keys = tuple(BlockHash(b"%d" % block_id) for block_id in ids)
    return BlockTransfer(job_id, RequestId("r"), ids, keys, **{"num_tokens_in_last": BLOCK_SIZE, **how})


def test_ranks_fill_slots_before_they_are_saved() -> None:
    rig = Rig()
    rig.connector.start_save(transfer(1, [7, 8, 9]))
    assert rig.ranks.asked == [("save", (7, 8)), ("save", (9,))]
    slots = [part.slots for _, part in rig.ranks.jobs.values()]
    assert len({*slots[0], *slots[1]}) == 3
    rig.ranks.settle()
    assert rig.connector.poll() == []
    assert rig.whole.asked == [("save", slots[0])]
    ((_, part),) = rig.whole.jobs.values()
    assert (part.block_hashes, part.slots) == ((b"7", b"8"), ())
    assert rig.run() == [TransferResult(1, 3)]


def test_slots_are_filled_before_ranks_empty_them() -> None:
    rig = Rig()
    rig.connector.start_load(transfer(1, [7, 8]))
    assert rig.ranks.asked == []
    ((_, part),) = rig.whole.jobs.values()
    assert part.block_hashes == (b"7", b"8")
    rig.whole.settle()
    assert rig.connector.poll() == []
    ((kind, copied),) = rig.ranks.jobs.values()
    assert (kind, copied.block_ids, copied.slots) == ("load", (7, 8), part.block_ids)
    assert rig.run() == [TransferResult(1, 2)]


def test_a_slot_without_an_owner_is_a_violation() -> None:
    rig = Rig()
    rig.connector.start_save(transfer(1, range(3)))
    assert rig.connector.violations() == []
    lost = rig.connector._free.pop()
    assert rig.connector.violations() == [f"slot {lost} has 0 owners"]
    rig.connector._free += [lost, 3]
    assert rig.connector.violations() == ["slot 3 has 2 owners"]
    rig.connector._free.pop()
    del rig.connector._jobs[1]
    assert rig.connector.violations() == [
        "slots [3, 2] are of job 1, which has settled",
        "slots [1] are of job 1, which has settled",
    ]


def test_a_slot_is_in_use_until_its_batch_is_over() -> None:
    rig = Rig()
    rig.connector.start_save(transfer(1, range(9)))
    rig.connector.start_save(transfer(2, [20]))
    used = {slot for _, part in rig.ranks.jobs.values() for slot in part.slots}
    assert used == set(range(NUM_SLOTS))
    rig.ranks.settle()
    assert rig.connector.poll() == []
    assert len(rig.ranks.jobs) == 1  # the slots are being saved
    rig.whole.settle()
    assert rig.connector.poll() == []
    assert rig.ranks.asked == [("save", (2, 3)), ("save", (4, 5))]
    assert rig.run() == [TransferResult(1, 9), TransferResult(2, 1)]
    assert sorted(rig.connector._free) == list(range(NUM_SLOTS))


def test_loads_go_first_and_saves_for_a_tier_last() -> None:
    rig = Rig()
    rig.connector.start_save(transfer(1, range(4)))
    rig.connector.start_save(transfer(2, range(4), is_for_tier=True))
    rig.connector.start_save(transfer(3, range(4)))
    rig.connector.start_load(transfer(4, range(4)))
    assert [result.job_id for result in rig.run()] == [1, 4, 3, 2]


def test_tokens_in_the_last_blocks() -> None:
    rig = Rig()
    rig.connector.start_load(transfer(1, range(5), num_tokens_in_last=3, num_last=2))
    counts = []
    for _ in range(3):
        ((_, part), *_) = rig.whole.jobs.values()
        counts += [part.num_tokens_in(index, BLOCK_SIZE) for index in range(len(part.block_ids))]
        rig.whole.settle()
        rig.connector.poll()
        rig.ranks.settle()
        rig.connector.poll()
    assert counts == [BLOCK_SIZE] * 3 + [3] * 2


@pytest.mark.parametrize("first", ["earlier", "later"])
def test_blocks_before_the_first_failure_count(first: str) -> None:
    rig = Rig()
    rig.connector.start_load(transfer(1, range(6)))
    for is_newest in (False, True) if first == "earlier" else (True, False):
        if is_newest:
            rig.whole.settle(1, "block_missing", newest=True)
        else:
            rig.whole.settle()
        assert rig.connector.poll() == []
    assert sorted(part.block_ids for _, part in rig.ranks.jobs.values()) == [(0, 1), (2,)]
    assert rig.run() == [TransferResult(1, 3, "block_missing")]
    assert sorted(rig.connector._free) == list(range(NUM_SLOTS))


@pytest.mark.parametrize("half", ["whole", "ranks"])
def test_nothing_after_a_failed_batch_counts(half: str) -> None:
    rig = Rig()
    rig.connector.start_load(transfer(1, range(6)))
    if half == "whole":
        rig.whole.settle(0, "store_failed")
    else:
        rig.whole.settle()
        rig.connector.poll()
        rig.ranks.settle(0, "store_failed")
    assert rig.connector.poll() == []
    assert rig.run() == [TransferResult(1, 0, "store_failed")]
    assert sorted(rig.connector._free) == list(range(NUM_SLOTS))


def test_a_cancelled_job_settles_when_nothing_touches_its_blocks() -> None:
    rig = Rig()
    rig.connector.start_load(transfer(1, range(6)))
    rig.whole.settle()
    rig.connector.poll()
    rig.connector.cancel(1)
    assert rig.connector.poll() == []
    assert set(rig.ranks.cancelled) >= set(rig.ranks.jobs)
    assert set(rig.whole.cancelled) >= set(rig.whole.jobs)
    rig.ranks.settle()
    assert rig.connector.poll() == []
    rig.whole.settle()
    assert rig.connector.poll() == [TransferResult(1, 2, "transfer_cancelled")]
    assert not rig.ranks.jobs


def test_a_job_that_waits_is_cancelled_at_once() -> None:
    rig = Rig()
    rig.connector.start_save(transfer(1, range(4)))
    rig.connector.start_save(transfer(2, [9]))
    rig.connector.cancel(2)
    rig.connector.cancel(99)
    assert rig.wakeups == 1
    assert rig.connector.poll() == [TransferResult(2, 0, "transfer_cancelled")]
    assert rig.run() == [TransferResult(1, 4)]


def test_no_blocks_is_a_transfer_too() -> None:
    rig = Rig()
    rig.connector.start_save(transfer(1, []))
    assert rig.wakeups == 1
    assert rig.connector.poll() == [TransferResult(1, 0)]


def test_a_job_does_not_wait_for_slots_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig()
    rig.connector.start_save(transfer(1, range(4)))
    monkeypatch.setattr(staged_connector, "_MAX_WAIT_S", 0.0)
    rig.connector.start_save(transfer(2, [9]))
    rig.ranks.settle(0, "store_failed")
    assert TransferResult(2, 0, "transfer_timeout") in rig.connector.poll()


def test_lookups_ask_for_whole_blocks() -> None:
    rig = Rig()
    rig.connector.start_lookup(transfer(1, []))
    rig.whole.settle(0)
    assert rig.connector.poll() == [TransferResult(1, 0)]
    assert not rig.ranks.jobs


def test_what_goes_directly_needs_no_slots() -> None:
    rig = Rig(is_direct=True)
    rig.connector.start_save(transfer(1, [3]))
    rig.connector.start_load(transfer(2, [4]))
    assert rig.ranks.asked == [("save", (3,)), ("load", (4,))]
    rig.connector.start_save(transfer(3, [5], is_for_tier=True))
    assert [part.slots != () for _, part in rig.ranks.jobs.values()] == [False, False, True]
    rig.connector.cancel(1)
    assert rig.ranks.cancelled == [1]
    assert [result.job_id for result in rig.run()] == [1, 2, 3]


def test_the_file_of_the_slots_does_not_stay() -> None:
    layout = KVLayout(4, (KVGroupSpec((0,), 2, 8, 8, "bfloat16"),), 2)
    ranks = OpenConnector(Half(), ConnectorFacts())
    store = StagedStore(MemoryConnector(is_tier=True))
    assert not os.path.exists(store.path)
    store.allocate(layout)
    assert os.stat(store.path).st_mode & 0o077 == 0
    opened = store.open(ranks, bytes(32), layout, lambda: None)
    assert (opened.facts.keeps_blocks, opened.facts.is_direct) == (True, False)
    assert not os.path.exists(store.path)
    store.close()
    never_opened = StagedStore(MemoryConnector())
    never_opened.allocate(layout)
    never_opened.close()
    never_opened.close()
    assert not os.path.exists(never_opened.path)


def test_too_little_memory_for_slots_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise OSError(28, "No space left on device")

    store = StagedStore(MemoryConnector())
    monkeypatch.setattr(os, "posix_fallocate", fail)
    with pytest.raises(ConfigError, match=r"connector: ranks need .* No space left"):
        store.allocate(KVLayout(4, (KVGroupSpec((0,), 2, 8, 8, "bfloat16"),), 2))
    store.close()


def configured(name: str, **options: str | int) -> EngineConfig:
    connector = KVConnectorConfig(factory="kv_store.registry:create_connector", name=name, options=options)
    return EngineConfig(connector=connector, parallel=ParallelConfig(tensor_parallel_size=2))


def test_ranks_use_the_slots_of_the_driver() -> None:
    store, config = stage_connector(configured("memory"))
    assert store is not None
    assert config.connector is not None
    assert config.connector.slots_path == store.path
    assert isinstance(create_connector(config.connector), SlotConnector)
    store.close()


def test_without_whole_blocks_there_are_no_slots() -> None:
    for config in (EngineConfig(), configured("nixl")):
        assert stage_connector(config) == (None, config)


def test_a_bad_option_is_the_drivers_error() -> None:
    with pytest.raises(ConfigError, match="max_bytes"):
        stage_connector(configured("memory", max_bytes=0))

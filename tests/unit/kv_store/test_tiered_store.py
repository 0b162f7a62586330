from __future__ import annotations

from collections.abc import Sequence

import pytest

from common.errors import ConfigError, StoreError, StoreUnavailableError
from common.types import BlockHash
from kv_store.base import Buffer
from kv_store.faulty_store import FaultyStore
from kv_store.host_pool import HostPool
from kv_store.memory_store import InMemoryStore, MemoryStoreOptions
from kv_store.tiered_store import TieredStore

FRAME_BYTES = 64


def key(index: int) -> BlockHash:
    return BlockHash(index.to_bytes(16, "big"))


def keys(*indices: int) -> list[BlockHash]:
    return [key(index) for index in indices]


def frames(*indices: int) -> list[memoryview]:
    return [memoryview(bytes([index]) * FRAME_BYTES) for index in indices]


class CountingStore(InMemoryStore):
    """Keeps the batches that it was asked for."""

    def __init__(self, name: str) -> None:
        super().__init__(MemoryStoreOptions(store=name))
        self.batches: list[tuple[str, tuple[BlockHash, ...]]] = []

    def touch(self, keys: Sequence[BlockHash]) -> list[bool]:
        self.batches.append(("touch", tuple(keys)))
        return super().touch(keys)

    def write(self, keys: Sequence[BlockHash], frames: Sequence[Buffer]) -> None:
        self.batches.append(("write", tuple(keys)))
        super().write(keys, frames)

    def read_into(self, keys: Sequence[BlockHash], buffers: Sequence[Buffer]) -> list[int | None]:
        self.batches.append(("read_into", tuple(keys)))
        return super().read_into(keys, buffers)


class Rig:
    """Two tiers with faults in between; the lower one is of this test alone."""

    def __init__(self, name: str, *, num_above: int = 4) -> None:
        self.upper = HostPool(num_above * FRAME_BYTES)
        self.lower = CountingStore(name)
        self.faults = FaultyStore(self.lower)
        self.tiers = TieredStore(self.upper, self.faults)
        self.tiers.open("model", FRAME_BYTES)

    def read(self, *indices: int) -> list[int | None]:
        """First bytes of the blocks."""
        buffers = [memoryview(bytearray(FRAME_BYTES)) for _ in indices]
        sizes = self.tiers.read_into(keys(*indices), buffers)
        return [None if size is None else buffer[0] for size, buffer in zip(sizes, buffers, strict=True)]

    def break_lower(self, error: Exception | None) -> None:
        for operation in ("touch", "write", "read_into"):
            self.faults.fail(operation, error)


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Rig:
    return Rig(request.node.name)


def test_a_lookup_asks_below_once_for_what_is_not_above(rig):
    rig.lower.write(keys(1, 3, 5), frames(1, 3, 5))
    rig.upper.write(keys(2), frames(2))
    rig.lower.batches.clear()
    assert rig.tiers.touch(keys(1, 2, 3, 4)) == [True, True, True, False]
    assert rig.lower.batches == [("touch", tuple(keys(1, 3, 4)))]


def test_a_lookup_of_what_is_above_does_not_ask_below(rig):
    rig.upper.write(keys(1, 2), frames(1, 2))
    assert rig.tiers.touch(keys(2, 1)) == [True, True]
    assert rig.tiers.touch([]) == []
    assert rig.read(2, 1) == [2, 1]
    assert rig.lower.batches == []


def test_what_was_read_below_is_above_afterwards(rig):
    rig.lower.write(keys(1, 3), frames(1, 3))
    rig.upper.write(keys(2), frames(2))
    rig.lower.batches.clear()
    assert rig.read(1, 2, 3, 4) == [1, 2, 3, None]
    assert rig.lower.batches == [("read_into", tuple(keys(1, 3, 4)))]
    assert rig.upper.touch(keys(1, 2, 3, 4)) == [True, True, True, False]
    assert rig.read(1, 2, 3) == [1, 2, 3]
    assert len(rig.lower.batches) == 1


@pytest.mark.parametrize("num_bytes", [0, FRAME_BYTES - 1, FRAME_BYTES + 1])
def test_a_frame_of_another_size_is_kept_above_as_far_as_it_fits(rig, num_bytes):
    rig.upper.write(keys(7, 8, 9, 10), frames(7, 8, 9, 10))  # so that places hold something
    rig.lower.write(keys(1, 2), [memoryview(bytes([5]) * num_bytes), *frames(2)])
    for _ in range(2):
        buffers = [memoryview(bytearray(FRAME_BYTES)) for _ in range(2)]
        assert rig.tiers.read_into(keys(1, 2), buffers) == [num_bytes, FRAME_BYTES]
        assert buffers[0] == bytes([5]) * min(num_bytes, FRAME_BYTES) + bytes(max(0, FRAME_BYTES - num_bytes))
    assert rig.upper.touch(keys(1, 2)) == [True, True]
    assert len([kind for kind, _ in rig.lower.batches if kind == "read_into"]) == 1


def test_a_frame_that_did_not_fit_is_not_kept_above(rig):
    rig.lower.write(keys(1), frames(1))
    assert rig.tiers.read_into(keys(1), [memoryview(bytearray(FRAME_BYTES // 2))]) == [FRAME_BYTES]
    assert rig.upper.touch(keys(1)) == [False]


@pytest.mark.parametrize("save", ["for the tier", "for a handoff"])
def test_a_save_reaches_both(rig, save):
    (rig.tiers if save == "for the tier" else rig.tiers.shared).write(keys(1, 2), frames(1, 2))
    assert rig.upper.touch(keys(1, 2)) == [True, True]
    assert rig.lower.touch(keys(1, 2)) == [True, True]


def test_for_a_handoff_only_what_is_below_is_there(rig):
    rig.upper.write(keys(1), frames(1))
    rig.lower.write(keys(2), frames(2))
    assert rig.tiers.touch(keys(1, 2)) == [True, True]
    assert rig.tiers.shared.touch(keys(1, 2)) == [False, True]


def test_a_discarded_block_is_in_neither(rig):
    rig.tiers.write(keys(1, 2), frames(1, 2))
    rig.tiers.discard(key(1))
    assert rig.tiers.touch(keys(1, 2)) == [False, True]
    assert rig.read(1, 2) == [None, 2]


def test_more_than_fits_above_stays_below(rig):
    rig.tiers.write(keys(*range(10)), frames(*range(10)))
    assert sum(rig.upper.touch(keys(*range(10)))) == 4
    assert rig.read(*range(10)) == list(range(10))
    assert sum(rig.upper.touch(keys(*range(10)))) == 4


def test_without_the_lower_tier_the_upper_one_goes_on(rig):
    rig.tiers.write(keys(1), frames(1))
    rig.lower.write(keys(2), frames(2))
    rig.break_lower(StoreError("unreachable"))
    assert rig.tiers.touch(keys(1, 2)) == [True, False]
    assert rig.read(1, 2) == [1, None]
    rig.tiers.write(keys(3), frames(3))
    assert rig.read(3) == [3]
    rig.break_lower(None)
    assert rig.read(1, 2, 3) == [1, 2, 3]


def test_a_save_for_a_handoff_fails_with_the_lower_tier(rig):
    rig.break_lower(StoreError("full"))
    with pytest.raises(StoreError, match="full"):
        rig.tiers.shared.touch(keys(1))
    with pytest.raises(StoreError, match="full"):
        rig.tiers.shared.write(keys(1), frames(1))


def test_a_full_lower_tier_can_still_be_read(rig):
    rig.lower.write(keys(1), frames(1))
    rig.faults.fail("write", StoreError("full"))
    rig.tiers.write(keys(2), frames(2))
    assert rig.tiers.touch(keys(1, 2)) == [True, True]
    assert rig.read(1, 2) == [1, 2]


@pytest.mark.parametrize(("error", "num_lines"), [(StoreError("no such type"), 3), (StoreUnavailableError("down"), 0)])
def test_a_failure_is_logged_unless_a_breaker_has_logged_it(rig, caplog, error, num_lines):
    rig.break_lower(error)
    rig.tiers.touch(keys(1))
    rig.read(1)
    rig.tiers.write(keys(1), frames(1))
    assert len(caplog.records) == num_lines


def test_a_defect_in_the_lower_tier_is_not_taken_for_a_failure(rig):
    rig.faults.fail("touch", ZeroDivisionError("a defect"))
    with pytest.raises(ZeroDivisionError):
        rig.tiers.touch(keys(1))
    rig.faults.fail("touch", None)
    assert rig.tiers.touch(keys(1)) == [False]


def test_settings_of_either_tier_are_checked_when_opened():
    with pytest.raises(ConfigError, match="host_bytes"):
        TieredStore(HostPool(10), InMemoryStore(MemoryStoreOptions())).open("model", 100)
    with pytest.raises(ConfigError, match="max_bytes"):
        TieredStore(HostPool(1000), InMemoryStore(MemoryStoreOptions(max_bytes=10))).open("model", 100)


def test_closing_twice_and_before_the_start():
    tiers = TieredStore(HostPool(1000), InMemoryStore(MemoryStoreOptions()))
    tiers.close()
    tiers.close()

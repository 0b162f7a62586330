"""What every connector that keeps blocks owes the engine: lookups, saves and loads for a tier, and who goes first."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest

from common.engine.kv_connector import Destination, TransferResult
from common.errors import ConfigError, StoreError
from common.types import BlockHash, group_key, hash_prompt, root_hash
from kv_store.base import BlockStore, Buffer, StoreConnectorOptions
from kv_store.faulty_store import FaultyStore
from kv_store.host_pool import HostPool
from kv_store.memory_store import InMemoryStore, MemoryMedium, MemoryStoreOptions
from kv_store.registry import create_connector
from kv_store.store_connector import StoreWorkerConnector
from kv_store.tiered_connector import TieredWorkerConnector
from kv_store.tiered_store import TieredStore
from tests.contract.connector_rig import BLOCK_SIZE, FINGERPRINT, WorkerRig, block_format, create_kv_cache, kv_layout

PROMPT = list(range(100, 100 + 6 * BLOCK_SIZE))
HASHES = hash_prompt(PROMPT, BLOCK_SIZE, root_hash())
FORMAT = block_format(create_kv_cache(1))


class TierRig(WorkerRig):
    """With lookups, and with saves and loads for a tier's sake."""

    def start_lookup(self, hashes: Sequence[BlockHash]) -> int:
        return self._start(self.connector.start_lookup, (), hashes, is_for_tier=True)

    def start_save(self, block_ids: Sequence[int], hashes: Sequence[BlockHash], *, is_for_tier: bool = True) -> int:
        return self._start(self.connector.start_save, block_ids, hashes, is_for_tier=is_for_tier)

    def start_load(self, block_ids: Sequence[int], hashes: Sequence[BlockHash], *, is_for_tier: bool = True) -> int:
        return self._start(self.connector.start_load, block_ids, hashes, is_for_tier=is_for_tier)

    def look_up(self, hashes: Sequence[BlockHash]) -> TransferResult:
        return self.wait(self.start_lookup(hashes))

    def save(self, block_ids: Sequence[int], hashes: Sequence[BlockHash], **how: bool) -> TransferResult:
        return self.wait(self.start_save(block_ids, hashes, **how))

    def load(self, block_ids: Sequence[int], hashes: Sequence[BlockHash], **how: bool) -> TransferResult:
        return self.wait(self.start_load(block_ids, hashes, **how))

    def start_handoff_save(self, block_ids: Sequence[int], hashes: Sequence[BlockHash], to: Destination) -> int:
        return self._start(self.connector.start_save, block_ids, hashes, destination=to)

    def start_handoff_load(
        self, block_ids: Sequence[int], hashes: Sequence[BlockHash], digests: Sequence[bytes]
    ) -> int:
        return self._start(self.connector.start_load, block_ids, hashes, digests=tuple(digests))


def ok(result: TransferResult, num_blocks: int) -> bool:
    return result.num_blocks_ok == num_blocks and result.error == ""


KEEPERS: dict[str, tuple[str, dict[str, str | int]]] = {
    "store": ("memory", {}),
    "store below host memory": ("memory", {"host_bytes": "1MiB"}),
    "nixl with host memory": ("nixl", {"host_bytes": "1MiB"}),
    "nixl with a store": ("nixl", {"store": "memory"}),
    "nixl with a store below host memory": ("nixl", {"store": "memory", "host_bytes": "1MiB"}),
}


@pytest.fixture(params=KEEPERS)
def keeper(request: pytest.FixtureRequest) -> Iterator[TierRig]:
    name, options = KEEPERS[request.param]
    own = {"store.store" if options.get("store") else "store": request.node.name} if "store" in request.param else {}
    rig = TierRig(create_connector(name, {**options, **own}))
    yield rig
    rig.connector.close()


def test_a_lookup_counts_the_leading_blocks_that_are_kept(keeper):
    assert keeper.facts.keeps_blocks
    assert ok(keeper.look_up(HASHES), 0)
    assert ok(keeper.save([1, 2, 4], [HASHES[0], HASHES[1], HASHES[3]]), 3)
    assert ok(keeper.look_up(HASHES), 2)
    assert ok(keeper.look_up(HASHES[1:2]), 1)
    assert ok(keeper.look_up(HASHES[2:]), 0)
    assert ok(keeper.look_up([]), 0)


def test_a_lookup_tells_which_blocks_of_each_group_are_kept(keeper):
    keys = [group_key(block_hash, group) for group in range(2) for block_hash in HASHES[:3]]
    assert ok(keeper.save([1, 2, 4], [keys[0], keys[4], keys[5]]), 3)
    assert keeper.look_up(keys).found == (True, False, False, False, True, True)


def test_what_a_tier_keeps_comes_back_bit_for_bit(keeper):
    kept = keeper.bits([1, 2, 3, 4, 5, 6])
    untouched = keeper.bits([0, 7, 8])
    assert ok(keeper.save([1, 2, 3, 4, 5, 6], HASHES), 6)
    keeper.kv_cache[1:7] = 0.0
    assert ok(keeper.load([6, 5, 9, 10, 11, 1], HASHES), 6)
    assert keeper.bits([6, 5, 9, 10, 11, 1]) == kept
    assert keeper.bits([0, 7, 8]) == untouched


def test_blocks_of_several_requests_are_saved_at_once(keeper):
    other = hash_prompt([7, *PROMPT[1:]], BLOCK_SIZE, root_hash())
    assert ok(keeper.save([1, 2, 3, 4], [HASHES[0], other[0], other[1], HASHES[1]]), 4)
    assert ok(keeper.look_up(HASHES), 2)
    assert ok(keeper.look_up(other), 2)


def test_a_tiers_jobs_can_be_cancelled_and_unknown_ones_are_ignored(keeper):
    keeper.connector.cancel(999)
    job = keeper.start_save([1, 2], HASHES[:2])
    keeper.connector.cancel(job)
    assert keeper.wait(job).error in ("", "transfer_cancelled")
    assert ok(keeper.save([1, 2], HASHES[:2]), 2)


def test_closing_settles_what_a_tier_has_in_flight(keeper):
    jobs = [keeper.start_save([index], [HASHES[index]]) for index in range(6)] + [keeper.start_lookup(HASHES)]
    keeper.connector.close()
    keeper.connector.close()
    keeper.collect()
    assert set(keeper.results) == set(jobs)


@pytest.mark.parametrize(
    ("name", "options", "wants_offloads"),
    [
        ("memory", {}, False),
        ("memory", {"offload": "true"}, True),
        ("memory", {"host_bytes": 1 << 20}, True),
        ("memory", {"host_bytes": "1MiB", "offload": "false"}, False),
        ("nixl", {"host_bytes": "1MiB"}, True),
        ("nixl", {"host_bytes": "1MiB", "offload": "false"}, False),
        ("nixl", {"store": "memory"}, True),
        ("nixl", {"store": "memory", "offload": "false"}, False),
    ],
)
def test_offloads_are_wanted_by_default_where_blocks_are_to_be_kept(name, options, wants_offloads):
    rig = TierRig(create_connector(name, options))
    assert rig.facts.keeps_blocks
    assert rig.facts.wants_offloads == wants_offloads
    assert rig.facts.is_direct == bool(rig.facts.address) == (name == "nixl")
    rig.connector.close()


def test_nixl_alone_keeps_nothing():
    rig = TierRig(create_connector("nixl", {}))
    assert not rig.facts.keeps_blocks
    rig.connector.close()


def test_handoffs_and_tiers_of_one_connector_do_not_meet():
    """Both kinds of jobs at once: each reaches the one it is meant for, and all results come out of one poll."""
    producer = TierRig(create_connector("nixl", {"host_bytes": "1MiB"}))
    consumer = TierRig(create_connector("nixl", {"host_bytes": "1MiB"}), create_kv_cache(seed=2))
    to_peer = producer.start_handoff_save([1, 2], HASHES[:2], Destination(consumer.facts.address, (7, 8)))
    kept = producer.start_save([3, 4], HASHES[2:4])
    assert ok(producer.wait(kept), 2)
    sent = producer.wait(to_peer)
    assert ok(sent, 2)
    assert consumer.bits([7, 8]) == producer.bits([1, 2])
    arrived = consumer.start_handoff_load([7, 8], HASHES[:2], sent.digests)
    assert ok(consumer.wait(arrived), 2)
    assert ok(producer.look_up(HASHES[:2]), 0)
    assert ok(producer.look_up(HASHES[2:]), 2)
    assert ok(consumer.look_up(HASHES[2:]), 0)
    for rig in (producer, consumer):
        rig.connector.close()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"host_bytes": 100}, "host_bytes: 100 bytes cannot hold a block of"),
        ({"host_bytes": "1MiB", "store": "memory", "store.max_bytes": 100}, "store.max_bytes: 100 bytes cannot hold"),
        ({"store": "redis", "store.url": "http://127.0.0.1"}, "store.url: number 1 is not redis://"),
    ],
)
def test_a_tier_that_cannot_be_opened_is_named(options, says):
    connector = create_connector("nixl", options)
    kv_cache = create_kv_cache()
    with pytest.raises(ConfigError) as caught:
        connector.register_kv_cache(kv_cache, FINGERPRINT, kv_layout(kv_cache), lambda: None)
    assert caught.value.message.startswith(says)
    assert caught.value.param == says.partition(":")[0]
    connector.close()


class Tiers:
    """Host memory over a faulty store, and what a test does to both."""

    def __init__(self, name: str, *, num_above: int = 100, **options: float) -> None:
        self.medium = MemoryMedium.named(name)
        self.name = name
        self.upper = HostPool(num_above * FORMAT.frame_bytes)
        self.lower = FaultyStore(InMemoryStore(MemoryStoreOptions(store=name)))
        self.store = TieredStore(self.upper, self.lower)
        self.rig = TierRig(
            StoreWorkerConnector(
                self.store, StoreConnectorOptions(**{"threads": 1, **options}), for_handoffs=self.store.shared
            )
        )

    def break_lower(self) -> None:
        for operation in ("touch", "write", "read_into"):
            self.lower.fail(operation, StoreError("unreachable"))

    def peer(self) -> TierRig:
        """Another pod on the same store."""
        return TierRig(create_connector("memory", {"store": self.name}), create_kv_cache(seed=2))


@pytest.fixture
def tiers(request: pytest.FixtureRequest) -> Iterator[Callable[..., Tiers]]:
    made: list[Tiers] = []

    def make(**options: float) -> Tiers:
        made.append(Tiers(f"{request.node.name}-{len(made)}", **options))
        return made[-1]

    yield make
    for each in made:
        each.rig.connector.close()
        assert each.upper.check_integrity() == []


def test_without_the_store_blocks_are_kept_on_the_host_and_handoffs_fail(tiers):
    own = tiers()
    own.break_lower()
    assert ok(own.rig.save([1, 2], HASHES[:2]), 2)
    assert ok(own.rig.look_up(HASHES), 2)
    kept = own.rig.bits([1, 2])
    assert ok(own.rig.load([7, 8], HASHES[:2]), 2)
    assert own.rig.bits([7, 8]) == kept
    assert own.rig.save([1, 2], HASHES[:2], is_for_tier=False).error == "store_failed"
    missing = own.rig.load([9, 10], HASHES[1:3])
    assert (missing.num_blocks_ok, missing.error) == (1, "block_missing")


def test_a_save_for_a_handoff_fails_with_the_store_of_a_connector_as_it_is_set_up(request, monkeypatch):
    """Unlike one for the tier, which the host then has."""

    def fail(*_: object) -> None:
        raise StoreError("full")

    rig = TierRig(create_connector("memory", {"store": request.node.name, "host_bytes": "1MiB"}))
    monkeypatch.setattr(InMemoryStore, "write", fail)
    assert ok(rig.save([1], HASHES[:1]), 1)
    assert rig.save([2], HASHES[1:2], is_for_tier=False).error == "store_failed"
    rig.connector.close()


def test_a_handoff_reaches_the_store_though_the_host_has_the_blocks(tiers):
    own = tiers()
    own.lower.fail("write", StoreError("full"))
    assert ok(own.rig.save([1, 2], HASHES[:2]), 2)
    assert own.medium.frames == {}
    own.lower.fail("write", None)
    assert ok(own.rig.save([1, 2], HASHES[:2], is_for_tier=False), 2)
    peer = own.peer()
    assert ok(peer.load([5, 6], HASHES[:2], is_for_tier=False), 2)
    assert peer.bits([5, 6]) == own.rig.bits([1, 2])
    peer.connector.close()


def test_what_another_pod_saved_is_found_and_kept_on_the_host(tiers):
    own = tiers()
    peer = own.peer()
    assert ok(peer.save([1, 2, 3], HASHES[:3], is_for_tier=False), 3)
    assert ok(own.rig.look_up(HASHES), 3)
    assert ok(own.rig.load([1, 2, 3], HASHES[:3]), 3)
    own.break_lower()
    assert ok(own.rig.look_up(HASHES), 3)
    assert ok(own.rig.load([4, 5, 6], HASHES[:3]), 3)
    assert own.rig.bits([1, 2, 3]) == own.rig.bits([4, 5, 6]) == peer.bits([1, 2, 3])
    peer.connector.close()


@pytest.mark.parametrize("position", [0, 50, 127, 128, FORMAT.frame_bytes - 1])
def test_a_corrupt_block_of_the_store_is_never_kept(tiers, position):
    own = tiers()
    assert ok(own.rig.save([1, 2], HASHES[:2]), 2)
    for key, frame in list(own.medium.frames.items()):
        spoilt = frame[:position] + bytes([frame[position] ^ 1]) + frame[position + 1 :]
        own.medium.put(key, spoilt, max_bytes=1 << 30)
    reader = Tiers(own.name)
    before = reader.rig.bits([1, 2])
    assert reader.rig.load([1, 2], HASHES[:2]).error == "block_corrupt"
    assert ok(reader.rig.look_up(HASHES[:1]), 0)  # neither above nor below
    assert reader.rig.load([1, 2], HASHES[:2]).error == "block_missing"
    assert reader.rig.load([1], HASHES[1:2]).error == "block_corrupt"  # it came above with the first, unverified
    assert reader.rig.bits([1, 2]) == before
    assert ok(own.rig.save([1, 2], HASHES[:2], is_for_tier=False), 2)
    assert ok(reader.rig.load([1, 2], HASHES[:2]), 2)
    assert reader.rig.bits([1, 2]) == own.rig.bits([1, 2])
    reader.rig.connector.close()


def test_a_bit_that_flips_in_host_memory_is_noticed(tiers):
    own = tiers()
    assert ok(own.rig.save([1], HASHES[:1]), 1)
    frame = bytearray(FORMAT.frame_bytes)
    own.upper.read_into(HASHES[:1], [memoryview(frame)])
    own.upper.discard(HASHES[0])
    frame[-1] ^= 1
    own.upper.write(HASHES[:1], [memoryview(frame)])
    before = own.rig.bits([5])
    assert own.rig.load([5], HASHES[:1]).error == "block_corrupt"
    assert own.rig.bits([5]) == before
    assert ok(own.rig.look_up(HASHES[:1]), 0)


def test_many_transfers_through_a_small_host_pool(tiers):
    """More than fits, by several threads at once: nothing but what was saved ever comes back."""
    own = tiers(num_above=3, threads=4, staging_bytes=2 * FORMAT.frame_bytes)
    prompts = [hash_prompt([index, *PROMPT[1:]], BLOCK_SIZE, root_hash()) for index in range(8)]
    kept = own.rig.bits([1, 2, 3, 4, 5, 6])
    saves = [own.rig.start_save([1, 2, 3, 4, 5, 6], hashes) for hashes in prompts for _ in range(2)]
    assert all(ok(own.rig.wait(job), 6) for job in saves)
    for hashes in prompts:
        loads = [own.rig.start_load([index], [key]) for index, key in enumerate(hashes, 6)]
        assert all(ok(own.rig.wait(job), 1) for job in loads)
        assert own.rig.bits(range(6, 12)) == kept


class Recorder:
    """A store that keeps nothing and notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, BlockHash]] = []

    def open(self, namespace: str, frame_bytes: int) -> None: ...

    def touch(self, keys: Sequence[BlockHash]) -> list[bool]:
        self.asked.append(("touch", keys[0]))
        return [False] * len(keys)

    def write(self, keys: Sequence[BlockHash], frames: Sequence[Buffer]) -> None: ...

    def read_into(self, keys: Sequence[BlockHash], buffers: Sequence[Buffer]) -> list[int | None]:
        self.asked.append(("read_into", keys[0]))
        return [None] * len(keys)

    def discard(self, key: BlockHash) -> None: ...

    def close(self) -> None: ...


def connector_over(store: BlockStore, **options: float) -> StoreWorkerConnector:
    """One thread that moves one block at a time."""
    one_block = {"threads": 1, "staging_bytes": FORMAT.frame_bytes}
    return StoreWorkerConnector(store, StoreConnectorOptions(**{**one_block, **options}))


def test_who_is_waited_for_goes_first():
    """A burst of saves for the tier is under way; what comes then is done before the rest of it, by urgency."""
    recorder = Recorder()
    store = FaultyStore(recorder)
    rig = TierRig(connector_over(store))
    with store.gate("touch") as gate:
        rig.start_save([1, 2], HASHES[:2])
        last = rig.start_save([3], HASHES[2:3])
        gate.wait_for_arrival()
        rig.start_save([4], HASHES[3:4], is_for_tier=False)
        rig.start_load([5], HASHES[4:5])
        rig.start_lookup(HASHES[5:])
    rig.wait(last)
    assert recorder.asked == [
        ("touch", HASHES[0]),
        ("touch", HASHES[5]),
        ("read_into", HASHES[4]),
        ("touch", HASHES[3]),
        ("touch", HASHES[1]),
        ("touch", HASHES[2]),
    ]
    rig.connector.close()


def test_a_tiers_job_is_cancelled_beside_a_direct_connector():
    store = FaultyStore(Recorder())
    rig = TierRig(TieredWorkerConnector(create_connector("nixl", {}), connector_over(store)))
    with store.gate("touch") as gate:
        job = rig.start_save([1], HASHES[:1])
        gate.wait_for_arrival()
        rig.connector.cancel(job)
        assert rig.wait(job).error == "transfer_cancelled"
    rig.connector.close()


def test_a_lookup_ends_at_its_own_deadline():
    store = FaultyStore(Recorder())
    rig = TierRig(connector_over(store, lookup_timeout_s=0.05))
    with store.gate("touch") as gate:
        saving = rig.start_save([1], HASHES[:1])  # whose deadline is a later one, and which was there before
        gate.wait_for_arrival()
        lookup = rig.look_up(HASHES)
        assert (lookup.num_blocks_ok, lookup.error) == (0, "transfer_timeout")
        assert saving not in rig.results
    assert ok(rig.wait(saving), 1)
    rig.connector.close()


def test_a_lookup_that_fails_finds_nothing():
    store = FaultyStore(Recorder())
    rig = TierRig(connector_over(store))
    store.fail("touch", StoreError("unreachable"))
    lookup = rig.look_up(HASHES)
    assert (lookup.num_blocks_ok, lookup.error) == (0, "store_failed")
    rig.connector.close()

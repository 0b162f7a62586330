"""What every connector owes the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from common.engine.kv_connector import BlockTransfer, TransferResult
from common.errors import StoreError
from common.types import RequestId, group_key, hash_partial_block, hash_prompt, root_hash
from kv_store.registry import STORE_CONNECTOR_NAMES
from tests.contract.connector_rig import (
    BLOCK_SIZE,
    DEADLINE_S,
    FINGERPRINT,
    EngineRig,
    Medium,
    MemoryMediumRig,
    RedisRig,
    SharedStorageRig,
    block_format,
    create_kv_cache,
    gated_connector,
    kv_layout,
)
from tests.contract.ranked_rig import RankedMedium
from tests.contract.tiered_rig import TieredRig
from tests.redis_server import RedisServer, running_redis

PROMPT = list(range(100, 100 + 6 * BLOCK_SIZE))
HASHES = hash_prompt(PROMPT, BLOCK_SIZE, root_hash())
OTHER_FINGERPRINT = bytes(reversed(range(32)))


BELOW_HOST_MEMORY = " below host memory"
OF_TWO_RANKS = " of two ranks"


@pytest.fixture(params=[name + how for how in ("", BELOW_HOST_MEMORY, OF_TWO_RANKS) for name in STORE_CONNECTOR_NAMES])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Medium:
    name = request.param.removesuffix(BELOW_HOST_MEMORY).removesuffix(OF_TWO_RANKS)
    lower = plain_medium(name, request, tmp_path)
    if request.param.endswith(OF_TWO_RANKS):
        return RankedMedium(lower, 2)
    return TieredRig(lower) if name != request.param else lower


def plain_medium(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> Medium:
    namespace = block_format(create_kv_cache()).namespace
    match name:
        case "memory":
            return MemoryMediumRig(namespace)
        case "redis":
            return RedisRig(namespace, request.getfixturevalue("redis_server"))
        case "shared-storage":
            return SharedStorageRig(namespace, tmp_path / "kv")
        case unknown:
            raise ValueError(f"no rig for connector {unknown}")


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture
def engine(medium: Medium) -> Iterator[Callable[..., EngineRig]]:
    """Makes engines on the medium and closes them."""
    rigs = []

    def make(kv_cache: torch.Tensor | None = None, *, fingerprint: bytes = FINGERPRINT) -> EngineRig:
        rigs.append(EngineRig(medium.connector(), kv_cache, fingerprint=fingerprint))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def bits(kv_cache: torch.Tensor, block_ids: list[int]) -> list[bytes]:
    return [kv_cache[block_id].flatten().view(torch.uint8).numpy().tobytes() for block_id in block_ids]


def ok(result: TransferResult, num_blocks: int) -> bool:
    return result.num_blocks_ok == num_blocks and result.error == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip_is_bit_exact(engine, dtype):
    producer = engine(create_kv_cache(dtype=dtype, seed=1))
    consumer = engine(create_kv_cache(dtype=dtype, seed=2))
    untouched = bits(consumer.kv_cache, [0, 1, 2, 3, 10, 11])

    assert ok(producer.save([1, 2, 3, 4, 5, 6], HASHES), 6)
    assert ok(consumer.load([9, 4, 8, 5, 7, 6], HASHES), 6)

    assert bits(consumer.kv_cache, [9, 4, 8, 5, 7, 6]) == bits(producer.kv_cache, [1, 2, 3, 4, 5, 6])
    assert bits(consumer.kv_cache, [0, 1, 2, 3, 10, 11]) == untouched


def test_partial_last_block(engine, medium):
    prompt = PROMPT[: 2 * BLOCK_SIZE + 3]
    hashes = [*HASHES[:2], hash_partial_block(prompt, BLOCK_SIZE, HASHES[:2], root_hash())]
    producer, consumer = engine(create_kv_cache(seed=1)), engine(create_kv_cache(seed=2))

    assert ok(producer.save([1, 2, 3], hashes, num_in_last=3), 3)
    assert ok(consumer.load([4, 5, 6], hashes, num_in_last=3), 3)

    assert bits(consumer.kv_cache, [4, 5, 6]) == bits(producer.kv_cache, [1, 2, 3])
    wrong_length = consumer.load([7], hashes[2:], num_in_last=2)
    assert wrong_length == TransferResult(wrong_length.job_id, 0, "block_corrupt")


def test_blocks_of_several_groups_are_kept_apart(engine, medium):
    """Two spans of two groups each, of which the second span is partial in both."""
    prompt = PROMPT[: BLOCK_SIZE + 3]
    hashes = [HASHES[0], hash_partial_block(prompt, BLOCK_SIZE, HASHES[:1], root_hash())]
    keys = [group_key(block_hash, group) for block_hash in hashes for group in range(2)]
    producer, consumer = engine(create_kv_cache(seed=1)), engine(create_kv_cache(seed=2))

    assert ok(producer.save([1, 2, 3, 4], keys, num_in_last=3, num_last=2), 4)
    assert set(medium.frames()) == set(keys)
    assert ok(consumer.load([9, 8, 7, 6], keys, num_in_last=3, num_last=2), 4)

    assert bits(consumer.kv_cache, [9, 8, 7, 6]) == bits(producer.kv_cache, [1, 2, 3, 4])
    assert ok(consumer.load([5], keys[1:2]), 1)
    assert bits(consumer.kv_cache, [5]) == bits(producer.kv_cache, [2])


def test_another_groups_block_is_refused(engine, medium):
    producer, consumer = engine(create_kv_cache(seed=1)), engine(create_kv_cache(seed=2))
    key, other = HASHES[0], group_key(HASHES[0], 1)
    producer.save([1], [key])
    medium.put(other, medium.frames()[key])
    assert consumer.load([1], [other]).error == "block_corrupt"


def test_only_lacking_blocks_need_to_be_loaded(engine):
    producer, consumer = engine(create_kv_cache(seed=1)), engine(create_kv_cache(seed=2))
    producer.save([1, 2, 3, 4, 5, 6], HASHES)
    before = bits(consumer.kv_cache, [1, 2, 3, 4])

    assert ok(consumer.load([5, 6], HASHES[4:]), 2)

    assert bits(consumer.kv_cache, [1, 2, 3, 4, 5, 6]) == before + bits(producer.kv_cache, [5, 6])


def test_saving_again_is_harmless(engine, medium):
    producer = engine()
    producer.save([1, 2], HASHES[:2])
    before = medium.frames()
    producer.kv_cache[3] = 7.0

    assert ok(producer.save([3, 4], HASHES[:2]), 2)

    assert medium.frames() == before


def test_no_blocks_is_a_transfer_too(engine):
    assert ok(engine().load([], []), 0)


def test_many_transfers_at_once(engine):
    producer, consumer = engine(create_kv_cache(200, seed=1)), engine(create_kv_cache(200, seed=2))
    prompts = [[index, *PROMPT[1:]] for index in range(33)]
    hashes = [hash_prompt(prompt, BLOCK_SIZE, root_hash()) for prompt in prompts]
    blocks = [list(range(1 + 6 * index, 7 + 6 * index)) for index in range(33)]

    saves = [producer.start_save(ids, keys) for ids, keys in zip(blocks, hashes, strict=True)]
    assert all(ok(producer.wait(job), 6) for job in saves)
    loads = [consumer.start_load(ids, keys) for ids, keys in zip(reversed(blocks), hashes, strict=True)]
    assert all(ok(consumer.wait(job), 6) for job in loads)

    for target, source in zip(reversed(blocks), blocks, strict=True):
        assert bits(consumer.kv_cache, target) == bits(producer.kv_cache, source)


def test_two_engines_save_the_same_blocks_at_once(engine):
    cache = create_kv_cache(seed=1)
    producers = [engine(cache), engine(cache)]
    jobs = [(producer, producer.start_save([1, 2, 3, 4, 5, 6], HASHES)) for producer in producers for _ in range(4)]
    assert all(ok(producer.wait(job), 6) for producer, job in jobs)
    consumer = engine(create_kv_cache(seed=2))
    assert ok(consumer.load([1, 2, 3, 4, 5, 6], HASHES), 6)
    assert bits(consumer.kv_cache, [1, 6]) == bits(cache, [1, 6])


def test_missing_block_ends_a_load_with_what_came_before_it(engine, medium):
    producer, consumer = engine(create_kv_cache(seed=1)), engine(create_kv_cache(seed=2))
    producer.save([1, 2, 3, 4], HASHES[:4])
    medium.remove(HASHES[2])
    before = bits(consumer.kv_cache, [3, 4])

    result = consumer.load([1, 2, 3, 4], HASHES[:4])

    assert result == TransferResult(result.job_id, 2, "block_missing")
    assert bits(consumer.kv_cache, [1, 2]) == bits(producer.kv_cache, [1, 2])
    assert bits(consumer.kv_cache, [3, 4]) == before


def test_a_medium_that_comes_back_empty_is_filled_again(engine, medium):
    producer, consumer = engine(create_kv_cache(seed=1)), engine(create_kv_cache(seed=2))
    producer.save([1, 2], HASHES[:2])
    medium.clear()
    lost = consumer.load([1, 2], HASHES[:2])
    assert lost == TransferResult(lost.job_id, 0, "block_missing")
    assert ok(producer.save([1, 2], HASHES[:2]), 2)
    assert ok(consumer.load([1, 2], HASHES[:2]), 2)
    assert bits(consumer.kv_cache, [1, 2]) == bits(producer.kv_cache, [1, 2])


TAMPERINGS: dict[str, Callable[[bytes, bytes], bytes]] = {
    "empty": lambda frame, other: b"",
    "header only": lambda frame, other: frame[:128],
    "cut within header": lambda frame, other: frame[:50],
    "one byte short": lambda frame, other: frame[:-1],
    "one byte more": lambda frame, other: frame + b"\0",
    "first payload bit": lambda frame, other: frame[:128] + bytes([frame[128] ^ 1]) + frame[129:],
    "last payload bit": lambda frame, other: frame[:-1] + bytes([frame[-1] ^ 128]),
    "magic bit": lambda frame, other: bytes([frame[0] ^ 1]) + frame[1:],
    "another key's frame": lambda frame, other: other,
    "another key's payload": lambda frame, other: frame[:128] + other[128:],
    "another key's header": lambda frame, other: other[:128] + frame[128:],
    "zeros": lambda frame, other: bytes(len(frame)),
}


@pytest.mark.parametrize("tampering", TAMPERINGS)
def test_corrupt_block_is_noticed_left_out_and_replaced(engine, medium, tampering):
    producer, consumer = engine(create_kv_cache(seed=1)), engine(create_kv_cache(seed=2))
    producer.save([1, 2, 3], HASHES[:3])
    frames = medium.frames()
    medium.put(HASHES[1], TAMPERINGS[tampering](frames[HASHES[1]], frames[HASHES[2]]))
    before = bits(consumer.kv_cache, [2, 3])

    result = consumer.load([1, 2, 3], HASHES[:3])

    assert result == TransferResult(result.job_id, 1, "block_corrupt")
    assert bits(consumer.kv_cache, [2, 3]) == before
    assert ok(producer.save([1, 2, 3], HASHES[:3]), 3)
    assert medium.frames() == frames
    assert ok(consumer.load([1, 2, 3], HASHES[:3]), 3)


def test_two_models_do_not_meet(engine, medium):
    mine = engine(create_kv_cache(seed=1))
    theirs = engine(create_kv_cache(seed=2), fingerprint=OTHER_FINGERPRINT)
    mine.save([1], HASHES[:1])
    assert theirs.load([1], HASHES[:1]).error == "block_missing"
    theirs.save([1], HASHES[:1])
    reader = engine(create_kv_cache(seed=3))
    assert ok(reader.load([1], HASHES[:1]), 1)
    assert bits(reader.kv_cache, [1]) == bits(mine.kv_cache, [1])


def test_a_frame_of_another_model_is_corrupt(engine, medium):
    engine(fingerprint=OTHER_FINGERPRINT).save([1], HASHES[:1])
    medium.put(HASHES[0], medium.frames()[HASHES[0]])
    assert engine().load([1], HASHES[:1]).error == "block_corrupt"


def test_frames_of_other_dtypes_and_layouts_are_kept_apart(engine):
    """Pods of each layout find their own blocks, and overwrite no others."""
    others = [
        engine(create_kv_cache(dtype=torch.float16)),
        engine(torch.zeros(4, 3, 2, 4, BLOCK_SIZE, 4)),  # as many bytes, twice the heads
    ]
    mine = engine(create_kv_cache(seed=1))
    for each in others:
        each.save([1], HASHES[:1])
        assert mine.load([2], HASHES[:1]).error == "block_missing"
    mine.save([1], HASHES[:1])
    reader = engine(create_kv_cache(seed=2))
    assert ok(reader.load([2], HASHES[:1]), 1)
    assert bits(reader.kv_cache, [2]) == bits(mine.kv_cache, [1])
    for each in others:
        assert ok(each.load([2], HASHES[:1]), 1)


def test_tenants_with_different_salts_do_not_share(engine):
    engine().save([1], hash_prompt(PROMPT, BLOCK_SIZE, root_hash("tenant a"))[:1])
    assert engine().load([1], hash_prompt(PROMPT, BLOCK_SIZE, root_hash("tenant b"))[:1]).error == "block_missing"
    assert engine().load([1], HASHES[:1]).error == "block_missing"


@pytest.mark.parametrize("operation", ["touch", "write"])
def test_failing_medium_fails_a_save(medium, operation):
    connector, store = gated_connector(medium)
    rig = EngineRig(connector)
    store.fail(operation, StoreError("no space left"))
    result = rig.save([1, 2], HASHES[:2])
    assert result == TransferResult(result.job_id, 0, "store_failed")
    store.fail(operation, None)
    assert ok(rig.save([1, 2], HASHES[:2]), 2)
    rig.close()


def test_failing_medium_fails_a_load(medium):
    connector, store = gated_connector(medium)
    rig = EngineRig(connector)
    rig.save([1, 2], HASHES[:2])
    store.fail("read_into", StoreError("unreachable"))
    assert rig.load([3, 4], HASHES[:2]).error == "store_failed"
    rig.close()


def test_a_defect_in_a_store_costs_one_transfer(medium):
    connector, store = gated_connector(medium)
    rig = EngineRig(connector)
    store.fail("touch", ZeroDivisionError("a defect"))
    assert rig.save([1], HASHES[:1]).error == "transfer"
    store.fail("touch", None)
    assert ok(rig.save([1], HASHES[:1]), 1)
    rig.close()


def test_cancelled_load_settles_while_the_medium_stalls_and_writes_nothing_later(medium):
    connector, store = gated_connector(medium)
    rig = EngineRig(connector)
    rig.save([1, 2], HASHES[:2])
    before = bits(rig.kv_cache, [5, 6, 7, 8])
    with store.gate("read_into") as gate:
        running = rig.start_load([5, 6], HASHES[:2])
        waiting = rig.start_load([7, 8], HASHES[:2])
        gate.wait_for_arrival()
        connector.cancel(running)
        connector.cancel(waiting)
        assert rig.wait(running) == TransferResult(running, 0, "transfer_cancelled")
        assert rig.wait(waiting) == TransferResult(waiting, 0, "transfer_cancelled")
    assert ok(rig.load([9], HASHES[:1]), 1)  # the thread is back from the stalled read
    assert bits(rig.kv_cache, [5, 6, 7, 8]) == before
    rig.close()


@pytest.mark.parametrize("operation", ["touch", "write"])
def test_cancelled_save_settles_while_the_medium_stalls_and_reads_no_block_afterwards(medium, operation):
    connector, store = gated_connector(medium)
    rig = EngineRig(connector)
    with store.gate(operation) as gate:
        running = rig.start_save([1, 2], HASHES[:2])
        waiting = rig.start_save([3], HASHES[2:3])
        gate.wait_for_arrival()
        connector.cancel(running)
        connector.cancel(waiting)
        assert rig.wait(running) == TransferResult(running, 0, "transfer_cancelled")
        assert rig.wait(waiting) == TransferResult(waiting, 0, "transfer_cancelled")
        rig.kv_cache[1:4] = 7.0  # somebody else's now
    assert ok(rig.save([4], HASHES[3:4]), 1)  # the thread is back from the stalled operation
    stalled_write = HASHES[:2] if operation == "write" else []
    assert set(medium.frames()) == {*stalled_write, HASHES[3]}
    if stalled_write:  # it was of the old content
        assert ok(rig.load([1, 2], stalled_write), 2)
        assert bits(rig.kv_cache, [1, 2]) == bits(create_kv_cache(), [1, 2])
    rig.close()


def test_cancelling_between_batches_keeps_the_leading_blocks(medium):
    connector, store = gated_connector(medium, frames=1)
    rig = EngineRig(connector)
    rig.save([1, 2, 3], HASHES[:3])
    with store.gate("read_into") as gate:
        job = rig.start_load([5, 6, 7], HASHES[:3])
        gate.wait_for_arrival()
        gate.let_one_through()
        gate.wait_for_arrival()
        connector.cancel(job)
        assert rig.wait(job) == TransferResult(job, 1, "transfer_cancelled")
        next_job = rig.start_load([8], HASHES[:1])
        for _ in range(2):  # the rest of the stalled read, and then nothing but the next job's
            gate.let_one_through()
        assert ok(rig.wait(next_job), 1)
    assert bits(rig.kv_cache, [5]) == bits(rig.kv_cache, [1])
    rig.close()


def test_several_threads_move_one_transfer(medium):
    connector, store = gated_connector(medium, threads=3, frames=1)
    rig = EngineRig(connector)
    with store.gate("write") as gate:
        save = rig.start_save([1, 2, 3], HASHES[:3])
        for _ in range(3):
            gate.wait_for_arrival()
    assert ok(rig.wait(save), 3)
    with store.gate("read_into") as gate:
        load = rig.start_load([4, 5, 6], HASHES[:3])
        for _ in range(3):
            gate.wait_for_arrival()
    assert ok(rig.wait(load), 3)
    assert bits(rig.kv_cache, [4, 5, 6]) == bits(rig.kv_cache, [1, 2, 3])
    rig.close()


@pytest.mark.parametrize("missing", range(6))
def test_a_batch_that_fails_waits_for_those_before_it(medium, missing):
    connector, _ = gated_connector(medium, threads=4, frames=1)
    rig = EngineRig(connector)
    rig.save([0, 1, 2, 3, 4, 5], HASHES)
    medium.remove(HASHES[missing])
    for _ in range(20):  # the threads come in any order
        result = rig.load([6, 7, 8, 9, 10, 11], HASHES)
        assert result == TransferResult(result.job_id, missing, "block_missing")
    assert bits(rig.kv_cache, list(range(6, 6 + missing))) == bits(rig.kv_cache, list(range(missing)))
    rig.close()


@pytest.mark.parametrize("frames", [1, 2, 4, 100])
@pytest.mark.parametrize("missing", range(6))
def test_batches_of_any_size_end_at_the_block_that_is_missing(medium, frames, missing):
    connector, _ = gated_connector(medium, frames=frames)
    rig = EngineRig(connector)
    rig.save([0, 1, 2, 3, 4, 5], HASHES)
    medium.remove(HASHES[missing])
    kept = bits(rig.kv_cache, list(range(6 + missing, 12)))

    result = rig.load([6, 7, 8, 9, 10, 11], HASHES)

    assert result == TransferResult(result.job_id, missing, "block_missing")
    assert bits(rig.kv_cache, list(range(6, 6 + missing))) == bits(rig.kv_cache, list(range(missing)))
    assert bits(rig.kv_cache, list(range(6 + missing, 12))) == kept
    assert ok(rig.save([0, 1, 2, 3, 4, 5], HASHES), 6)
    assert ok(rig.load([6, 7, 8, 9, 10, 11], HASHES), 6)
    rig.close()


def test_of_a_save_that_fails_the_leading_blocks_that_were_there_count(medium):
    connector, store = gated_connector(medium)
    rig = EngineRig(connector)
    rig.save([1, 2, 4], [*HASHES[:2], HASHES[3]])
    store.fail("write", StoreError("full"))
    result = rig.save([1, 2, 3, 4], HASHES[:4])
    assert result == TransferResult(result.job_id, 2, "store_failed")
    rig.close()


def test_a_save_writes_only_what_is_not_there(medium):
    connector, _ = gated_connector(medium)
    rig = EngineRig(connector)
    rig.save([1, 3], [HASHES[0], HASHES[2]])
    before = medium.frames()
    rig.kv_cache[1] = rig.kv_cache[3] = 7.0
    assert ok(rig.save([1, 2, 3, 4], HASHES[:4]), 4)
    after = medium.frames()
    assert set(after) == set(HASHES[:4])
    assert {key: after[key] for key in before} == before
    assert ok(rig.load([9, 10], [HASHES[1], HASHES[3]]), 2)
    assert bits(rig.kv_cache, [9, 10]) == bits(rig.kv_cache, [2, 4])
    rig.close()


def test_a_stores_batches(medium):
    store = medium.store()
    store.open("model", 100)
    frames = [memoryview(bytes([index]) * 100) for index in range(4)]
    store.write([], [])
    assert store.touch([]) == []
    assert store.read_into([], []) == []
    store.write([HASHES[3], HASHES[0]], [frames[3], frames[0]])
    assert store.touch(HASHES[:4]) == [True, False, False, True]
    buffers = [memoryview(bytearray(100)), memoryview(bytearray(100)), memoryview(bytearray(50))]
    assert store.read_into([HASHES[0], HASHES[1], HASHES[3]], buffers) == [100, None, 100]
    assert [bytes(buffer) for buffer in buffers] == [bytes(100), bytes(100), b"\3" * 50]
    store.discard(HASHES[0])
    assert store.touch(HASHES[:4]) == [False, False, False, True]
    store.close()


def test_cancelling_what_is_over_or_unknown_does_nothing(engine):
    rig = engine()
    rig.save([1], HASHES[:1])
    rig.connector.cancel(1)
    rig.connector.cancel(999)
    rig.collect()
    assert list(rig.results) == [1]


@pytest.mark.parametrize("operation", ["touch", "write"])
def test_stalled_save_settles_at_its_deadline(medium, operation):
    connector, store = gated_connector(medium, timeout_s=0.05)
    rig = EngineRig(connector)
    with store.gate(operation):
        running = rig.start_save([1], HASHES[:1])
        waiting = rig.start_save([2], HASHES[1:2])
        assert rig.wait(running) == TransferResult(running, 0, "transfer_timeout")
        assert rig.wait(waiting) == TransferResult(waiting, 0, "transfer_timeout")
        rig.kv_cache[1] = 7.0  # settled, so the block is somebody else's now
    rig.close()
    reader = EngineRig(medium.connector())
    if HASHES[0] in medium.frames():  # the write that stalled went through in the end, and was of the old content
        assert ok(reader.load([1], HASHES[:1]), 1)
        assert bits(reader.kv_cache, [1]) == bits(create_kv_cache(), [1])
    reader.close()


def test_stalled_load_settles_at_its_deadline_and_writes_nothing_later(medium):
    saver = EngineRig(medium.connector())
    saver.save([1], HASHES[:1])
    saver.close()
    connector, store = gated_connector(medium, timeout_s=0.05)
    rig = EngineRig(connector)
    before = bits(rig.kv_cache, [5])
    with store.gate("read_into"):
        job = rig.start_load([5], HASHES[:1])
        assert rig.wait(job) == TransferResult(job, 0, "transfer_timeout")
    rig.close()
    assert bits(rig.kv_cache, [5]) == before


def test_closing_settles_what_is_in_flight(medium):
    connector, store = gated_connector(medium)
    rig = EngineRig(connector)
    rig.save([1, 2], HASHES[:2])
    before = bits(rig.kv_cache, [3, 4, 5, 6])
    with store.gate("read_into") as gate:
        rig.start_load([3, 4], HASHES[:2])
        rig.start_load([5, 6], HASHES[:2])
        gate.wait_for_arrival()
        closer = threading.Thread(target=connector.close)
        closer.start()
        assert rig.wait(2).error == "transfer_cancelled"
        assert rig.wait(3).error == "transfer_cancelled"
    closer.join(DEADLINE_S)
    assert not closer.is_alive()
    assert bits(rig.kv_cache, [3, 4, 5, 6]) == before
    rig.close()


def test_closing_twice_and_before_the_start(medium):
    connector = medium.connector()
    connector.close()
    connector.close()
    rig = EngineRig(medium.connector())
    rig.connector.close()
    rig.close()


def test_a_result_can_be_polled_when_the_engine_is_woken(medium):
    connector = medium.connector()
    polled: list[TransferResult] = []
    woken = threading.Event()

    def wake() -> None:
        polled.extend(connector.poll())
        if polled:  # of several ranks, each wakes it
            woken.set()

    kv_cache = create_kv_cache()
    connector.register_kv_cache(kv_cache, FINGERPRINT, kv_layout(kv_cache), wake)
    connector.start_save(BlockTransfer(1, RequestId("request"), (1,), (HASHES[0],), BLOCK_SIZE))
    assert woken.wait(DEADLINE_S)
    assert polled == [TransferResult(1, 1)]
    connector.close()

"""What a connector that writes straight into a peer's blocks owes the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
import torch
import xxhash

from common.engine.contract.parts import decode_addresses, encode_address
from common.engine.kv_connector import BlockTransfer, Destination, TransferResult
from common.errors import ConfigError
from common.types import RequestId, group_key, hash_partial_block, hash_prompt, root_hash
from kv_store.registry import create_connector
from tests.contract.connector_rig import BLOCK_SIZE, DEADLINE_S, FINGERPRINT, create_kv_cache, kv_layout
from tests.contract.direct_rig import DirectRig, nixl_rig

PROMPT = list(range(100, 100 + 6 * BLOCK_SIZE))
HASHES = hash_prompt(PROMPT, BLOCK_SIZE, root_hash())
OTHER_FINGERPRINT = bytes(reversed(range(32)))


@pytest.fixture(params=[0, 1 << 20], ids=["nixl", "nixl with host memory"])
def worker(request: pytest.FixtureRequest) -> Iterator[Callable[..., DirectRig]]:
    """Makes workers and closes them."""
    rigs = []

    def make(*args: object, **options: object) -> DirectRig:
        rigs.append(nixl_rig(*args, host_bytes=request.param, **options))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


def ok(result: TransferResult, num_blocks: int) -> bool:
    return result.num_blocks_ok == num_blocks and result.error == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_round_trip_is_bit_exact_and_touches_nothing_else(worker, dtype):
    producer = worker(create_kv_cache(dtype=dtype, seed=1))
    consumer = worker(create_kv_cache(dtype=dtype, seed=2))
    source, untouched = producer.bits(range(12)), consumer.bits([0, 1, 2, 3, 10, 11])

    saved = producer.save([1, 2, 3, 4, 5, 6], HASHES, consumer.address, [9, 4, 8, 5, 7, 6])
    assert ok(saved, 6)
    assert len(saved.digests) == 6
    assert ok(consumer.load([9, 4, 8, 5, 7, 6], HASHES, saved.digests), 6)

    assert consumer.bits([9, 4, 8, 5, 7, 6]) == producer.bits([1, 2, 3, 4, 5, 6])
    assert consumer.bits([0, 1, 2, 3, 10, 11]) == untouched
    assert producer.bits(range(12)) == source


def test_partial_last_block(worker):
    prompt = PROMPT[: 2 * BLOCK_SIZE + 3]
    hashes = [*HASHES[:2], hash_partial_block(prompt, BLOCK_SIZE, HASHES[:2], root_hash())]
    producer, consumer = worker(create_kv_cache(seed=1)), worker(create_kv_cache(seed=2))

    saved = producer.save([1, 2, 3], hashes, consumer.address, [4, 5, 6], num_in_last=3)
    assert ok(saved, 3)
    assert ok(consumer.load([4, 5, 6], hashes, saved.digests, num_in_last=3), 3)

    assert consumer.bits([4, 5, 6]) == producer.bits([1, 2, 3])
    wrong_length = consumer.load([4, 5, 6], hashes, saved.digests, num_in_last=2)
    assert (wrong_length.num_blocks_ok, wrong_length.error) == (2, "block_corrupt")


def test_partial_last_blocks_of_several_groups(worker):
    keys = [group_key(block_hash, group) for block_hash in HASHES[:2] for group in range(2)]
    producer, consumer = worker(create_kv_cache(seed=1)), worker(create_kv_cache(seed=2))

    saved = producer.save([1, 2, 3, 4], keys, consumer.address, [4, 5, 6, 7], num_in_last=3, num_last=2)
    assert ok(consumer.load([4, 5, 6, 7], keys, saved.digests, num_in_last=3, num_last=2), 4)
    assert ok(consumer.load([6, 7], keys[2:], saved.digests[2:], num_in_last=3, num_last=2), 2)

    assert consumer.load([4, 5, 6, 7], keys, saved.digests, num_in_last=3).num_blocks_ok == 2
    assert consumer.load([4, 5], [keys[0], keys[0]], saved.digests[:2]).num_blocks_ok == 1


def test_later_chunks_go_to_other_blocks_of_the_same_request(worker):
    producer, consumer = worker(create_kv_cache(seed=1)), worker(create_kv_cache(seed=2))
    first = producer.save([1, 2], HASHES[:2], consumer.address, [11, 3])
    rest = producer.save([3, 4, 5, 6], HASHES[2:], consumer.address, [4, 10, 1, 2])
    assert ok(consumer.load([11, 3], HASHES[:2], first.digests), 2)
    assert ok(consumer.load([4, 10, 1, 2], HASHES[2:], rest.digests), 4)
    assert consumer.bits([11, 3, 4, 10, 1, 2]) == producer.bits([1, 2, 3, 4, 5, 6])


def test_no_blocks_is_a_transfer_too(worker):
    rig, consumer = worker(), worker()
    assert ok(rig.save([], [], consumer.address, []), 0)
    assert ok(rig.load([], [], []), 0)


def test_many_transfers_at_once_between_several(worker):
    producers = [worker(create_kv_cache(200, seed=seed)) for seed in (1, 2)]
    consumers = [worker(create_kv_cache(200, seed=seed)) for seed in (3, 4)]
    hashes = [hash_prompt([index, *PROMPT[1:]], BLOCK_SIZE, root_hash()) for index in range(16)]
    jobs = []
    for index, keys in enumerate(hashes):
        for producer, half in zip(producers, (0, 100), strict=True):
            source = list(range(1 + 6 * index, 7 + 6 * index))
            target = [half + block_id for block_id in reversed(source)]
            consumer = consumers[index % 2]
            jobs.append((producer, producer.start_save(source, keys, consumer.address, target), source, target))

    for number, (producer, job, source, target) in enumerate(jobs):
        index = number // 2
        consumer = consumers[index % 2]
        saved = producer.wait(job)
        assert ok(saved, 6)
        assert ok(consumer.load(target, hashes[index], saved.digests), 6)
        assert consumer.bits(target) == producer.bits(source)


def test_both_directions_at_once(worker):
    one, other = worker(create_kv_cache(seed=1)), worker(create_kv_cache(seed=2))
    there = one.start_save([1, 2, 3], HASHES[:3], other.address, [7, 8, 9])
    back = other.start_save([1, 2, 3], HASHES[:3], one.address, [7, 8, 9])
    assert ok(one.wait(there), 3)
    assert ok(other.wait(back), 3)
    assert other.bits([7, 8, 9]) == one.bits([1, 2, 3])
    assert one.bits([7, 8, 9]) == other.bits([1, 2, 3])


def test_a_changed_bit_is_noticed(worker):
    producer, consumer = worker(create_kv_cache(seed=1)), worker(create_kv_cache(seed=2))
    saved = producer.save([1, 2, 3], HASHES[:3], consumer.address, [1, 2, 3])
    consumer.kv_cache[2].view(torch.uint8).view(-1)[-1] ^= 128
    result = consumer.load([1, 2, 3], HASHES[:3], saved.digests)
    assert result == TransferResult(result.job_id, 1, "block_corrupt")


def test_blocks_in_the_wrong_place_are_noticed(worker):
    producer, consumer = worker(create_kv_cache(seed=1)), worker(create_kv_cache(seed=2))
    saved = producer.save([1, 2], HASHES[:2], consumer.address, [5, 6])
    result = consumer.load([6, 5], HASHES[:2], saved.digests)
    assert result == TransferResult(result.job_id, 0, "block_corrupt")


def test_the_right_bytes_of_another_block_are_noticed(worker):
    producer, consumer = worker(create_kv_cache(seed=1)), worker(create_kv_cache(seed=2))
    saved = producer.save([1, 2], HASHES[:2], consumer.address, [5, 6])
    result = consumer.load([5, 6], [HASHES[0], HASHES[3]], saved.digests)
    assert result == TransferResult(result.job_id, 1, "block_corrupt")


def test_a_block_that_was_never_written_is_noticed(worker):
    producer, consumer = worker(create_kv_cache(seed=1)), worker(create_kv_cache(seed=2))
    saved = producer.save([1, 2], HASHES[:2], consumer.address, [5, 6])
    result = consumer.load([5, 7], HASHES[:2], saved.digests)
    assert result == TransferResult(result.job_id, 1, "block_corrupt")


def test_a_load_without_digests_is_refused(worker):
    assert worker().load([1], HASHES[:1], []).error == "transfer"


def test_a_load_of_blocks_that_do_not_exist_is_refused(worker):
    assert worker().load([12], HASHES[:1], [bytes(16)]).error == "transfer"


ADDRESSES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda good: b"",
    "zeros": lambda good: bytes(len(good)),
    "cut": lambda good: good[:-1],
    "longer": lambda good: good + b"\0",
    "first bit": lambda good: bytes([good[0] ^ 1]) + good[1:],
    "last bit": lambda good: good[:-1] + bytes([good[-1] ^ 1]),
    "another message": lambda good: seal(msgspec.msgpack.encode(["hello"])),
    "no message": lambda good: seal(b"\xc1"),
    "newer version": lambda good: changed(good, version=4),
    "no blocks": lambda good: changed(good, region=region_of(good, num_blocks=0)),
    "address beyond memory": lambda good: changed(good, region=region_of(good, base=1 << 63)),
    "unknown memory": lambda good: changed(good, region=region_of(good, memory="tape")),
    "other model": lambda good: changed(good, fingerprint=OTHER_FINGERPRINT),
    "a rank is missing": lambda good: changed(good, layout=layout_of(good, tensor_parallel_size=2)),
    "a rank too many": lambda good: good + good,
    "a degree that does not fit": lambda good: changed(good, layout=layout_of(good, tensor_parallel_size=3)),
    "no degree": lambda good: changed(good, layout=layout_of(good, tensor_parallel_size=0)),
    "no layout": lambda good: changed(good, layout=layout_of(good, groups=[])),
    "other block size": lambda good: changed(good, layout=layout_of(good, block_size=8)),
    "other size of blocks": lambda good: changed(good, region=region_of(good, block_bytes=768)),
}


def seal(body: bytes) -> bytes:
    return encode_address(xxhash.xxh3_128_digest(body) + body)


def fields_of(address: bytes) -> dict[str, Any]:
    (only,) = decode_addresses(address)
    return msgspec.msgpack.decode(only[16:])


def region_of(address: bytes, **changes: object) -> dict[str, Any]:
    return {**fields_of(address)["region"], **changes}


def layout_of(address: bytes, **changes: object) -> dict[str, Any]:
    return {**fields_of(address)["layout"], **changes}


def changed(address: bytes, **changes: object) -> bytes:
    return seal(msgspec.msgpack.encode({**fields_of(address), **changes}))


@pytest.mark.parametrize("name", ADDRESSES)
def test_an_address_that_does_not_fit_is_refused(worker, name):
    producer, consumer = worker(create_kv_cache(seed=1)), worker(create_kv_cache(seed=2))
    before = consumer.bits(range(12))
    result = producer.save([1, 2], HASHES[:2], ADDRESSES[name](consumer.address), [3, 4])
    assert result == TransferResult(result.job_id, 0, "incompatible")
    assert consumer.bits(range(12)) == before


def test_a_peer_of_another_model_is_refused(worker):
    producer, consumer = worker(), worker(fingerprint=OTHER_FINGERPRINT)
    assert producer.save([1], HASHES[:1], consumer.address, [3]).error == "incompatible"


@pytest.mark.parametrize(
    ("block_ids", "to_ids"), [([1, 2], [3, 12]), ([1, 12], [3, 4]), ([1, 2], [-1, 4]), ([-1, 2], [3, 4]), ([1, 2], [3])]
)
def test_blocks_that_do_not_exist_are_refused(worker, block_ids, to_ids):
    producer, consumer = worker(create_kv_cache(seed=1)), worker(create_kv_cache(seed=2))
    before = consumer.bits(range(12))
    result = producer.save(block_ids, HASHES[:2], consumer.address, to_ids)
    assert result == TransferResult(result.job_id, 0, "transfer")
    assert consumer.bits(range(12)) == before


LIES: dict[str, Callable[[bytes], bytes]] = {
    "more blocks than registered": lambda good: changed(good, region=region_of(good, num_blocks=24)),
    "memory before the cache": lambda good: changed(good, region=region_of(good, base=region_of(good)["base"] - 1536)),
    "metadata of nobody": lambda good: changed(good, metadata=b"nixlSerDes|nothing"),
    "metadata cut": lambda good: changed(good, metadata=fields_of(good)["metadata"][:-1]),
    "another agent's name": lambda good: changed(good, agent_name="somebody"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lying_address_costs_one_transfer(worker, name):
    producer, consumer = worker(create_kv_cache(seed=1)), worker(create_kv_cache(seed=2))
    before = consumer.bits(range(12))
    result = producer.save([1], HASHES[:1], LIES[name](consumer.address), [3])
    assert result == TransferResult(result.job_id, 0, "store_failed")
    assert consumer.bits(range(12)) == before
    honest = worker(create_kv_cache(seed=3))
    assert ok(producer.save([1], HASHES[:1], honest.address, [3]), 1)


def test_a_closed_peer_costs_its_transfers_and_its_successor_is_served(worker):
    producer, consumer = worker(), worker(create_kv_cache(seed=2))
    assert ok(producer.save([1], HASHES[:1], consumer.address, [3]), 1)
    consumer.close()
    assert producer.save([1], HASHES[:1], consumer.address, [3]).error == "store_failed"
    assert ok(producer.save([1], HASHES[:1], worker(create_kv_cache(seed=2)).address, [3]), 1)


def test_cancelling_what_is_over_or_unknown_does_nothing(worker):
    rig, consumer = worker(), worker()
    rig.save([1], HASHES[:1], consumer.address, [1])
    rig.connector.cancel(1)
    rig.connector.cancel(999)
    rig.collect()
    assert list(rig.results) == [1]


def test_closing_settles_everything(worker):
    rig, consumer = worker(create_kv_cache(200)), worker(create_kv_cache(200))
    hashes = hash_prompt(list(range(150 * BLOCK_SIZE)), BLOCK_SIZE, root_hash())
    for _ in range(20):
        rig.start_save(range(1, 151), hashes, consumer.address, range(1, 151))
        rig.start_load(range(1, 151), hashes, [bytes(16)] * 150)
    rig.close()  # which checks it


def test_closing_twice_and_before_the_start():
    connector = create_connector("nixl", {})
    connector.cancel(1)
    assert connector.poll() == []
    connector.close()
    connector.close()
    rig = nixl_rig()
    rig.connector.close()
    rig.close()


def test_a_result_can_be_polled_when_the_engine_is_woken(worker):
    consumer = worker()
    connector = create_connector("nixl", {})
    polled: list[TransferResult] = []
    woken = threading.Event()

    def wake() -> None:
        polled.extend(connector.poll())
        woken.set()

    kv_cache = create_kv_cache()
    connector.register_kv_cache(kv_cache, FINGERPRINT, kv_layout(kv_cache), wake)
    destination = Destination(consumer.address, (2,))
    connector.start_save(BlockTransfer(1, RequestId("request"), (1,), (HASHES[0],), BLOCK_SIZE, destination))
    assert woken.wait(DEADLINE_S)
    assert [result.job_id for result in polled] == [1]
    connector.close()


def test_a_backend_that_cannot_be_opened_is_a_configuration_error(monkeypatch):
    monkeypatch.setenv("UCX_TLS", "no-such-transport")
    with pytest.raises(ConfigError) as caught:
        nixl_rig()
    assert caught.value.param == "connector"
    assert "nixl" in caught.value.message

from __future__ import annotations

import threading

import pytest

import kv_store.nixl.digests as digests
from common.engine.contract.layout import MappedPart, Part
from common.engine.contract.parts import PartDigest, encode_digests
from common.engine.kv_connector import BlockTransfer
from common.types import RequestId, hash_prompt, root_hash
from kv_store.nixl.digests import Digester, block_digest, create_slab_reader, digests_of
from kv_store.nixl.heads import SlabShape
from kv_store.staging import layout_of
from tests.contract.connector_rig import BLOCK_SIZE, DEADLINE_S, create_kv_cache
from tests.contract.direct_rig import nixl_rig

HASHES = hash_prompt(list(range(4 * BLOCK_SIZE)), BLOCK_SIZE, root_hash())
SLAB = bytes(range(256))
SLAB_SHAPE = SlabShape.of(layout_of(create_kv_cache(1)))
WHOLE = Part(0, SLAB_SHAPE.num_layers, 0, 2)
PARTS = [MappedPart(0, 0, WHOLE, WHOLE)]


@pytest.fixture
def transfer() -> BlockTransfer:
    return BlockTransfer(1, RequestId("request"), (3, 1, 3), tuple(HASHES[:3]), BLOCK_SIZE - 1)


def test_a_digest_tells_bytes_block_and_length_apart():
    good = block_digest([SLAB], HASHES[0], 4)
    assert good == block_digest([SLAB[:16], bytearray(SLAB[16:])], HASHES[0], 4)
    assert len(good) == 16
    others = {
        block_digest([SLAB[::-1]], HASHES[0], 4),
        block_digest([SLAB], HASHES[1], 4),
        block_digest([SLAB], HASHES[0], 3),
    }
    assert len(others | {good}) == 4


def test_digests_are_of_the_blocks_in_order(transfer):
    kv_cache = create_kv_cache()
    found = list(digests_of(transfer, create_slab_reader(kv_cache), BLOCK_SIZE, SLAB_SHAPE, PARTS))
    slabs = [[kv_cache[block_id].numpy().tobytes()] for block_id in (3, 1, 3)]
    lengths = (BLOCK_SIZE, BLOCK_SIZE, BLOCK_SIZE - 1)
    wanted = [block_digest(*block) for block in zip(slabs, HASHES, lengths, strict=False)]
    assert found == [encode_digests([PartDigest(0, *WHOLE, digest)]) for digest in wanted]


def test_the_digester_takes_the_same(transfer):
    kv_cache = create_kv_cache()
    digester = Digester(kv_cache, BLOCK_SIZE, SLAB_SHAPE)
    pending = [digester.start(transfer, PARTS) for _ in range(3)]
    expected = tuple(digests_of(transfer, create_slab_reader(kv_cache), BLOCK_SIZE, SLAB_SHAPE, PARTS))
    assert [digest.result() for digest in pending] == [expected] * 3
    digester.close()
    digester.close()


def test_one_thread_takes_all_digests(transfer, monkeypatch):
    """Its frames are not for two."""
    may_go_on, names = threading.Event(), []

    def wait_and_digest(*_: object) -> bytes:
        names.append(threading.current_thread().name)
        assert may_go_on.wait(DEADLINE_S)
        return bytes(16)

    monkeypatch.setattr(digests, "block_digest", wait_and_digest)
    digester = Digester(create_kv_cache(), BLOCK_SIZE, SLAB_SHAPE)
    under_way = [digester.start(transfer, PARTS) for _ in range(3)]
    may_go_on.set()
    assert [future.result(DEADLINE_S) for future in under_way] == [
        (encode_digests([PartDigest(0, *WHOLE, bytes(16))]),) * 3
    ] * 3
    assert len(names) == 9
    assert set(names) == {"kv-nixl-digests_0"}
    digester.close()


def test_digests_that_cannot_be_taken_cost_one_transfer(monkeypatch):
    producer, consumer = nixl_rig(), nixl_rig()
    with monkeypatch.context() as patched:
        patched.setattr(digests, "block_digest", lambda *_: 1 / 0)
        assert producer.save([1], HASHES[:1], consumer.address, [1]).error == "transfer"
    assert producer.save([1], HASHES[:1], consumer.address, [1]).error == ""
    producer.close()
    consumer.close()

"""What a direct connector does when the process that it writes to stops, dies or comes back.

The transport is TCP: over shared memory the producer writes into a stopped process's memory, and nothing is under way.
Deaths over the others are in test_direct_connector_transports.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from common.engine.kv_connector import TransferResult
from common.types import hash_prompt, root_hash
from tests.contract.connector_rig import BLOCK_SIZE, DEADLINE_S
from tests.contract.direct_peer import DirectPeer, direct_peer, uniform_kv_cache
from tests.contract.direct_rig import DirectRig, nixl_rig

NUM_BLOCKS = 65
HEAD_DIM = 4096  # blocks of 768 KiB: more than sockets buffer
BLOCKS = list(range(1, NUM_BLOCKS))
HASHES = hash_prompt(list(range(len(BLOCKS) * BLOCK_SIZE)), BLOCK_SIZE, root_hash())
MAX_ATTEMPTS = 20
OLD, NEW = 1, 2  # values of all bytes


@pytest.fixture(autouse=True)
def _tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_LOG_LEVEL", "fatal")


@pytest.fixture
def peer(_tcp: None) -> Iterator[DirectPeer]:
    with direct_peer(NUM_BLOCKS, HEAD_DIM) as started:
        yield started


def producer(timeout_s: float = DEADLINE_S) -> DirectRig:
    return nixl_rig(uniform_kv_cache(NUM_BLOCKS, HEAD_DIM, OLD), timeout_s=timeout_s)


def save(rig: DirectRig, peer: DirectPeer) -> TransferResult:
    return rig.save(BLOCKS, HASHES, peer.address, BLOCKS)


def save_one(rig: DirectRig, peer: DirectPeer, to_id: int) -> TransferResult:
    """Write one block; again if a slow machine takes longer than the rig's short deadline to connect."""
    for _ in range(MAX_ATTEMPTS):
        saved = rig.save(BLOCKS[:1], HASHES[:1], peer.address, [to_id])
        if not saved.error:
            return saved
    raise AssertionError(f"{MAX_ATTEMPTS} saves failed, the last with {saved}")


def test_a_killed_peer_fails_its_transfers_and_the_next_one_is_served(peer):
    rig = producer()
    assert save(rig, peer).error == ""
    peer.kill()
    assert save(rig, peer).error == "store_failed"
    assert save(rig, peer).error == "store_failed"
    with direct_peer(NUM_BLOCKS, HEAD_DIM) as successor:
        saved = save(rig, successor)
        assert successor.load(BLOCKS, HASHES, saved.digests).values == [OLD]
    rig.close()


def test_a_peer_that_was_never_reached_fails_its_transfers(peer):
    rig = producer()
    peer.kill()
    assert save(rig, peer).error == "store_failed"
    rig.close()


def test_a_peer_killed_in_mid_transfer_fails_it(peer):
    rig = producer()
    assert rig.save(BLOCKS[:1], HASHES[:1], peer.address, BLOCKS[:1]).error == ""
    peer.stop()
    jobs = [rig.start_save(BLOCKS, HASHES, peer.address, BLOCKS) for _ in range(3)]
    with direct_peer(NUM_BLOCKS, HEAD_DIM) as other:  # a stopped peer stops no other
        assert save(rig, other).error == ""
        peer.kill()
        assert [rig.wait(job).error for job in jobs] == ["store_failed"] * 3
        assert save(rig, other).error == ""
    rig.close()


def test_a_cancelled_write_settles_when_the_transport_is_done_with_it(peer):
    rig = producer()
    assert rig.save(BLOCKS[:1], HASHES[:1], peer.address, BLOCKS[:1]).error == ""
    peer.stop()
    job = rig.start_save(BLOCKS, HASHES, peer.address, BLOCKS)
    rig.connector.cancel(job)
    peer.go_on()
    assert rig.wait(job) == TransferResult(job, 0, "transfer_cancelled")
    assert save(rig, peer).error == ""
    rig.close()


def test_a_write_given_up_at_its_deadline_reads_nothing_later(peer):
    rig = producer(timeout_s=2.0)
    save_one(rig, peer, BLOCKS[0])
    peer.stop()
    job = rig.start_save(BLOCKS, HASHES, peer.address, BLOCKS)
    assert rig.wait(job) == TransferResult(job, 0, "transfer_timeout")

    rig.kv_cache.view(torch.uint8).fill_(NEW)  # settled, so the blocks are somebody else's now
    peer.go_on()

    assert NEW not in peer.load(BLOCKS, HASHES, [bytes(16)] * len(BLOCKS)).values
    saved = save_one(rig, peer, NUM_BLOCKS - 1)
    assert peer.load([NUM_BLOCKS - 1], HASHES[:1], saved.digests).values == [NEW]
    assert NEW not in peer.load(BLOCKS[:-1], HASHES[:-1], [bytes(16)] * (len(BLOCKS) - 1)).values
    rig.close()


def test_closing_while_a_write_is_under_way(peer):
    rig = producer()
    assert rig.save(BLOCKS[:1], HASHES[:1], peer.address, BLOCKS[:1]).error == ""
    peer.stop()
    rig.start_save(BLOCKS, HASHES, peer.address, BLOCKS)
    rig.close()  # which checks that it has settled
    rig.kv_cache.view(torch.uint8).fill_(NEW)
    peer.go_on()
    assert NEW not in peer.load(BLOCKS, HASHES, [bytes(16)] * len(BLOCKS)).values


def test_a_producer_that_dies_leaves_the_consumer_working():
    consumer = nixl_rig(uniform_kv_cache(NUM_BLOCKS, HEAD_DIM, 0))
    with direct_peer(NUM_BLOCKS, HEAD_DIM) as dying:
        consumer.start_save(BLOCKS, HASHES, dying.address, BLOCKS)
        dying.kill()
    rig = producer()
    saved = rig.save(BLOCKS, HASHES, consumer.address, BLOCKS)
    assert consumer.load(BLOCKS, HASHES, saved.digests).error == ""
    rig.close()
    consumer.close()

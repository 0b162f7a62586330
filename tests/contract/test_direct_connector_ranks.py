"""Engines of several ranks, each with a nixl connector over its KV heads, write into each other's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
import torch

from common.engine.contract.parts import decode_addresses, encode_address
from common.engine.kv_connector import WorkerConnector
from common.types import hash_prompt, root_hash
from kv_store.registry import create_connector
from tests.contract.connector_rig import BLOCK_SIZE, DEADLINE_S, create_kv_cache
from tests.contract.direct_rig import DirectRig
from tests.contract.ranked_rig import RankedConnectors, whole_blocks

HASHES = hash_prompt(list(range(4 * BLOCK_SIZE)), BLOCK_SIZE, root_hash())
NUM_HEADS = 2  # of the caches that `create_kv_cache` makes


class RankedRig(DirectRig):
    """A DirectRig over several ranks."""

    def bits(self, block_ids: Sequence[int]) -> list[bytes]:
        return whole_blocks(self.connector.parts, NUM_HEADS, block_ids)


def create() -> WorkerConnector:
    return create_connector("nixl", {"timeout_s": DEADLINE_S})


@pytest.fixture
def engine() -> Iterator[Callable[..., RankedRig]]:
    """Makes engines and closes them."""
    rigs: list[RankedRig] = []

    def make(seed: int, num_ranks: int = NUM_HEADS) -> RankedRig:
        rigs.append(RankedRig(RankedConnectors(create, num_ranks), create_kv_cache(seed=seed)))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


DEGREES = [(1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (1, 4), (4, 1), (4, 4)]


@pytest.mark.cell(feature="transfer", connector="nixl", degrees="{of_producer} to {of_consumer}")
@pytest.mark.parametrize(("of_producer", "of_consumer"), DEGREES)
def test_round_trip_is_bit_exact(engine, of_producer, of_consumer):
    producer, consumer = engine(1, of_producer), engine(2, of_consumer)
    source, untouched = producer.bits(range(12)), consumer.bits([0, 1, 2, 3, 9, 10, 11])
    saved = producer.save([1, 2, 3, 4], HASHES, consumer.address, [7, 4, 8, 5])
    assert (saved.num_blocks_ok, saved.error, len(saved.digests)) == (4, "", 4)
    loaded = consumer.load([7, 4, 8, 5], HASHES, saved.digests)
    assert (loaded.num_blocks_ok, loaded.error) == (4, "")
    assert consumer.bits([7, 4, 8, 5]) == producer.bits([1, 2, 3, 4])
    assert consumer.bits([0, 1, 2, 3, 9, 10, 11]) == untouched
    assert producer.bits(range(12)) == source


@pytest.mark.cell(
    feature="transfer",
    connector="nixl",
    degrees="{of_producer} to {of_consumer}",
    fault="a block is damaged on rank {rank}",
)
@pytest.mark.parametrize(
    ("of_producer", "of_consumer", "rank"),
    [(2, 2, 0), (2, 2, 1), (1, 2, 1), (2, 1, 0), (2, 4, 1), (2, 4, 3), (4, 2, 0)],
)
def test_damage_on_one_rank_is_noticed(engine, of_producer, of_consumer, rank):
    producer, consumer = engine(1, of_producer), engine(2, of_consumer)
    saved = producer.save([1, 2, 3, 4], HASHES, consumer.address, [5, 6, 7, 8])
    consumer.connector.parts[rank][7].view(torch.uint8).view(-1)[-1] ^= 128
    loaded = consumer.load([5, 6, 7, 8], HASHES, saved.digests)
    assert (loaded.num_blocks_ok, loaded.error) == (2, "block_corrupt")


@pytest.mark.parametrize(("of_producer", "of_consumer"), [(1, 2), (2, 1), (2, 2)])
def test_digests_for_engines_of_another_degree_count_for_nothing(engine, of_producer, of_consumer):
    producer, consumer, other = engine(1, of_producer), engine(2, of_consumer), engine(3, 3 - of_consumer)
    saved = producer.save([1, 2], HASHES[:2], consumer.address, [5, 6])
    written = producer.save([1, 2], HASHES[:2], other.address, [5, 6])
    assert (saved.num_blocks_ok, written.num_blocks_ok) == (2, 2)
    assert consumer.load([5, 6], HASHES[:2], written.digests).num_blocks_ok == 0
    assert consumer.load([5, 6], HASHES[:2], saved.digests).num_blocks_ok == 2


@pytest.mark.cell(feature="transfer", connector="nixl", degrees="1 to 2", fault="a rank is gone")
def test_a_rank_that_is_gone_costs_the_transfer(engine):
    producer, consumer = engine(1, 1), engine(2, 2)
    assert producer.save([1], HASHES[:1], consumer.address, [5]).error == ""
    consumer.connector.workers[1].close()
    assert producer.save([1], HASHES[:1], consumer.address, [5]).error == "store_failed"
    successor = engine(3, 2)
    assert producer.save([1], HASHES[:1], successor.address, [5]).error == ""


@pytest.mark.parametrize("of_consumer", [1, 2])
def test_degrees_that_do_not_fit_are_refused(engine, of_consumer):
    producer, consumer = engine(1, 2), engine(2, of_consumer)
    before = consumer.bits(range(12))
    ranks = decode_addresses(consumer.address)
    for addresses in (ranks * 2, ranks[1:], [*ranks[1:], b"a rank"]):
        saved = producer.save([1, 2], HASHES[:2], b"".join(map(encode_address, addresses)), [5, 6])
        assert (saved.num_blocks_ok, saved.error) == (0, "incompatible")
    assert consumer.bits(range(12)) == before

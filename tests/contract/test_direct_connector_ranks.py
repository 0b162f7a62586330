"""Engines of several ranks, each with a nixl connector over its KV heads, write into each other's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from common.engine.contract.layout import KVLayout
from common.engine.contract.parts import decode_addresses, encode_address
from common.engine.executor.ranked_connector import join_ranks
from common.engine.kv_connector import ConnectorFacts, OpenConnector
from common.types import hash_prompt, root_hash
from kv_store.registry import create_connector
from tests.contract.connector_rig import BLOCK_SIZE, DEADLINE_S, create_kv_cache
from tests.contract.direct_rig import DirectRig

HASHES = hash_prompt(list(range(4 * BLOCK_SIZE)), BLOCK_SIZE, root_hash())
NUM_HEADS = 2  # of the caches that `create_kv_cache` makes


class RankedWorkers:
    """Workers of as many ranks, as one whose KV cache has all heads."""

    def __init__(self, num_ranks: int) -> None:
        self._workers = [create_connector("nixl", {"timeout_s": DEADLINE_S}) for _ in range(num_ranks)]
        self.parts: list[torch.Tensor] = []  # of the KV cache, by rank

    def register_kv_cache(
        self, kv_cache: torch.Tensor, fingerprint: bytes, layout: KVLayout, on_settled: Callable[[], None]
    ) -> ConnectorFacts:
        layout = replace(layout, tensor_parallel_size=len(self._workers))
        self.parts = [kv_cache[:, :, :, heads].contiguous() for heads in layout.heads_by_rank]
        joined = join_ranks(
            [
                OpenConnector(worker, worker.register_kv_cache(part, fingerprint, layout, on_settled, rank=rank))
                for rank, (worker, part) in enumerate(zip(self._workers, self.parts, strict=True))
            ]
        )
        for name in ("start_load", "start_save", "cancel", "poll"):
            setattr(self, name, getattr(joined.connector, name))
        return joined.facts

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


class RankedRig(DirectRig):
    """A DirectRig over several ranks."""

    def bits(self, block_ids: Sequence[int]) -> list[bytes]:
        """Those of all heads; ranks that have the same head agree."""
        parts = [part.view(torch.int32) for part in self.connector.parts]
        copies = max(1, len(parts) // NUM_HEADS)
        assert all(
            torch.equal(part[block_ids], parts[rank // copies * copies][block_ids]) for rank, part in enumerate(parts)
        )
        whole = torch.cat(parts[::copies], dim=3)
        return [whole[block_id].numpy().tobytes() for block_id in block_ids]


@pytest.fixture
def engine() -> Iterator[Callable[..., RankedRig]]:
    """Makes engines and closes them."""
    rigs: list[RankedRig] = []

    def make(seed: int, num_ranks: int = NUM_HEADS) -> RankedRig:
        rigs.append(RankedRig(RankedWorkers(num_ranks), create_kv_cache(seed=seed)))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


DEGREES = [(1, 2), (2, 1), (2, 2), (4, 2), (2, 4), (1, 4), (4, 1), (4, 4)]


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


def test_a_rank_that_is_gone_costs_the_transfer(engine):
    producer, consumer = engine(1, 1), engine(2, 2)
    assert producer.save([1], HASHES[:1], consumer.address, [5]).error == ""
    consumer.connector._workers[1].close()
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

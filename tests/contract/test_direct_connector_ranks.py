"""Engines of several ranks, each with a nixl connector over its KV heads, write into each other's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pytest
import torch

from common.engine.contract.layout import KVLayout
from common.engine.executor.ranked_connector import join_ranks
from common.engine.kv_connector import ConnectorFacts, OpenConnector
from common.errors import ConfigError
from common.types import hash_prompt, root_hash
from kv_store.registry import create_connector
from tests.contract.connector_rig import BLOCK_SIZE, DEADLINE_S, FINGERPRINT, create_kv_cache, kv_layout
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
        self.parts = [part.contiguous() for part in kv_cache.chunk(len(self._workers), dim=3)]
        layout = replace(layout, tensor_parallel_size=len(self._workers))
        joined = join_ranks(
            [
                OpenConnector(worker, worker.register_kv_cache(part, fingerprint, layout, on_settled))
                for worker, part in zip(self._workers, self.parts, strict=True)
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
        whole = torch.cat([part.view(torch.int32) for part in self.connector.parts], dim=3)
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


def test_round_trip_is_bit_exact(engine):
    producer, consumer = engine(1), engine(2)
    source, untouched = producer.bits(range(12)), consumer.bits([0, 1, 2, 3, 9, 10, 11])
    saved = producer.save([1, 2, 3, 4], HASHES, consumer.address, [7, 4, 8, 5])
    assert (saved.num_blocks_ok, saved.error, len(saved.digests)) == (4, "", 4)
    loaded = consumer.load([7, 4, 8, 5], HASHES, saved.digests)
    assert (loaded.num_blocks_ok, loaded.error) == (4, "")
    assert consumer.bits([7, 4, 8, 5]) == producer.bits([1, 2, 3, 4])
    assert consumer.bits([0, 1, 2, 3, 9, 10, 11]) == untouched
    assert producer.bits(range(12)) == source


@pytest.mark.parametrize("rank", range(NUM_HEADS))
def test_damage_on_one_rank_is_noticed(engine, rank):
    producer, consumer = engine(1), engine(2)
    saved = producer.save([1, 2, 3, 4], HASHES, consumer.address, [5, 6, 7, 8])
    consumer.connector.parts[rank][7].view(torch.uint8).view(-1)[-1] ^= 128
    loaded = consumer.load([5, 6, 7, 8], HASHES, saved.digests)
    assert (loaded.num_blocks_ok, loaded.error) == (2, "block_corrupt")


@pytest.mark.parametrize(("of_producer", "of_consumer"), [(1, 2), (2, 1)])
def test_engines_of_other_degrees_do_not_touch_each_other(engine, of_producer, of_consumer):
    producer, consumer = engine(1, of_producer), engine(2, of_consumer)
    before = consumer.bits(range(12))
    saved = producer.save([1, 2], HASHES[:2], consumer.address, [5, 6])
    assert (saved.num_blocks_ok, saved.error) == (0, "incompatible")
    loaded = consumer.load([5, 6], HASHES[:2], [b"of another degree"] * 2)
    assert (loaded.num_blocks_ok, loaded.error) == (0, "block_corrupt")
    assert consumer.bits(range(12)) == before


def test_a_store_takes_whole_blocks_only():
    kv_cache = create_kv_cache()
    layout = replace(kv_layout(kv_cache), tensor_parallel_size=2)
    connector = create_connector("nixl", {"host_bytes": 1 << 20})
    with pytest.raises(ConfigError, match="tensor_parallel_size"):
        connector.register_kv_cache(kv_cache[:, :, :, :1].contiguous(), FINGERPRINT, layout, lambda: None)
    connector.close()

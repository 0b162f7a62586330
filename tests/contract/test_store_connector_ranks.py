"""Engines of several ranks over one store: what lies there is the same, whoever wrote it."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from common.engine.kv_connector import BlockTransfer, WorkerConnector
from common.types import RequestId, hash_partial_block, hash_prompt, root_hash
from kv_store.registry import STORE_CONNECTOR_NAMES, create_connector
from tests.contract.connector_rig import (
    BLOCK_SIZE,
    DEADLINE_S,
    EngineRig,
    Medium,
    create_kv_cache,
)
from tests.contract.direct_rig import DirectRig
from tests.contract.ranked_rig import RankedConnectors, RankedMedium, whole_blocks
from tests.contract.test_connector_contract import plain_medium, redis_server

__all__ = ["redis_server"]  # a fixture

DEGREES = (1, 2, 4)  # of two KV heads
NUM_BLOCKS = 100
PROMPT = list(range(80 * BLOCK_SIZE + 3))  # more blocks than slots
FULL_HASHES = hash_prompt(PROMPT, BLOCK_SIZE, root_hash())
HASHES = [*FULL_HASHES, hash_partial_block(PROMPT, BLOCK_SIZE, FULL_HASHES, root_hash())]
SOURCE, TARGET = range(1, 82), list(reversed(range(10, 91)))


@pytest.fixture(params=STORE_CONNECTOR_NAMES)
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Medium:
    return plain_medium(request.param, request, tmp_path)


@pytest.fixture
def engine() -> Iterator[Callable[..., EngineRig]]:
    """Makes engines and closes them."""
    rigs: list[EngineRig] = []

    def make(medium: Medium, num_ranks: int, seed: int) -> EngineRig:
        connector = medium.connector() if num_ranks == 1 else RankedMedium(medium, num_ranks).connector()
        rigs.append(EngineRig(connector, create_kv_cache(NUM_BLOCKS, seed=seed)))
        return rigs[-1]

    yield make
    for rig in rigs:
        rig.close()


@pytest.mark.cell(feature="transfer", connector="{medium}", degrees="{of_writer} to {of_reader}")
@pytest.mark.parametrize(("of_writer", "of_reader"), list(itertools.product(DEGREES, DEGREES)))
def test_any_degree_reads_what_any_other_wrote(medium, engine, of_writer, of_reader):
    writer, reader = engine(medium, of_writer, 1), engine(medium, of_reader, 2)
    untouched = reader.bits([0, 9, 91, 99])
    assert writer.save(SOURCE, HASHES, num_in_last=3).num_blocks_ok == 81
    loaded = reader.load(TARGET, HASHES, num_in_last=3)
    assert (loaded.num_blocks_ok, loaded.error) == (81, "")
    assert reader.bits(TARGET) == writer.bits(SOURCE)
    assert reader.bits([0, 9, 91, 99]) == untouched


def test_all_degrees_write_the_same_bytes_under_the_same_keys(medium, engine):
    written = []
    for degree in DEGREES:
        assert engine(medium, degree, 1).save(SOURCE, HASHES, num_in_last=3).num_blocks_ok == 81
        written.append(medium.frames())
        medium.clear()
    assert set(written[0]) == set(HASHES)
    assert written[0] == written[1] == written[2]


@pytest.mark.cell(feature="transfer", connector="{medium}", degrees="2 to 4", fault="a block is {damage}")
@pytest.mark.parametrize("damage", ["removed", "changed"])
def test_a_block_is_complete_or_missing_on_all_ranks(medium, engine, damage):
    writer, reader = engine(medium, 2, 1), engine(medium, 4, 2)
    writer.save(SOURCE, HASHES, num_in_last=3)
    if damage == "removed":
        medium.remove(HASHES[50])
    else:
        frame = bytearray(medium.frames()[HASHES[50]])
        frame[-1] ^= 1
        medium.put(HASHES[50], bytes(frame))
    before = reader.bits(range(NUM_BLOCKS))
    loaded = reader.load(TARGET, HASHES, num_in_last=3)
    assert loaded.error == ("block_missing" if damage == "removed" else "block_corrupt")
    assert loaded.num_blocks_ok == 50
    assert reader.bits(TARGET[:50]) == writer.bits(SOURCE[:50])
    assert reader.bits([TARGET[50]]) == [before[TARGET[50]]]


@pytest.mark.parametrize(("of_producer", "of_consumer"), [(1, 2), (2, 1), (4, 2)])
def test_handoffs_go_directly_and_kept_blocks_through_the_store(of_producer, of_consumer):
    store = {"store": "memory", "store.store": uuid.uuid4().hex, "timeout_s": DEADLINE_S}

    def create() -> WorkerConnector:
        return create_connector("nixl", store)

    producer, consumer = (
        DirectRig(RankedConnectors(create, degree), create_kv_cache(seed=degree))
        for degree in (of_producer, of_consumer)
    )
    keys = HASHES[:3]
    saved = producer.save([1, 2, 3], keys, consumer.address, [4, 5, 6])
    assert consumer.load([4, 5, 6], keys, saved.digests).num_blocks_ok == 3
    kept = BlockTransfer(100, RequestId("r"), (1, 2, 3), tuple(keys), BLOCK_SIZE, is_for_tier=True)
    for rig, start, transfer in (
        (producer, producer.connector.start_save, kept),
        (consumer, consumer.connector.start_load, replace(kept, block_ids=(7, 8, 9))),
    ):
        rig._started.add(100)
        start(transfer)
        assert rig.wait(100).num_blocks_ok == 3
    wanted = whole_blocks(producer.connector.parts, 2, [1, 2, 3])
    assert whole_blocks(consumer.connector.parts, 2, [4, 5, 6]) == wanted
    assert whole_blocks(consumer.connector.parts, 2, [7, 8, 9]) == wanted
    producer.close()
    consumer.close()

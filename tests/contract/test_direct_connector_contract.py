"""What a connector that writes straight into a peer's blocks owes the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from common.engine.kv_connector import TransferResult
from common.types import hash_partial_block, hash_prompt, root_hash
from tests.contract.connector_rig import BLOCK_SIZE, create_kv_cache
from tests.contract.direct_rig import DirectRig, nixl_rig

PROMPT = list(range(100, 100 + 6 * BLOCK_SIZE))
HASHES = hash_prompt(PROMPT, BLOCK_SIZE, root_hash())
OTHER_FINGERPRINT = bytes(reversed(range(32)))


@pytest.fixture
def worker() -> Iterator[Callable[..., DirectRig]]:
    """Makes workers and closes them."""
    rigs = []

    def make(*args: object, **options: object) -> DirectRig:
        rigs.append(nixl_rig(*args, **options))
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

"""What every store's connector owes an engine whose producer has blocks of another size."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

from common.engine.kv_connector import BlockTransfer, Regroup, TransferResult, WorkerConnector
from common.errors import StoreError
from common.types import BlockHash, RequestId, hash_partial_block, hash_prompt, root_hash
from kv_store.block_format import BlockFormat
from kv_store.registry import STORE_CONNECTOR_NAMES
from kv_store.staging import layout_of
from tests.contract.connector_rig import DEADLINE_S, FINGERPRINT, Medium, gated_connector
from tests.contract.test_connector_contract import (
    BELOW_HOST_MEMORY,
    plain_medium,
    redis_server,  # noqa: F401 - a fixture
)
from tests.contract.tiered_rig import TieredRig

NUM_TOKENS = 64  # of every KV cache here, besides its first block
SIZES = [(4, 16), (16, 4), (8, 4), (4, 12)]  # of the producer's blocks, of the consumer's


@pytest.fixture(params=[name + tier for tier in ("", BELOW_HOST_MEMORY) for name in STORE_CONNECTOR_NAMES])
def medium(request: pytest.FixtureRequest, tmp_path: Path) -> Medium:
    name = request.param.removesuffix(BELOW_HOST_MEMORY)
    lower = plain_medium(name, request, tmp_path)
    return TieredRig(lower) if name != request.param else lower


class Rig:
    """A KV cache of any block size with its connector. One request has blocks 1, 2, ... of it."""

    def __init__(self, connector: WorkerConnector, block_size: int, dtype: torch.dtype, seed: int) -> None:
        self.block_size = block_size
        self.connector = connector
        shape = (1 + -(-NUM_TOKENS // block_size), 3, 2, 2, block_size, 8)
        bits = torch.randint(
            0, 256, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8,
            generator=torch.Generator().manual_seed(seed),
        )  # fmt: skip
        self.kv_cache = bits.view(dtype).view(shape)
        self._wake = threading.Semaphore(0)
        self._job_ids = itertools.count(1)
        connector.register_kv_cache(self.kv_cache, FINGERPRINT, self._wake.release)

    def tokens(self) -> torch.Tensor:
        """The bits of each token's KV, [tokens, bytes]; the null block's are left out."""
        by_token = self.kv_cache[1:].permute(0, 4, 1, 2, 3, 5).flatten(0, 1)
        return by_token.contiguous().flatten(1).view(torch.uint8)

    def hashes(self, num_tokens: int, prompt_seed: int = 0) -> list[BlockHash]:
        prompt = [(prompt_seed + index * 7) % 1000 for index in range(num_tokens)]
        full = hash_prompt(prompt, self.block_size, root_hash())
        if num_tokens % self.block_size:
            return [*full, hash_partial_block(prompt, self.block_size, full, root_hash())]
        return full

    def save(self, num_tokens: int) -> TransferResult:
        hashes = self.hashes(num_tokens)
        num_in_last = num_tokens - (len(hashes) - 1) * self.block_size
        blocks = tuple(range(1, len(hashes) + 1))
        transfer = BlockTransfer(next(self._job_ids), RequestId("save"), blocks, tuple(hashes), num_in_last)
        self.connector.start_save(transfer)
        return self.wait()

    def start_load_of(self, producer: Rig, start: int, stop: int, num_tokens: int, num_local: int = 0) -> int:
        """Load the producer's blocks [start, stop) of a prompt of `num_tokens`, of which `num_local` are here."""
        theirs, ours = producer.block_size, self.block_size
        first, last = max(start * theirs, num_local) // ours, -(-min(stop * theirs, num_tokens) // ours)
        transfer = BlockTransfer(
            next(self._job_ids),
            RequestId("load"),
            tuple(range(1 + first, 1 + last)),
            tuple(producer.hashes(num_tokens)[start:stop]),
            min(theirs, num_tokens - (stop - 1) * theirs),
            regroup=Regroup(theirs, start * theirs - first * ours) if theirs != ours else None,
        )
        self.connector.start_load(transfer)
        return transfer.job_id

    def load_from(self, producer: Rig, num_tokens: int, num_local: int = 0) -> TransferResult:
        stop = len(producer.hashes(num_tokens))
        self.start_load_of(producer, num_local // producer.block_size, stop, num_tokens, num_local)
        return self.wait()

    def wait(self) -> TransferResult:
        assert self._wake.acquire(timeout=DEADLINE_S)
        (result,) = self.connector.poll()
        return result


@pytest.fixture
def make(medium: Medium) -> Iterator[Callable[..., Rig]]:
    """Makes engines on the medium and closes them."""
    rigs: list[Rig] = []

    def engine(block_size: int, *, seed: int = 1, dtype: torch.dtype = torch.float32, **faults: int) -> Rig:
        connector = gated_connector(medium, **faults)[0] if faults else medium.connector()
        rigs.append(Rig(connector, block_size, dtype, seed))
        return rigs[-1]

    yield engine
    for rig in rigs:
        rig.connector.close()


def assert_filled(consumer: Rig, before: torch.Tensor, producer: Rig, start: int, stop: int) -> None:
    """Tokens [start, stop) are the producer's, all others what they were."""
    after = consumer.tokens()
    assert torch.equal(after[start:stop], producer.tokens()[start:stop])
    assert torch.equal(after[:start], before[:start])
    assert torch.equal(after[stop:], before[stop:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("theirs", "ours"), SIZES)
def test_round_trip_is_bit_exact(make, theirs, ours, dtype):
    producer, consumer = make(theirs, seed=1, dtype=dtype), make(ours, seed=2, dtype=dtype)
    before = consumer.tokens()
    assert producer.save(35).error == ""
    result = consumer.load_from(producer, 35)
    assert (result.num_blocks_ok, result.error) == (-(-35 // theirs), "")
    assert_filled(consumer, before, producer, 0, 35)


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 12, 15, 16, 17, 48, 64])
@pytest.mark.parametrize(("theirs", "ours"), SIZES)
def test_any_length(make, theirs, ours, num_tokens):
    producer, consumer = make(theirs, seed=1), make(ours, seed=2)
    before = consumer.tokens()
    producer.save(num_tokens)
    assert consumer.load_from(producer, num_tokens).error == ""
    assert_filled(consumer, before, producer, 0, num_tokens)


@pytest.mark.parametrize("num_local_blocks", [1, 2])
@pytest.mark.parametrize(("theirs", "ours"), SIZES)
def test_what_is_here_already_is_left_alone(make, theirs, ours, num_local_blocks):
    producer, consumer = make(theirs, seed=1), make(ours, seed=2)
    before, num_local = consumer.tokens(), num_local_blocks * ours
    producer.save(35)
    assert consumer.load_from(producer, 35, num_local).error == ""
    assert_filled(consumer, before, producer, num_local, 35)


@pytest.mark.parametrize(("theirs", "ours"), SIZES)
def test_chunk_by_chunk(make, theirs, ours):
    producer, consumer = make(theirs, seed=1), make(ours, seed=2)
    before = consumer.tokens()
    producer.save(35)
    for index in range(-(-35 // theirs)):
        consumer.start_load_of(producer, index, index + 1, 35)
        assert consumer.wait().error == ""
        assert_filled(consumer, before, producer, 0, min(35, (index + 1) * theirs))


@pytest.mark.parametrize(("theirs", "ours"), SIZES)
def test_through_little_memory_on_several_threads(make, theirs, ours):
    producer, consumer = make(theirs, seed=1), make(ours, seed=2, threads=3, frames=1)
    before = consumer.tokens()
    producer.save(NUM_TOKENS - 1)
    assert consumer.load_from(producer, NUM_TOKENS - 1).error == ""
    assert_filled(consumer, before, producer, 0, NUM_TOKENS - 1)


def format_of(producer: Rig) -> BlockFormat:
    return BlockFormat(FINGERPRINT, layout_of(producer.kv_cache))


@contextmanager
def frame_on(medium: Medium, producer: Rig, key: BlockHash) -> Iterator[bytearray]:
    """The frame of a block of the producer's; what it is changed to is on the medium afterwards."""
    with closing(medium.store()) as store:
        store.open(format_of(producer).namespace, format_of(producer).frame_bytes)
        frame = bytearray(format_of(producer).frame_bytes)
        assert store.read_into([key], [memoryview(frame)]) == [len(frame)]
        yield frame
        store.discard(key)
        store.write([key], [memoryview(frame)])


@pytest.mark.parametrize("bad", range(3))
@pytest.mark.parametrize(("theirs", "ours"), [(4, 16), (16, 4)])
def test_corrupt_block_is_noticed_left_out_and_forgotten(make, medium, theirs, ours, bad):
    producer, consumer = make(theirs, seed=1), make(ours, seed=2)
    before = consumer.tokens()
    producer.save(35)
    with frame_on(medium, producer, producer.hashes(35)[bad]) as frame:
        frame[-1] ^= 4

    result = consumer.load_from(producer, 35)

    assert (result.num_blocks_ok, result.error) == (bad, "block_corrupt")
    assert_filled(consumer, before, producer, 0, bad * theirs)
    result = make(ours, seed=2).load_from(producer, 35)
    assert (result.num_blocks_ok, result.error) == (bad, "block_missing")


def test_a_frame_of_our_size_is_not_the_producers(make, medium):
    """A prompt of four tokens is one block in both sizes, under one hash."""
    producer, consumer = make(16, seed=1), make(4, seed=2)
    assert producer.hashes(4) == consumer.hashes(4)
    producer.save(4)
    with closing(medium.store()) as store:
        store.open(format_of(producer).namespace, 1)
        store.discard(producer.hashes(4)[0])
        sealed = bytearray(format_of(consumer).frame_bytes)
        format_of(consumer).seal(memoryview(sealed), consumer.hashes(4)[0], 4)
        store.open(format_of(producer).namespace, len(sealed))
        store.write(producer.hashes(4), [memoryview(sealed)])
    before = consumer.tokens()
    assert consumer.load_from(producer, 4).error == "block_corrupt"
    assert torch.equal(consumer.tokens(), before)


def test_blocks_of_different_sizes_do_not_meet_under_one_hash(make):
    small, large = make(4, seed=1), make(16, seed=2)
    small.save(4)
    reader = make(4, seed=3)
    assert reader.load_from(large, 4).error == "block_missing"
    large.save(4)
    before = reader.tokens()
    assert reader.load_from(large, 4).error == ""
    assert_filled(reader, before, large, 0, 4)


def test_tenants_and_prompts_do_not_meet(make):
    producer, consumer = make(16), make(4)
    producer.save(35)
    producer.hashes = lambda num_tokens: Rig.hashes(producer, num_tokens, prompt_seed=1)
    assert consumer.load_from(producer, 35).error == "block_missing"


def test_failing_medium_fails_a_load(medium, make):
    producer = make(16)
    producer.save(35)
    connector, store = gated_connector(medium)
    consumer = Rig(connector, 4, torch.float32, seed=2)
    store.fail("read_into", StoreError("unreachable"))
    assert consumer.load_from(producer, 35).error == "store_failed"
    store.fail("read_into", None)
    assert consumer.load_from(producer, 35).error == ""
    connector.close()


def test_cancelled_load_settles_while_the_medium_stalls_and_writes_nothing_later(medium, make):
    producer = make(16)
    producer.save(35)
    connector, store = gated_connector(medium)
    consumer = Rig(connector, 4, torch.float32, seed=2)
    before = consumer.tokens()
    with store.gate("read_into") as gate:
        job = consumer.start_load_of(producer, 0, 3, 35)
        gate.wait_for_arrival()
        connector.cancel(job)
        assert consumer.wait() == TransferResult(job, 0, "transfer_cancelled")
    connector.close()  # the thread is back from the stalled read
    assert torch.equal(consumer.tokens(), before)


def test_our_own_blocks_beside_those_of_two_producers(make):
    ours, small, large = make(8, seed=1), make(4, seed=2), make(16, seed=3)
    for rig in (ours, small, large):
        rig.save(40)
    reader = make(8, seed=4)
    for producer in (small, large, small, ours, large, ours):
        before = reader.tokens()
        assert reader.load_from(producer, 40).error == ""
        assert_filled(reader, before, producer, 0, 40)

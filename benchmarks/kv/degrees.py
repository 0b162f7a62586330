"""Handoffs between engines cut into ranks, for `benchmarks.parallel`.

Each rank is a process with its KV heads and its part of the connector, as in an engine of several ranks; the drivers of
both engines are in this process. A handoff begins when the forward has ended, and is over when all blocks are verified.
Several pairs of degrees are measured in turn, and hand over the same bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

from benchmarks.kv.medium import open_medium
from common.engine.config import CacheConfig, EngineConfig, KVConnectorConfig, ParallelConfig
from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.contract.layout import KVLayout
from common.engine.contract.masks import MaskSource
from common.engine.contract.model import ModelFacts
from common.engine.contract.step import FinishedStep, ModelRunnerOutput, SchedulerOutput
from common.engine.executor.fake import FAKE_FINGERPRINT
from common.engine.executor.multiproc.executor import MultiprocExecutor
from common.engine.kv_connector import BlockTransfer, Destination, OpenConnector, TransferResult
from common.engine.worker.connector import create_connector
from common.types import BlockHash, RequestId

BLOCK_SIZE = 16
NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 28, 8, 128  # of Qwen3-0.6B, in bfloat16: blocks of 1792 KiB
BLOCK_BYTES = NUM_LAYERS * 2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM * 2
_TIMEOUT_S = 120.0
DEGREES = ((1, 1), (2, 1), (1, 2), (2, 2))


@dataclasses.dataclass(frozen=True, slots=True)
class DegreeHandoffs:
    """Seconds of handoffs between engines of these numbers of ranks."""

    num_producer_ranks: int
    num_consumer_ranks: int
    num_bytes: int  # of each
    seconds: list[float]

    @property
    def median_s(self) -> float:
        """The median of a handoff."""
        return statistics.median(self.seconds)


def measure_degrees(connector: str, repeats: int, num_blocks: int = 32) -> list[DegreeHandoffs]:
    """Measures handoffs of this many blocks between pairs of engines, in turn."""
    with ExitStack() as stack:
        path = stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-", dir="/dev/shm"))
        medium = stack.enter_context(open_medium(connector, Path(path)))
        sizes = {size for pair in DEGREES for size in pair}
        producers, consumers = (
            {
                size: stack.enter_context(_open_engine(connector, dict(medium.options), size, num_blocks + 1))
                for size in sizes
            }
            for _ in range(2)
        )
        results = [DegreeHandoffs(*pair, num_blocks * BLOCK_BYTES, []) for pair in DEGREES]
        for repeat in range(repeats + 1):
            for number, result in enumerate(results):
                seed = repeat * len(results) + number
                producer, consumer = producers[result.num_producer_ranks], consumers[result.num_consumer_ranks]
                seconds = _hand_over(producer, consumer, num_blocks, seed)
                medium.clean()
                if repeat:  # the first connects
                    result.seconds.append(seconds)
    return results


class _Engine:
    """The driver's end of an engine's connector."""

    def __init__(self, opened: OpenConnector, settled: int) -> None:
        self.connector, self.facts = opened
        self._settled = settled

    def wait_settled(self) -> list[TransferResult]:
        """Jobs that have settled since; waits for the first."""
        os.eventfd_read(self._settled)
        results = self.connector.poll()
        if errors := [result.error for result in results if result.error]:
            raise SystemExit(f"a handoff failed: {errors[0]}")
        return results


@contextmanager
def _open_engine(
    connector: str, options: dict[str, str | int | float | bool], num_ranks: int, num_blocks: int
) -> Iterator[_Engine]:
    config = EngineConfig(
        cache=CacheConfig(block_size=BLOCK_SIZE),
        connector=KVConnectorConfig(factory="kv_store.registry:create_connector", name=connector, options=options),
        parallel=ParallelConfig(tensor_parallel_size=num_ranks, step_timeout_s=_TIMEOUT_S),
    )
    executor = MultiprocExecutor(config, f"benchmarks.kv.degrees:{create_rank.__name__}")
    settled = os.eventfd(0)
    try:
        executor.load_model()
        executor.initialize_kv_cache(num_blocks)
        opened = executor.open_connector(lambda: os.eventfd_write(settled, 1))
        assert opened is not None
        yield _Engine(opened, settled)
    finally:
        executor.close()
        os.close(settled)


def _hand_over(producer: _Engine, consumer: _Engine, num_blocks: int, seed: int) -> float:
    """Seconds of one handoff, saved in parts and loaded as they come."""
    order = random.Random(num_blocks)  # the same in every handoff, as a pool's order changes little
    own_ids, to_ids = list(range(1, num_blocks + 1)), list(range(1, num_blocks + 1))
    order.shuffle(own_ids)
    order.shuffle(to_ids)
    hashes = [BlockHash(hashlib.blake2b(f"{seed}/{each}".encode(), digest_size=16).digest()) for each in own_ids]
    size = producer.facts.part_blocks or num_blocks
    parts = [slice(first, first + size) for first in range(0, num_blocks, size)]
    started = time.monotonic()
    for number, part in enumerate(parts):
        to = Destination(consumer.facts.address, tuple(to_ids[part])) if producer.facts.is_direct else None
        producer.connector.start_save(_transfer(number, own_ids[part], hashes[part], destination=to))
    num_loading = 0
    num_saved = 0
    while num_saved < len(parts):
        for result in producer.wait_settled():
            part = parts[result.job_id]
            load = _transfer(result.job_id, to_ids[part], hashes[part], digests=result.digests)
            consumer.connector.start_load(load)
            num_saved += 1
            num_loading += 1
    while num_loading:
        num_loading -= len(consumer.wait_settled())
    return time.monotonic() - started


def _transfer(
    job_id: int,
    block_ids: Sequence[int],
    hashes: Sequence[BlockHash],
    destination: Destination | None = None,
    digests: tuple[bytes, ...] = (),
) -> BlockTransfer:
    request_id = RequestId("measured")
    return BlockTransfer(
        job_id, request_id, tuple(block_ids), tuple(hashes), BLOCK_SIZE, destination=destination, digests=digests
    )


class _Rank:
    """See RankWorker. It has a KV cache and no model."""

    def __init__(self, config: EngineConfig, rank: int) -> None:
        assert config.connector is not None
        self._rank = rank
        self._connector = create_connector(config.connector)
        group = KVGroupSpec(tuple(range(NUM_LAYERS)), NUM_KV_HEADS, HEAD_DIM, HEAD_DIM, "bfloat16")
        self._layout = KVLayout(BLOCK_SIZE, (group,), config.parallel.tensor_parallel_size)

    def load_model(self) -> ModelFacts:
        """See RankWorker."""
        return ModelFacts(
            fingerprint=FAKE_FINGERPRINT,
            layout=self._layout,
            vocab_size=1,
            max_model_len=1 << 20,
            eos_token_ids=frozenset(),
            bytes_per_block=BLOCK_BYTES // self._layout.tensor_parallel_size,
            available_kv_bytes=1 << 40,
            device="cpu",
            dtype="bfloat16",
        )

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """See RankWorker. Every page is in place."""
        num_heads = len(self._layout.heads_by_rank[self._rank])
        shape = (num_blocks, NUM_LAYERS, 2, num_heads, BLOCK_SIZE, HEAD_DIM)
        self._kv_cache = torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16).view(torch.bfloat16)

    def open_connector(self, on_settled: Callable[[], None]) -> OpenConnector:
        """See RankWorker."""
        facts = self._connector.register_kv_cache(
            self._kv_cache, FAKE_FINGERPRINT, self._layout, on_settled, rank=self._rank
        )
        return OpenConnector(self._connector, facts)

    def submit(self, step: SchedulerOutput, masks: MaskSource) -> FinishedStep:
        """See RankWorker. There are no steps."""
        return FinishedStep(ModelRunnerOutput())

    def close(self) -> None:
        """See RankWorker."""
        self._connector.close()


def create_rank(config: EngineConfig, rank: int, rendezvous: str) -> _Rank:
    """A RankWorkerFactory."""
    return _Rank(config, rank)

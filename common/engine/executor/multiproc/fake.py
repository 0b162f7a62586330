"""Ranks of a FakeExecutor in processes of their own."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import ProcessGroupGloo

from common.engine.config import EngineConfig
from common.engine.contract.integrity import KnownRequests
from common.engine.contract.masks import MaskSource
from common.engine.contract.model import ModelFacts
from common.engine.contract.step import FinishedStep, SchedulerOutput
from common.engine.devices.ranks import collectives_of
from common.engine.executor.fake import FAKE_FINGERPRINT, FakeExecutor, MemoryConnector
from common.engine.executor.fake_worker import FakeWorker, Sums
from common.engine.executor.multiproc.executor import MultiprocExecutor
from common.engine.executor.multiproc.rendezvous import GRACE_S, open_rendezvous
from common.engine.kv_connector import OpenConnector, WorkerConnector
from common.engine.worker.connector import create_connector

_NUM_KV_HEADS = 12  # of engines of all degrees, which hand over to each other


class FakeRank:
    """See RankWorker. One rank of a FakeExecutor."""

    adapters = None

    def __init__(self, config: EngineConfig, rank: int, rendezvous: str, connector: WorkerConnector) -> None:
        size = config.parallel.tensor_parallel_size
        self._rank = rank
        executor = FakeExecutor(block_size=config.cache.block_size, num_ranks=size, num_kv_heads=_NUM_KV_HEADS)
        self._facts = executor.load_model()
        self._connector = connector
        self._worker = FakeWorker(self._facts, rank, connector)
        timeout = timedelta(seconds=config.parallel.step_timeout_s + GRACE_S)
        self._ranks = ProcessGroupGloo(open_rendezvous(rendezvous, size).store, rank, size, timeout)

    def load_model(self) -> ModelFacts:
        """See RankWorker."""
        return self._facts

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """See RankWorker."""
        self._worker.initialize_kv_cache(num_blocks)

    def open_connector(self, on_settled: Callable[[], None]) -> OpenConnector:
        """See RankWorker."""
        return self._worker.open_connector(FAKE_FINGERPRINT, self._facts.layout, on_settled)

    def submit(self, step: SchedulerOutput, masks: MaskSource) -> FinishedStep:
        """See RankWorker."""
        return FinishedStep(self._worker.sample(self._over_all_ranks(self._worker.compute(step))))

    def check(self, known: KnownRequests) -> list[str]:
        """See RankWorker."""
        return self._worker.check(known)

    def close(self) -> None:
        """See RankWorker."""
        self._connector.close()

    def _over_all_ranks(self, sums: Sums) -> Sums:
        own = [each - 2**63 for request_sums in sums.values() for each in request_sums]
        if not own:
            return sums
        # The constant that makes them fit has to be taken out as often as it was put in; int64 wraps around.
        totals = torch.tensor(own, dtype=torch.int64)
        self.all_reduce(totals)
        excess, rest = 2**63 * self._facts.layout.tensor_parallel_size, iter(totals.tolist())
        return {request_id: [(next(rest) + excess) % 2**64 for _ in each] for request_id, each in sums.items()}

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums over all ranks, in place. Raises EngineDeadError if one is gone."""
        with collectives_of(f"rank {self._rank} of {self._facts.layout.tensor_parallel_size}"):
            self._ranks.allreduce([tensor]).wait()  # type: ignore[attr-defined]


def create_fake_rank(config: EngineConfig, rank: int, rendezvous: str) -> FakeRank:
    """RankWorkerFactory of a FakeRank."""
    connector = MemoryConnector() if config.connector is None else create_connector(config.connector)
    return FakeRank(config, rank, rendezvous, connector)


def create_fake_multiproc_executor(config: EngineConfig) -> MultiprocExecutor:
    """ExecutorFactory of a MultiprocExecutor of FakeRanks."""
    return MultiprocExecutor(config, f"{__name__}:{create_fake_rank.__name__}")

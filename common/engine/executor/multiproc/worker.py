"""The worker of a rank that has a part of a model."""

from __future__ import annotations

from common.engine.config import EngineConfig
from common.engine.devices.ranks import OneRank
from common.engine.executor.multiproc.rendezvous import open_rendezvous
from common.engine.model.ranks import GlooRanks
from common.engine.worker.worker import Worker

GRACE_S = 5.0  # the driver's time for a step is over before that of a collective: it knows which rank is stopped


def create_worker(config: EngineConfig, rank: int, rendezvous: str) -> Worker:
    """See RankWorkerFactory."""
    size = config.parallel.tensor_parallel_size
    if size == 1:
        return Worker(config, rank, OneRank())
    (store, address), timeout_s = open_rendezvous(rendezvous, size), config.parallel.step_timeout_s + GRACE_S
    return Worker(config, rank, GlooRanks(store, rank, size, address=address, timeout_s=timeout_s))

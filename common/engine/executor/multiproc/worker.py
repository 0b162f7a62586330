"""The worker of a rank that has a part of a model."""

from __future__ import annotations

from common.engine.config import EngineConfig
from common.engine.worker.worker import Worker
from common.errors import ConfigError


def create_worker(config: EngineConfig, rank: int, rendezvous: str) -> Worker:
    """See RankWorkerFactory."""
    if (num_ranks := config.parallel.tensor_parallel_size) > 1:
        setting = "tensor_parallel_size"
        raise ConfigError(f"{setting}: {num_ranks}, but models have one rank", param=setting)
    return Worker(config, rank)

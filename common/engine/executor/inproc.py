"""The executor of one worker in this process."""

from __future__ import annotations

from collections.abc import Callable

from common.engine.config import EngineConfig
from common.engine.executor.base import ModelFacts
from common.engine.kv_connector import ConnectorFacts
from common.engine.scheduler.output import ModelRunnerOutput, SchedulerOutput
from common.engine.worker.worker import Worker


class InprocExecutor:
    """See Executor."""

    def __init__(self, config: EngineConfig) -> None:
        self._worker = Worker(config)

    def load_model(self) -> ModelFacts:
        """See Executor."""
        return self._worker.load_model()

    def initialize_kv_cache(self, num_blocks: int, on_transfer_settled: Callable[[], None]) -> ConnectorFacts:
        """See Executor."""
        return self._worker.initialize_kv_cache(num_blocks, on_transfer_settled)

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """See Executor."""
        return self._worker.execute(step)

    def close(self) -> None:
        """See Executor."""
        self._worker.close()

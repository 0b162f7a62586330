"""The executor of one worker in this process."""

from __future__ import annotations

from collections.abc import Callable

from common.engine.config import EngineConfig
from common.engine.contract.adapters import Adapters
from common.engine.contract.integrity import KnownRequests
from common.engine.contract.masks import MaskSource
from common.engine.contract.model import ModelFacts
from common.engine.contract.step import RunningStep, SchedulerOutput
from common.engine.kv_connector import OpenConnector
from common.engine.phases import PhaseClock
from common.engine.worker.worker import Worker
from common.errors import ConfigError


class InprocExecutor:
    """See Executor."""

    rank_figures = ()
    max_concurrent_batches = 1

    def __init__(self, config: EngineConfig) -> None:
        for setting in ("tensor_parallel_size", "pipeline_parallel_size"):
            if (size := getattr(config.parallel, setting)) > 1:
                raise ConfigError.of(setting, f"{size}, but executor inproc has one rank")
        self._worker = Worker(config)

    @property
    def adapters(self) -> Adapters | None:
        """See Executor."""
        return self._worker.adapters

    def share_phases(self, phases: PhaseClock) -> None:
        """See Executor."""
        self._worker.phases = phases

    def watch(self, on_failure: Callable[[Exception], None]) -> None:
        """See Executor. The worker fails in its calls only."""

    def load_model(self) -> ModelFacts:
        """See Executor."""
        return self._worker.load_model()

    def initialize_kv_cache(self, num_blocks: int) -> None:
        """See Executor."""
        self._worker.initialize_kv_cache(num_blocks)

    def measure_steps(self) -> list[tuple[int, float]]:
        """See Executor."""
        return self._worker.measure_steps()

    def open_connector(self, on_settled: Callable[[], None]) -> OpenConnector | None:
        """See Executor."""
        return self._worker.open_connector(on_settled)

    @property
    def runs_ahead(self) -> bool:
        """See Executor."""
        return self._worker.runs_ahead

    @property
    def num_failed_recordings(self) -> int:
        """See Executor."""
        return self._worker.num_failed_recordings

    def submit(self, step: SchedulerOutput, masks: MaskSource) -> RunningStep:
        """See Executor."""
        return self._worker.submit(step, masks)

    def check(self, known: KnownRequests) -> list[str]:
        """See Executor."""
        return self._worker.check(known)

    def close(self) -> None:
        """See Executor."""
        self._worker.close()

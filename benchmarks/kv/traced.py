"""An engine that notes when its steps begin and end, for `benchmarks.harness.pods`.

The notes are lines of two monotonic times in seconds, in the file that the environment names.
"""

from __future__ import annotations

import os
import time

from common.engine.config import EngineConfig
from common.engine.contract.masks import MaskSource
from common.engine.contract.step import RunningStep, SchedulerOutput
from common.engine.executor.inproc import InprocExecutor

TRACE_VARIABLE = "BATON_BENCHMARK_TRACE"
EXECUTOR = "benchmarks.kv.traced:TracedExecutor"


class TracedExecutor(InprocExecutor):
    """The engine's own, with a watch on steps that compute something."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._trace = os.open(os.environ[TRACE_VARIABLE], os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o600)

    def submit(self, step: SchedulerOutput, masks: MaskSource) -> RunningStep:
        """See Executor."""
        started = time.monotonic()
        running = super().submit(step, masks)
        if step.num_scheduled_tokens:
            os.write(self._trace, f"{started} {time.monotonic()}\n".encode())
        return running

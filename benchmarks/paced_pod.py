"""An engine whose steps take the time that a profile says, for `benchmarks.harness.pods`.

It runs the demo model, and then sleeps until the step of the profile's engine would be over, so that a machine which is
busy with other things disturbs it little. The profile's file is in the variable BATON_PACE.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from common.engine.config import EngineConfig
from common.engine.contract.masks import MaskSource
from common.engine.contract.step import FinishedStep, RunningStep, SchedulerOutput
from common.engine.executor.inproc import InprocExecutor
from common.step_budget import prefill_work
from planning.profile import load_profile
from planning.simulator.hardware import Step
from planning.simulator.pod import measured_steps

EXECUTOR = "benchmarks.paced_pod:PacedExecutor"
PACE_VARIABLE = "BATON_PACE"
_PARITY = 0.5 / (prefill_work(1.0, 0.0) - 1.0)  # pairs of tokens that are as much work as one token


class PacedExecutor(InprocExecutor):
    """See Executor."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._steps = load_profile(Path(os.environ[PACE_VARIABLE])).steps
        self._budget = config.scheduler.max_num_batched_tokens

    def measure_steps(self) -> list[tuple[int, float]]:
        """See Executor."""
        return measured_steps(self._steps, self._budget)

    def submit(self, step: SchedulerOutput, masks: MaskSource) -> RunningStep:
        """See Executor."""
        if not step.num_scheduled_tokens:  # the engine only takes notes, as one of any speed does at once
            return super().submit(step, masks)
        due = time.perf_counter() + self._steps.seconds(_described(step))
        outcome = super().submit(step, masks).result()
        time.sleep(max(0.0, due - time.perf_counter()))
        return FinishedStep(outcome)


def _described(step: SchedulerOutput) -> Step:
    counts = step.num_scheduled_tokens.values()
    num_decoding = sum(count == 1 for count in counts)
    total = step.total_num_scheduled_tokens
    attended = max(0.0, (step.work - total) * _PARITY)
    return Step(total - num_decoding, num_decoding, len(counts), step.num_context_tokens, attended)

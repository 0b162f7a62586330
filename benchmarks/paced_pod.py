"""A pod whose steps take the time that a profile says: `python -m benchmarks.paced_pod prefill|decode [options]`.

It runs the demo model, and then sleeps until the step of the profile's engine would be over, so that a machine which is
busy with other things disturbs it little. The profile's file is in the variable BATON_PACE.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from common.config import parse
from common.engine.client.mp import AsyncMPClient
from common.engine.config import EngineConfig, ParallelConfig
from common.engine.contract.masks import MaskSource
from common.engine.contract.step import FinishedStep, RunningStep, SchedulerOutput
from common.engine.executor.inproc import InprocExecutor
from common.pod.config import PodConfig
from common.pod.runtime import PodRuntime, run_pod
from common.step_budget import prefill_work
from decode_service.config import DecodeConfig
from decode_service.front import DecodeFront
from planning.profile import load_profile
from planning.simulator.hardware import Step
from planning.simulator.pod import measured_steps
from prefill_service.config import PrefillConfig
from prefill_service.front import PrefillFront

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


def _engine_config(settings: PodConfig) -> EngineConfig:
    return msgspec.structs.replace(
        settings.engine_config(), parallel=ParallelConfig(executor="benchmarks.paced_pod:PacedExecutor")
    )


def main(argv: Sequence[str]) -> int:
    """Runs the pod until SIGTERM."""
    role, *options = argv
    if role == "prefill":
        prefill = parse(PrefillConfig, options, prog=role, section=role).named(role)
        engine = AsyncMPClient(_engine_config(prefill), name=prefill.pod_id)
        return run_pod(PodRuntime("prefill", prefill, engine, lambda pod: PrefillFront(pod, prefill)))
    decode = parse(DecodeConfig, options, prog=role, section=role).named(role)
    engine = AsyncMPClient(_engine_config(decode), name=decode.pod_id)
    return run_pod(PodRuntime("decode", decode, engine, lambda pod: DecodeFront(pod, decode)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

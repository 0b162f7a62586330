"""The engine of a paced pod takes the time of its profile for what it computes, and none to take notes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from benchmarks.paced_pod import PACE_VARIABLE, PacedExecutor
from common.engine.config import EngineConfig, ModelConfig
from common.engine.contract.masks import no_masks
from common.engine.contract.step import FinishedStep, ModelRunnerOutput, SchedulerOutput
from common.engine.executor.inproc import InprocExecutor
from common.types import RequestId

PROFILE = Path(__file__).parents[1] / "planning" / "profile.json"


def test_only_a_step_that_computes_something_takes_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PACE_VARIABLE, str(PROFILE))
    monkeypatch.setattr(InprocExecutor, "__init__", lambda self, config: None)
    monkeypatch.setattr(InprocExecutor, "submit", lambda self, step, masks: FinishedStep(ModelRunnerOutput()))
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    executor = PacedExecutor(EngineConfig(model=ModelConfig(model="demo")))
    executor.submit(SchedulerOutput(), no_masks)
    assert slept == []
    step = SchedulerOutput(num_scheduled_tokens={RequestId("r"): 64}, total_num_scheduled_tokens=64)
    executor.submit(step, no_masks)
    assert len(slept) == 1
    assert slept[0] > 0

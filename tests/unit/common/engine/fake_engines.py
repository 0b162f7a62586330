"""Executors for tests, by import string or as objects."""

from __future__ import annotations

from common.engine.config import EngineConfig
from common.engine.contract.model import ModelFacts
from common.engine.contract.step import ModelRunnerOutput, SchedulerOutput
from common.engine.executor.fake import FakeExecutor
from common.errors import ModelLoadError

MODULE = "tests.unit.common.engine.fake_engines"


class FailingExecutor(FakeExecutor):
    """Fails in the first step that computes something."""

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        if step.num_scheduled_tokens:
            raise MemoryError("out of device memory")
        return super().execute(step)


class UnloadableExecutor(FakeExecutor):
    def load_model(self) -> ModelFacts:
        raise ModelLoadError("model: /nowhere has no weights", param="model")


class BuggyExecutor(FakeExecutor):
    def load_model(self) -> ModelFacts:
        raise ZeroDivisionError("a bug")


def create_failing(config: EngineConfig) -> FailingExecutor:
    return FailingExecutor(block_size=config.cache.block_size)


def create_unloadable(config: EngineConfig) -> UnloadableExecutor:
    return UnloadableExecutor(block_size=config.cache.block_size)


def create_buggy(config: EngineConfig) -> BuggyExecutor:
    return BuggyExecutor(block_size=config.cache.block_size)


def create_slow(config: EngineConfig) -> FakeExecutor:
    """Steps long enough for something to happen during one."""
    return FakeExecutor(block_size=config.cache.block_size, step_s=0.02)

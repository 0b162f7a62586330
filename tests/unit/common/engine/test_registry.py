"""Parts of an engine by name, also those from outside the package."""

from __future__ import annotations

import pytest

from common.engine.config import EngineConfig, ParallelConfig
from common.engine.executor.fake import FakeExecutor
from common.engine.executor.registry import EXECUTORS
from common.errors import ConfigError


def test_parts_are_found_by_name_or_place() -> None:
    assert isinstance(EXECUTORS.find("fake")(EngineConfig()), FakeExecutor)
    assert EXECUTORS.find(f"{__name__}:FakeExecutor") is FakeExecutor


def test_several_ranks_have_a_process_each() -> None:
    assert ParallelConfig().executor_name == "inproc"
    assert ParallelConfig(tensor_parallel_size=2).executor_name == "multiproc"
    assert ParallelConfig(tensor_parallel_size=2, executor="fake-ranks").executor_name == "fake-ranks"


@pytest.mark.parametrize("name", ["ray", "nowhere:create", "common.engine.executor.fake:nothing"])
def test_what_is_not_there_is_a_wrong_setting(name: str) -> None:
    config = EngineConfig(parallel=ParallelConfig(executor=name))
    with pytest.raises(ConfigError, match=f"executor: .*{name.split(':')[0]}") as caught:
        EXECUTORS.find(config.parallel.executor)
    assert caught.value.param == "executor"

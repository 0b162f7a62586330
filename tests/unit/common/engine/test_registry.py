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


@pytest.mark.parametrize("name", ["ray", "nowhere:create", "common.engine.executor.fake:nothing"])
def test_what_is_not_there_is_a_wrong_setting(name: str) -> None:
    config = EngineConfig(parallel=ParallelConfig(executor=name))
    with pytest.raises(ConfigError, match=f"executor: .*{name.split(':')[0]}") as caught:
        EXECUTORS.find(config.parallel.executor)
    assert caught.value.param == "executor"

"""The executors by name: values of the setting `executor`."""

from __future__ import annotations

from collections.abc import Callable

from common.engine.config import EngineConfig
from common.engine.executor.base import Executor
from common.engine.registry import Registry

ExecutorFactory = Callable[[EngineConfig], Executor]

EXECUTORS: Registry[ExecutorFactory] = Registry(
    "executor",
    {
        "inproc": "common.engine.executor.inproc:InprocExecutor",
        "multiproc": "common.engine.executor.multiproc.executor:MultiprocExecutor",
        "ray": "common.engine.executor.multiproc.ray_placement:create_ray_executor",
        "fake": "common.engine.executor.fake:create_fake_executor",
        "fake-groups": "common.engine.executor.fake:create_fake_groups_executor",
        "fake-ranks": "common.engine.executor.fake:create_fake_ranks_executor",
        "fake-direct": "common.engine.executor.fake:create_fake_direct_executor",
        "fake-multiproc": "common.engine.executor.multiproc.fake:create_fake_multiproc_executor",
    },
)

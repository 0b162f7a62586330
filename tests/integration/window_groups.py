"""An executor of real models whose layers form several KV groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd

from common.engine.config import EngineConfig
from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.devices.attention import KVSpec
from common.engine.executor.inproc import InprocExecutor
from common.engine.executor.multiproc import worker
from common.engine.executor.multiproc.executor import MultiprocExecutor
from common.engine.model.kv_groups import GroupLayers, all_in_one
from common.engine.worker.worker import Worker


def by_window(spec: KVSpec, windows: Sequence[int | None]) -> tuple[KVGroupSpec, ...]:
    """Groups of layers with the same window, or none, as large as possible."""
    (whole,) = all_in_one(spec, windows)
    layers: dict[int | None, list[int]] = {}
    for layer, window in enumerate(windows):
        layers.setdefault(window, []).append(layer)
    size = gcd(*map(len, layers.values()))
    return tuple(
        replace(whole, layers=tuple(own[start : start + size]), window=window, kind="window" if window else "full")
        for window, own in layers.items()
        for start in range(0, len(own), size)
    )


def each_alone(spec: KVSpec, windows: Sequence[int | None]) -> tuple[KVGroupSpec, ...]:
    """As many groups as layers."""
    return tuple(replace(whole, layers=(layer,)) for whole in all_in_one(spec, windows) for layer in whole.layers)


class WindowGroupsExecutor(InprocExecutor):
    """See Executor."""

    def __init__(self, config: EngineConfig, group_layers: GroupLayers = by_window) -> None:
        super().__init__(config)
        self._worker = Worker(config, group_layers=group_layers)


def create_worker(config: EngineConfig, rank: int, rendezvous: str) -> Worker:
    """RankWorkerFactory of a rank with groups by window."""
    return worker.create_worker(config, rank, rendezvous, by_window)


def create_executor(config: EngineConfig) -> WindowGroupsExecutor | MultiprocExecutor:
    """ExecutorFactory: of ranks in processes of their own if there are several."""
    if config.parallel.num_ranks == 1:
        return WindowGroupsExecutor(config)
    return MultiprocExecutor(config, f"{__name__}:{create_worker.__name__}")

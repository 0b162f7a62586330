"""An executor of real models whose layers form several KV groups."""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from common.engine.config import EngineConfig
from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.executor.inproc import InprocExecutor
from common.engine.model.kv_groups import GroupLayers, all_in_one
from common.engine.model.probe import ProbedModel
from common.engine.worker.worker import Worker


def by_window(probed: ProbedModel) -> tuple[KVGroupSpec, ...]:
    """Groups of layers with the same window, or none, as large as possible."""
    (whole,) = all_in_one(probed)
    layers: dict[int | None, list[int]] = {}
    for layer, args in enumerate(probed.attention_args):
        layers.setdefault(args.sliding_window, []).append(layer)
    size = gcd(*map(len, layers.values()))
    return tuple(
        replace(whole, layers=tuple(own[start : start + size]), window=window, kind="window" if window else "full")
        for window, own in layers.items()
        for start in range(0, len(own), size)
    )


def each_alone(probed: ProbedModel) -> tuple[KVGroupSpec, ...]:
    """As many groups as layers."""
    return tuple(replace(whole, layers=(layer,)) for whole in all_in_one(probed) for layer in whole.layers)


class WindowGroupsExecutor(InprocExecutor):
    """See Executor."""

    def __init__(self, config: EngineConfig, group_layers: GroupLayers = by_window) -> None:
        super().__init__(config)
        self._worker = Worker(config, group_layers=group_layers)

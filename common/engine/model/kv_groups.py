"""Which layers of a model share a block table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.devices.attention import KVSpec
from common.engine.model.stages import refused

GroupLayers = Callable[[KVSpec, Sequence[int | None]], tuple[KVGroupSpec, ...]]
"""Puts each layer of a model into a group, the same number of layers into each; given what a layer caches, and the
window of each layer. Fused decoders take one group only."""


def all_in_one(spec: KVSpec, windows: Sequence[int | None]) -> tuple[KVGroupSpec, ...]:
    """One group, out of which nothing falls: windows only hide what layers do not read."""
    dtype = str(spec.dtype).removeprefix("torch.")
    return (KVGroupSpec(tuple(range(len(windows))), spec.num_kv_heads, spec.head_dim, spec.value_head_dim, dtype),)


def share_blocks(groups: Sequence[KVGroupSpec], runs: Sequence[range]) -> tuple[int, ...]:
    """How many layers of each block are in each run of the model's layers. Raises ConfigError if that depends on the
    block's group."""
    first, *others = [tuple(sum(layer in run for layer in group.layers) for run in runs) for group in groups]
    for other in others:
        if other != first:
            raise refused(f"the stages have {list(first)} layers of one KV group, and {list(other)} of another")
    return first

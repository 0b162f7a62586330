"""Which layers of a model share a block table."""

from __future__ import annotations

from collections.abc import Callable

from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.model.probe import ProbedModel

GroupLayers = Callable[[ProbedModel], tuple[KVGroupSpec, ...]]
"""Puts each layer into a group, the same number of layers into each. Fused decoders take one group only."""


def all_in_one(probed: ProbedModel) -> tuple[KVGroupSpec, ...]:
    """One group, out of which nothing falls: windows only hide what layers do not read."""
    spec = probed.spec
    dtype = str(spec.dtype).removeprefix("torch.")
    return (KVGroupSpec(tuple(range(spec.num_layers)), spec.num_kv_heads, spec.head_dim, spec.value_head_dim, dtype),)

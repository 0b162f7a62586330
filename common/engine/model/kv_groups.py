"""Which layers of a model share a block table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from common.engine.config import DEFAULT_BLOCK_SIZE, MAX_BLOCK_SIZE
from common.engine.contract.kv_groups import KVGroupSpec, Window
from common.engine.devices.attention import KVSpec, name_of
from common.engine.model.stages import refused
from common.errors import ConfigError
from common.types import MAX_KV_GROUPS

_NEARLY_EQUAL = 1.5  # times as many layers of one kind as of another
_MOST_PARTS = 16  # blocks of a state: each is a group
_MOST_OF_A_KIND = 8  # groups: each has a block table, which is packed in each step

GroupLayers = Callable[[KVSpec, Sequence[Window | None]], tuple[KVGroupSpec, ...]]
"""Puts each layer of a model into a group; given what a layer caches, and the window of each layer."""


def all_in_one(spec: KVSpec, windows: Sequence[Window | None]) -> tuple[KVGroupSpec, ...]:
    """One group, out of which nothing falls: windows only hide what layers do not read."""
    dtype = name_of(spec.cache_dtype)
    return (KVGroupSpec(tuple(range(len(windows))), spec.num_kv_heads, spec.head_dim, spec.value_head_dim, dtype),)


def by_window(spec: KVSpec, windows: Sequence[Window | None]) -> tuple[KVGroupSpec, ...]:
    """Groups of layers with the same window; those without one come first, as what is known of a prompt elsewhere, by
    routers and draft models, is that of the first group. A group has as many layers as there are of the rarer kind, so
    that blocks of long texts, of which all are kept where there is no window, are small; as many as of the other kind
    if that is nearly the same. Groups of a kind that cannot be shared evenly differ by a layer. They take layers in
    turns, so that stages have equal shares of them where that is possible. Layers that all have one window are one
    group, out of which nothing falls: draft models and heads go by its blocks."""
    (whole,) = all_in_one(spec, windows)
    if not windows:
        return ()
    if len(set(windows)) == 1:
        return (whole,)
    layers: dict[Window | None, list[int]] = {}
    for layer, window in sorted(enumerate(windows), key=lambda each: each[1] is not None):
        layers.setdefault(window, []).append(layer)
    least, most = min(map(len, layers.values())), max(map(len, layers.values()))
    size = most if most < _NEARLY_EQUAL * least else max(least, -(-most // _MOST_OF_A_KIND))
    return tuple(
        replace(
            whole,
            layers=tuple(own[first :: -(-len(own) // size)]),
            kind="full" if window is None else "chunked" if window.is_chunked else "window",
            window=None if window is None else window.size,
        )
        for window, own in layers.items()
        for first in range(-(-len(own) // size))
    )


def default_block_size(groups: Sequence[KVGroupSpec], spec: KVSpec, state_bytes: Sequence[int]) -> int:
    """The tokens of a block if they are not set, the same on all ranks: doubled until a state takes few blocks, if that
    is possible. `state_bytes`: see `with_states`."""
    size = DEFAULT_BLOCK_SIZE
    if groups and state_bytes:
        least = max(state_bytes) / _MOST_PARTS  # of a layer of a block
        while size < MAX_BLOCK_SIZE and _layer_bytes(spec, groups[0].num_kv_heads, size) < least:
            size *= 2
    return size


def with_states(
    groups: tuple[KVGroupSpec, ...], spec: KVSpec, state_bytes: Sequence[int], block_size: int
) -> tuple[tuple[KVGroupSpec, ...], KVSpec]:
    """Adds groups for a state to those of a model, as many as it takes blocks, and returns them with what a block of
    this rank holds. `state_bytes`: of the state, by the layer of blocks that keeps them. Blocks of a model without
    attention have one layer, as large as the state. Raises ConfigError if there are more groups than keys of blocks can
    name."""
    most = max(state_bytes)
    if not groups:
        head_dim = -(-most // (2 * block_size * spec.cache_dtype.itemsize))
        spec = replace(spec, num_layers=1, head_dim=head_dim, value_head_dim=head_dim)
    (whole,) = all_in_one(spec, [None] * len(state_bytes))
    whole = replace(whole, kind="state", num_kv_heads=groups[0].num_kv_heads if groups else spec.num_kv_heads)
    layer_bytes = _layer_bytes(spec, whole.num_kv_heads, block_size)
    num_parts = -(-most // layer_bytes)
    if len(groups) + num_parts > MAX_KV_GROUPS:
        least = -(-most * block_size // (layer_bytes * (MAX_KV_GROUPS - len(groups))))
        takes = f"a state of {sum(state_bytes)} bytes takes {num_parts} blocks of {block_size} tokens"
        raise ConfigError.of("block_size", f"{takes}; at least {least}")
    starts = range(0, num_parts * layer_bytes, layer_bytes)
    sizes = [sum(max(0, min(layer_bytes, each - start)) for each in state_bytes) for start in starts]
    return (*groups, *(replace(whole, state_bytes=size) for size in sizes)), spec


def _layer_bytes(spec: KVSpec, num_kv_heads: int, block_size: int) -> int:
    """Bytes of a layer of a block, of all ranks."""
    return replace(spec, num_layers=1, num_kv_heads=num_kv_heads).bytes_per_block(block_size)


def share_blocks(groups: Sequence[KVGroupSpec], runs: Sequence[range]) -> tuple[int, ...]:
    """How many layers of each block are in each run of the model's layers. Raises ConfigError if that depends on the
    block's group, unless there is one run."""
    if not groups:
        return (0,)
    first, *others = [tuple(sum(layer in run for layer in group.layers) for run in runs) for group in groups]
    if len(runs) == 1:
        return max([first, *others])
    for other in others:
        if other != first:
            raise refused(f"the stages have {list(first)} layers of one KV group, and {list(other)} of another")
    return first

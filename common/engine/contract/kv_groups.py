"""A model's cache of its tokens. Pure data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """Layers that share a block table, as they read the same tokens. Blocks of all groups have one shape and come from
    one pool: in a block of the KV cache, layer i is that of `layers[i]` of the block's group. What a group with fewer
    layers than others leaves of its blocks is zero."""

    layers: tuple[int, ...]  # of the model
    num_kv_heads: int
    head_dim: int  # of keys; values are padded up to it
    value_head_dim: int
    dtype: str  # name of the torch.dtype
    kind: str = "full"  # see KV_GROUP_KINDS
    window: int | None = None  # a token sees itself and the `window - 1` tokens before it

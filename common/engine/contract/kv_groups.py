"""A model's cache of its tokens. Pure data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

KV_SCALE_BYTES = 2  # of the scale that a token's key, or value, of a head has where KV is quantised
QUANTIZED_KV = {"int8": "int8", "fp8": "float8_e4m3fn"}  # names of the torch.dtypes, by the setting's
_MAX_STATES = 4  # of a request, that blocks hold at once: it began with one, and leaves three on its way


class Window(NamedTuple):
    """How far back a token sees: to the `size - 1` tokens before it, or, if `is_chunked`, to the last multiple of
    `size`."""

    size: int
    is_chunked: bool = False

    def first(self, positions: Any) -> Any:
        """The first position that each token sees, of its own; below 0 where it could see more than there is."""
        return positions - positions % self.size if self.is_chunked else positions - (self.size - 1)


@dataclass(frozen=True, slots=True)
class KVGroupSpec:
    """Layers that share a block table, as they read the same tokens. Blocks of all groups have one shape and come from
    one pool: in a block of the KV cache, layer i is that of `layers[i]` of the block's group. What a group with fewer
    layers than others leaves of its blocks is zero.

    A group of kind "state" holds, in the block of a text's last tokens, a part of the state that layers keep after
    them, as bytes; all groups of the kind together hold the whole state. In each layer of the blocks are the states of
    a run of the model's layers. They come after all others."""

    layers: tuple[int, ...]  # of the model
    num_kv_heads: int
    head_dim: int  # of keys; values are padded up to it
    value_head_dim: int  # 0: keys alone are kept, of which values are a part
    dtype: str  # name of the torch.dtype in blocks; see QUANTIZED_KV
    kind: str = "full"  # see KV_GROUP_KINDS
    window: int | None = None  # of kinds "window" and "chunked", see `sees`
    state_bytes: int = 0  # of its part of the state

    @property
    def sees(self) -> Window | None:
        """The part of the text before it that a token sees; None: all."""
        return None if self.window is None else Window(self.window, self.kind == "chunked")

    @property
    def num_planes(self) -> int:
        """Planes of a layer in a block: keys and values, or keys alone."""
        return planes_of(self.value_head_dim)

    @property
    def row_numbers(self) -> int:
        """Numbers that a token takes in a plane of a head."""
        return row_numbers_of(self.dtype, self.head_dim)


def planes_of(value_head_dim: int) -> int:
    """Planes of a layer in a block, see KVGroupSpec."""
    return 2 if value_head_dim else 1


def row_numbers_of(dtype: str, head_dim: int) -> int:
    """Numbers of `dtype` that a token's key or value takes in a block: with its scale, if it is quantised."""
    return head_dim + (KV_SCALE_BYTES if dtype in QUANTIZED_KV.values() else 0)


def max_blocks_of(groups: Sequence[KVGroupSpec], num_spans: int) -> int:
    """The most blocks that a request holds at once for runs of tokens, each of which fills a block of every group."""
    num_states = sum(group.kind == "state" for group in groups)
    return num_spans * (len(groups) - num_states) + min(num_spans, _MAX_STATES) * num_states


def max_spans_in(groups: Sequence[KVGroupSpec], num_blocks: int, most: int) -> int:
    """How many such runs of a request fit into so many blocks; at most `most`."""
    num_states = sum(group.kind == "state" for group in groups)
    left = num_blocks - _MAX_STATES * len(groups)
    if left < 0:  # as many states as runs
        return min(most, num_blocks // len(groups))
    return min(most, _MAX_STATES + left // (len(groups) - num_states)) if len(groups) > num_states else most

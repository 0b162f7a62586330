"""KV groups: what falls out of each as a request goes on, and the order in which blocks of several groups are moved.

A run of `block_size` tokens is a span. Each group has a block of its own for it, until the span falls out of the group:
no further token reads it there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from common.engine.contract.kv_groups import KVGroupSpec, max_blocks_of
from common.engine.registry import Registry
from common.errors import ConfigError
from common.types import MAX_KV_GROUPS


class KVGroupKind(Protocol):
    """The rule of what falls out of a group."""

    is_state: bool  # blocks hold what is to be known after their last token; some spans have none

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that are not read by the token after `num_computed_tokens`, nor by any that follows it."""


class FullGroup:
    """Each token reads all before it."""

    is_state = False

    def __init__(self, spec: KVGroupSpec) -> None:
        pass

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """See KVGroupKind."""
        return 0


class WindowGroup:
    """Each token reads those that its window holds, which slides from token to token, or jumps from chunk to chunk."""

    is_state = False

    def __init__(self, spec: KVGroupSpec) -> None:
        if spec.sees is None or spec.sees.size < 1:
            raise ConfigError(f"a {spec.kind} group has a window of at least 1, not {spec.window}", param="window")
        self._window = spec.sees

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """See KVGroupKind."""
        first: int = self._window.first(num_computed_tokens)
        return max(0, first)


class StateGroup:
    """Each token reads what was kept after the one before it."""

    is_state = True

    def __init__(self, spec: KVGroupSpec) -> None:
        pass

    def num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """See KVGroupKind."""
        return max(0, num_computed_tokens - 1)


KV_GROUP_KINDS: Registry[Callable[[KVGroupSpec], KVGroupKind]] = Registry(
    "kv_group_kind",
    {
        "chunked": "common.engine.kv_cache.groups:WindowGroup",
        "full": "common.engine.kv_cache.groups:FullGroup",
        "state": "common.engine.kv_cache.groups:StateGroup",
        "window": "common.engine.kv_cache.groups:WindowGroup",
    },
)


class KVGroups:
    """The groups of a model, in the order of its specs."""

    def __init__(self, specs: Sequence[KVGroupSpec], block_size: int) -> None:
        """Raises ConfigError for a kind that is not known, and if there are more than keys of blocks can name."""
        if len(specs) > MAX_KV_GROUPS:
            raise ConfigError(f"the model has {len(specs)} KV groups, of which {MAX_KV_GROUPS} can be told apart")
        self.block_size = block_size
        self._specs = specs
        self.kinds = [KV_GROUP_KINDS.find(spec.kind)(spec) for spec in specs]
        self.is_one_full = [spec.kind for spec in specs] == ["full"]
        self.num_states = sum(kind.is_state for kind in self.kinds)
        assert all(kind.is_state for kind in self.kinds[len(specs) - self.num_states :]), "those of states are the last"

    def __len__(self) -> int:
        return len(self.kinds)

    def max_blocks_of(self, num_spans: int) -> int:
        """The most blocks that a request of so many spans holds at once."""
        return max_blocks_of(self._specs, num_spans)

    def first_spans(self, num_computed_tokens: int) -> list[int]:
        """The first span of each group that has not fallen out when so many tokens are computed."""
        if self.is_one_full:
            return [0]
        return [kind.num_skipped_tokens(num_computed_tokens) // self.block_size for kind in self.kinds]

    def order(self, num_computed_tokens: int) -> BlockOrder:
        """The order of the blocks that a request needs to go on from there."""
        return BlockOrder(self.first_spans(num_computed_tokens))


class BlockOrder:
    """Blocks by span, and those of a span by group; each group begins with a span of its own."""

    __slots__ = ("_first_spans",)

    def __init__(self, first_spans: Sequence[int]) -> None:
        self._first_spans = first_spans

    def num_blocks(self, num_spans: int) -> int:
        """Blocks of the first `num_spans` spans."""
        return sum(max(0, num_spans - first) for first in self._first_spans)

    def num_spans(self, num_blocks: int) -> int:
        """Leading spans of which all blocks are among the first `num_blocks`."""
        num_spans = min(self._first_spans) + num_blocks // len(self._first_spans)
        while self.num_blocks(num_spans + 1) <= num_blocks:
            num_spans += 1
        return num_spans

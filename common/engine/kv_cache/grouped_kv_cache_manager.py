"""Block tables of models with several KV groups, or with one out of which blocks fall."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from common.engine.kv_cache.block_pool import Block, BlockPool
from common.engine.kv_cache.cache_changes import CacheChanges
from common.engine.kv_cache.groups import KVGroups
from common.engine.kv_cache.kv_cache_manager import KeyedBlocks, KVCacheManager, Prefix, TokenSequence
from common.types import HASH_BYTES, BlockHash, RequestId, group_key


class _FirstGroupChanges(CacheChanges):
    """Routers know hashes of prompts, which are the keys of the first group."""

    __slots__ = ()

    def store(self, block_hash: BlockHash) -> None:
        if len(block_hash) == HASH_BYTES:
            super().store(block_hash)

    def remove(self, block_hash: BlockHash) -> None:
        if len(block_hash) == HASH_BYTES:
            super().remove(block_hash)


class _GroupTables:
    """One request's blocks, by span and by group. Those that fell out, or were never needed, are the null block."""

    __slots__ = ("last_states", "num_arriving_tokens", "num_at_first", "num_cached", "num_freed", "spans")

    def __init__(
        self, spans: list[list[Block]], num_cached: int, num_freed: list[int], num_arriving_tokens: int
    ) -> None:
        self.spans = spans
        self.num_arriving_tokens = num_arriving_tokens  # after which the blocks of states hold one; 0: none comes
        self.num_cached = num_cached  # leading spans that were offered to the prefix cache
        self.num_freed = num_freed  # leading blocks of each group that have fallen out
        self.num_at_first = len(spans)
        # Of each group of states: the last one kept on the way through the output that has fallen out, and its key.
        self.last_states: dict[int, tuple[Block, BlockHash]] = {}


class GroupedKVCacheManager(KVCacheManager):
    """See KVCacheManager. Its prefixes are the blocks of each span."""

    def __init__(self, num_blocks: int, groups: KVGroups, *, enable_prefix_caching: bool) -> None:
        super().__init__(num_blocks, groups, enable_prefix_caching=enable_prefix_caching)
        self._pool = BlockPool(num_blocks, _FirstGroupChanges())
        self._null_block = self._pool.null_block
        self._group_tables: dict[RequestId, _GroupTables] = {}

    def num_blocks_for(self, num_tokens: int) -> int:
        """See KVCacheManager."""
        return self.groups.max_blocks_of(self._num_spans(num_tokens))

    def num_shareable_blocks(self, request: TokenSequence) -> int:
        """See KVCacheManager. A producer needs the blocks that its consumer goes on with."""
        num_spans = super().num_shareable_blocks(request)
        leaving = request.num_leaving_tokens
        return num_spans if leaving is None else min(num_spans, leaving // self.block_size)

    def find_cached_prefix(self, request: TokenSequence) -> Prefix:
        """See KVCacheManager."""
        if not (self.enable_prefix_caching and request.reads_cache):
            return []
        num_spans = self.num_shareable_blocks(request)
        request.complete_block_hashes(self.block_size, num_spans)
        hashes = request.block_hashes
        find = self._pool.find
        num_spans = self._longest_prefix(0, num_spans, partial(self._has_span, hashes))
        firsts = self.groups.first_spans(num_spans * self.block_size)
        return [
            [
                self._null_block if span < first else find(group_key(hashes[span], group))
                for group, first in enumerate(firsts)
            ]
            for span in range(num_spans)
        ]

    def _has_span(self, hashes: Sequence[BlockHash], span: int, group: int) -> bool:
        return self._pool.find(group_key(hashes[span], group)) is not None

    def _longest_prefix(
        self, least: int, most: int, has: Callable[[int, int], bool], num_groups: int | None = None
    ) -> int:
        """Returns the largest number of spans with which a request can go on, of `least` to `most`, if it has those of
        the first `least` and `has` those of (span, group). `num_groups`: of the first so many groups only."""
        num_spans, before = most, -1
        while num_spans != before:  # until no group shortens it
            before = num_spans
            for group in range(len(self.groups) if num_groups is None else num_groups):
                num_spans = self._longest_of_group(group, least, num_spans, has)
        return num_spans

    def _longest_of_group(self, group: int, least: int, most: int, has: Callable[[int, int], bool]) -> int:
        kind, block_size = self.groups.kinds[group], self.block_size
        if not kind.num_skipped_tokens(most * block_size):
            return next((span for span in range(least, most) if not has(span, group)), most)
        end = span = most  # spans [span, end) are there
        while span > least and span > kind.num_skipped_tokens(end * block_size) // block_size:
            span -= 1
            if not has(span, group):
                end = span
        return end

    def can_allocate(self, request: TokenSequence, prefix: Prefix, held_back: int) -> bool:
        """See KVCacheManager."""
        num_spans, start = self._num_spans(request.num_tokens), len(prefix)
        needed = sum(max(0, num_spans - max(start, first)) for first in self._firsts_needed(request))
        needed += len(self._spans_of_states(request, start)) * self.groups.num_states
        revived: int = sum(block.ref_cnt == 0 for span in prefix for block in span)
        return needed + revived + held_back <= self._pool.num_free

    def allocate(self, request: TokenSequence, prefix: Prefix) -> None:
        """See KVCacheManager. A consumer gets no blocks for what will have fallen out when its KV has arrived."""
        assert request.request_id not in self._group_tables
        self._pool.share([block for span in prefix for block in span if block is not self._null_block])
        num_spans, num_states = self._num_spans(request.num_tokens), self.groups.num_states
        needed, of_states = self._firsts_needed(request), self._spans_of_states(request, len(prefix))
        spans = [list(span) for span in prefix]
        num_partly = min(num_spans, max(needed, default=0))  # spans of which some groups need no block
        for span in range(len(prefix), num_partly):
            fresh = iter(self._pool.allocate(sum(span >= first for first in needed)))
            spans.append([next(fresh) if span >= first else self._null_block for first in needed])
        num_groups = len(needed)
        rest = self._pool.allocate((num_spans - len(spans)) * num_groups)
        spans += [rest[at * num_groups : (at + 1) * num_groups] for at in range(num_spans - len(spans))]
        if num_states:
            for number, blocks in enumerate(spans[len(prefix) :], len(prefix)):
                is_needed = number in of_states
                blocks += self._pool.allocate(num_states) if is_needed else [self._null_block] * num_states
        firsts = self.groups.first_spans(len(prefix) * self.block_size)
        tables = _GroupTables(spans, len(prefix), firsts, request.num_arriving_tokens)
        self._group_tables[request.request_id] = tables

    def _spans_of_states(self, request: TokenSequence, start: int) -> set[int]:
        """The spans from `start` on after which the state of `request` is kept, or comes: its last ones; and the one up
        to which others have the same tokens, if that is not known from them."""
        num_states = self.groups.num_states
        if not num_states:
            return set()
        last = self._num_spans(request.num_tokens) - 1
        if request.num_arriving_tokens:
            return {span for span in (self._num_spans(request.num_arriving_tokens) - 1, last) if span >= start}
        found = {last - 1, last}
        if self.enable_prefix_caching and request.reads_cache and num_states < len(self.groups):
            hashes, most = request.block_hashes, self.num_shareable_blocks(request)
            request.complete_block_hashes(self.block_size, most)
            num_groups = len(self.groups) - num_states
            found.add(self._longest_prefix(start, most, partial(self._has_span, hashes), num_groups) - 1)
        return {span for span in found if span >= start}

    def _firsts_needed(self, request: TokenSequence) -> list[int]:
        """The first span of each group but those of states of which `request` needs a block, if none is shared."""
        return self.groups.first_spans(request.num_arriving_tokens)[: len(self.groups) - self.groups.num_states]

    def capacity(self, request: TokenSequence) -> int:
        """See KVCacheManager."""
        return len(self._group_tables[request.request_id].spans) * self.block_size

    def num_missing_blocks(self, request: TokenSequence, num_tokens: int) -> int:
        """See KVCacheManager."""
        return max(0, self._num_spans(num_tokens - self.capacity(request))) * len(self.groups)

    def grow(self, request: TokenSequence, num_tokens: int) -> list[list[int]] | None:
        """See KVCacheManager."""
        missing = self.num_missing_blocks(request, num_tokens)
        if not missing:
            return []
        if missing > self._pool.num_free:
            return None
        fresh, num_groups = self._pool.allocate(missing), len(self.groups)
        spans = [fresh[start : start + num_groups] for start in range(0, missing, num_groups)]
        self._group_tables[request.request_id].spans += spans
        return [[span[group].block_id for span in spans] for group in range(num_groups)]

    def cache_computed(self, request: TokenSequence) -> None:
        """See KVCacheManager."""
        table = self._group_tables[request.request_id]
        num_full = request.num_computed_tokens // self.block_size
        if num_full > table.num_cached and self.enable_prefix_caching:
            request.complete_block_hashes(self.block_size, num_full)
            leaving = request.num_leaving_tokens or 0
            for span in range(table.num_cached, num_full):
                # A producer keeps the state after its prompt in this block, whatever else it computes.
                is_of_prompt = span * self.block_size < leaving < (span + 1) * self.block_size
                num_groups = len(self.groups) - is_of_prompt * self.groups.num_states
                for group, block in enumerate(table.spans[span][:num_groups]):
                    if block is not self._null_block:
                        self._pool.cache(block, group_key(request.block_hashes[span], group))
            table.num_cached = num_full
        self.free_skipped(request)

    def free_skipped(self, request: TokenSequence) -> None:
        """See KVCacheManager. A producer keeps what its consumer goes on with."""
        table = self._group_tables[request.request_id]
        num_tokens, leaving = request.num_computed_tokens, request.num_leaving_tokens
        if leaving is not None:
            num_tokens = min(num_tokens, leaving)
        for group, first in enumerate(self.groups.first_spans(num_tokens)):
            for number, span in enumerate(table.spans[table.num_freed[group] : first], table.num_freed[group]):
                block = span[group]
                if block is not self._null_block:
                    self._pool.free([block])
                    span[group] = self._null_block
                    self.has_fallen_out = True
                    if self.groups.kinds[group].is_state and number >= table.num_at_first and block.block_hash:
                        self._supersede_state(table, group, block, block.block_hash)
            table.num_freed[group] = max(table.num_freed[group], first)

    def _supersede_state(self, table: _GroupTables, group: int, block: Block, block_hash: BlockHash) -> None:
        """Lets go first of all states on the way through an output but the last, where the next prompt may go on."""
        before = table.last_states.get(group)
        if before is not None:
            self._pool.demote(*before)
        table.last_states[group] = block, block_hash

    def free(self, request: TokenSequence) -> None:
        """See KVCacheManager."""
        self._pool.free(self.blocks(request))
        self._group_tables.pop(request.request_id, None)

    def forget(self, request: TokenSequence) -> None:
        """See KVCacheManager. What fell out is not known any more; it is correct, or a NaN would have shown before."""
        self._pool.forget(self.blocks(request))

    def blocks(self, request: TokenSequence) -> Sequence[Block]:
        """See KVCacheManager."""
        table = self._group_tables.get(request.request_id)
        return [] if table is None else self._present(table.spans)

    def block_ids(self, request: TokenSequence) -> list[list[int]]:
        """See KVCacheManager."""
        spans = self._group_tables[request.request_id].spans
        return [[span[group].block_id for span in spans] for group in range(len(self.groups))]

    def blocks_of_tokens(self, request: TokenSequence, start: int, stop: int) -> list[Block]:
        """See KVCacheManager."""
        spans = self._group_tables[request.request_id].spans
        return self._present(spans[start // self.block_size : self._num_spans(stop)])

    def keyed(
        self, request: TokenSequence, first: int, hashes: tuple[BlockHash, ...], num_computed_tokens: int
    ) -> KeyedBlocks:
        """See KVCacheManager."""
        spans = self._group_tables[request.request_id].spans
        firsts = self.groups.first_spans(num_computed_tokens)
        found = [
            (spans[span][group], group_key(block_hash, group))
            for span, block_hash in enumerate(hashes, first)
            for group, own_first in enumerate(firsts)
            if span >= own_first and spans[span][group] is not self._null_block
        ]
        return KeyedBlocks([block for block, _ in found], tuple(key for _, key in found))

    def lookup_keys(self, hashes: tuple[BlockHash, ...]) -> tuple[BlockHash, ...]:
        """See KVCacheManager."""
        return tuple(group_key(block_hash, group) for group in range(len(self.groups)) for block_hash in hashes)

    def num_kept(self, first: int, num_found: int, found: Sequence[bool]) -> int:
        """See KVCacheManager."""
        num_spans = len(found) // len(self.groups)
        return (
            self._longest_prefix(first, first + num_spans, lambda span, group: found[group * num_spans + span - first])
            - first
        )

    def num_usable(self, first: int, num_valid: int, num_wanted: int) -> int:
        """See KVCacheManager. What had fallen out at `num_wanted` did not come."""
        firsts = self.groups.first_spans(num_wanted * self.block_size)
        return self._longest_prefix(first, num_valid, lambda span, group: span >= firsts[group])

    def lacks_blocks(self, request: TokenSequence) -> bool:
        """See KVCacheManager."""
        table, num_tokens = self._group_tables[request.request_id], request.num_computed_tokens
        is_of_state = not num_tokens % self.block_size or num_tokens == table.num_arriving_tokens
        for group, (kind, first) in enumerate(zip(self.groups.kinds, self.groups.first_spans(num_tokens), strict=True)):
            if kind.is_state and num_tokens and not is_of_state:
                return True
            needed = table.spans[first : first + min(1, num_tokens)] if kind.is_state else table.spans[first:]
            if any(span[group] is self._null_block for span in needed):
                return True
        return False

    @property
    def holders(self) -> Iterable[RequestId]:
        """See KVCacheManager."""
        return self._group_tables.keys()

    def check_integrity(self, pinned: Iterable[Block]) -> list[str]:
        """See KVCacheManager."""
        num_users = Counter(block.block_id for block in pinned)
        violations: list[str] = []
        for request_id, table in self._group_tables.items():
            block_ids = [block.block_id for block in self._present(table.spans)]
            num_users.update(block_ids)
            if len(set(block_ids)) != len(block_ids):
                violations.append(f"request {request_id} has a block twice in its tables")
            for group, num_freed in enumerate(table.num_freed):
                if any(span[group] is not self._null_block for span in table.spans[:num_freed]):
                    violations.append(f"request {request_id} keeps blocks that fell out of group {group}")
        return violations + self._pool.check_integrity(num_users)

    def _num_spans(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _present(self, spans: Iterable[Sequence[Block]]) -> list[Block]:
        return [block for span in spans for block in span if block is not self._null_block]


def create_kv_cache_manager(num_blocks: int, groups: KVGroups, *, enable_prefix_caching: bool) -> KVCacheManager:
    """Creates the manager that models with such groups need."""
    manager = KVCacheManager if groups.is_one_full else GroupedKVCacheManager
    return manager(num_blocks, groups, enable_prefix_caching=enable_prefix_caching)

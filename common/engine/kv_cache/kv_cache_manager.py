"""Block tables: the blocks that hold each request's KV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from common.engine.kv_cache.block_pool import Block, BlockPool
from common.engine.kv_cache.cache_changes import CacheChanges
from common.engine.kv_cache.groups import KVGroups
from common.types import BlockHash, RequestId

Prefix = Sequence[Any]
"""The cached blocks with which a request starts, one item for each `block_size` tokens. Its manager knows what is in
it."""


class TokenSequence(Protocol):
    """A request as the cache sees it."""

    @property
    def request_id(self) -> RequestId:
        """Id of the owner of the blocks."""

    @property
    def num_tokens(self) -> int:
        """Tokens known."""

    @property
    def num_computed_tokens(self) -> int:
        """Leading tokens whose KV is in its blocks."""

    @property
    def num_arriving_tokens(self) -> int:
        """Leading tokens whose KV comes from a producer, if it is a consumer."""

    @property
    def num_leaving_tokens(self) -> int | None:
        """Leading tokens whose KV goes to a consumer, if it is a producer."""

    @property
    def reads_cache(self) -> bool:
        """Whether cached blocks may be shared with it."""

    @property
    def block_hashes(self) -> list[BlockHash]:
        """Hashes of leading full blocks, as far as known."""

    def complete_block_hashes(self, block_size: int, num_blocks: int) -> None:
        """Computes the missing hashes of the first `num_blocks` blocks, all of which must be full."""


class _BlockTable:
    """One request's blocks, in token order. Token i lives in blocks[i // block_size]."""

    __slots__ = ("blocks", "capacity", "num_cached")

    def __init__(self, blocks: list[Block], num_cached: int, block_size: int) -> None:
        self.blocks = blocks
        self.capacity = len(blocks) * block_size  # tokens that fit
        self.num_cached = num_cached  # leading blocks that were offered to the prefix cache


class KeyedBlocks(NamedTuple):
    """Blocks to be moved, in the order of BlockOrder, and their names."""

    blocks: Sequence[Block]
    keys: tuple[BlockHash, ...]


class KVCacheManager:
    """Allocates blocks to requests and frees them; caches full computed blocks by content.

    A request owns either no blocks or blocks for all tokens it had at admission; nothing is ever half-allocated. This
    one is of models with one group, out of which nothing falls; see GroupedKVCacheManager for others.
    """

    def __init__(self, num_blocks: int, groups: KVGroups, *, enable_prefix_caching: bool) -> None:
        self.groups = groups
        self.block_size = groups.block_size
        self._pool = BlockPool(num_blocks)
        self.enable_prefix_caching = enable_prefix_caching
        self._tables: dict[RequestId, _BlockTable] = {}
        self.has_fallen_out = False  # blocks of running requests have become free; reset by the one who looks

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block excluded."""
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be allocated, cached unused ones included."""
        return self._pool.num_free

    @property
    def cache_changes(self) -> CacheChanges:
        """The changes of the prefix cache since they were last taken."""
        return self._pool.changes

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def num_shareable_blocks(self, request: TokenSequence) -> int:
        """Leading blocks of `request` that can be shared instead of computed.

        They never cover the last token: one token must be computed to sample the next, and a shared block must
        not be written to.
        """
        return (request.num_tokens - 1) // self.block_size

    def find_cached_prefix(self, request: TokenSequence) -> Prefix:
        """Returns the longest run of cached blocks with which `request` starts, among its shareable ones."""
        if not (self.enable_prefix_caching and request.reads_cache):
            return []
        max_blocks = self.num_shareable_blocks(request)
        request.complete_block_hashes(self.block_size, max_blocks)
        prefix: list[Block] = []
        for block_hash in request.block_hashes[:max_blocks]:
            block = self._pool.find(block_hash)
            if block is None:
                break
            prefix.append(block)
        return prefix

    def can_allocate(self, request: TokenSequence, prefix: Prefix, held_back: int) -> bool:
        """Whether all tokens of `request` fit behind `prefix` and `held_back` free blocks remain."""
        needed = self.num_blocks_for(request.num_tokens) - len(prefix)
        revived: int = sum(block.ref_cnt == 0 for block in prefix)
        return needed + revived + held_back <= self._pool.num_free

    def allocate(self, request: TokenSequence, prefix: Prefix) -> None:
        """Creates a table of `request` that starts with `prefix` and holds all its tokens. Requires `can_allocate`."""
        assert request.request_id not in self._tables
        self._pool.share(prefix)
        fresh = self._pool.allocate(self.num_blocks_for(request.num_tokens) - len(prefix))
        self._tables[request.request_id] = _BlockTable([*prefix, *fresh], len(prefix), self.block_size)

    def capacity(self, request: TokenSequence) -> int:
        """Tokens that fit the blocks of `request`."""
        return self._tables[request.request_id].capacity

    def num_missing_blocks(self, request: TokenSequence, num_tokens: int) -> int:
        """Blocks by which the table must grow to hold `num_tokens` tokens."""
        return max(0, self.num_blocks_for(num_tokens - self.capacity(request)))

    def grow(self, request: TokenSequence, num_tokens: int) -> list[list[int]] | None:
        """Extends the table to hold `num_tokens` tokens. Returns the ids of the blocks added to each group, empty if
        there are none; None if too few are free."""
        table = self._tables[request.request_id]
        if num_tokens <= table.capacity:
            return []
        missing = self.num_blocks_for(num_tokens - table.capacity)
        if missing > self._pool.num_free:
            return None
        fresh = self._pool.allocate(missing)
        table.blocks += fresh
        table.capacity += missing * self.block_size
        return [[block.block_id for block in fresh]]

    def cache_computed(self, request: TokenSequence) -> None:
        """Caches the full blocks among the computed tokens of `request`, and frees those that fell out. Called once
        they are computed."""
        table = self._tables[request.request_id]
        num_full = request.num_computed_tokens // self.block_size
        if num_full <= table.num_cached or not self.enable_prefix_caching:
            return
        request.complete_block_hashes(self.block_size, num_full)
        for index in range(table.num_cached, num_full):
            self._pool.cache(table.blocks[index], request.block_hashes[index])
        table.num_cached = num_full

    def free_skipped(self, request: TokenSequence) -> None:
        """Frees the blocks that fell out. Called before `cache_computed` if nothing was written to them."""

    def free(self, request: TokenSequence) -> None:
        """Frees all blocks of `request`, if it has any. Pinned ones stay out of the free queue."""
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            self._pool.free(table.blocks)

    def forget(self, request: TokenSequence) -> None:
        """Removes the blocks of `request`, shared ones included, from the prefix cache: their KV may be wrong."""
        table = self._tables.get(request.request_id)
        if table is not None:
            self._pool.forget(table.blocks)

    def blocks(self, request: TokenSequence) -> Sequence[Block]:
        """The blocks of `request`, in token order; empty if it has none."""
        table = self._tables.get(request.request_id)
        return table.blocks if table is not None else ()

    def block_ids(self, request: TokenSequence) -> list[list[int]]:
        """The block table of each group. The null block stands for those that fell out."""
        return [[block.block_id for block in self._tables[request.request_id].blocks]]

    def blocks_of_tokens(self, request: TokenSequence, start: int, stop: int) -> list[Block]:
        """The blocks that hold tokens [start, stop) of `request`."""
        return self._tables[request.request_id].blocks[start // self.block_size : self.num_blocks_for(stop)]

    def keyed(
        self, request: TokenSequence, first: int, hashes: tuple[BlockHash, ...], num_computed_tokens: int
    ) -> KeyedBlocks:
        """The blocks of the runs of tokens with these hashes, the first of which is number `first`, that `request`
        needs to go on after `num_computed_tokens`, as far as it has them."""
        return KeyedBlocks(self._tables[request.request_id].blocks[first : first + len(hashes)], hashes)

    def lookup_keys(self, hashes: tuple[BlockHash, ...]) -> tuple[BlockHash, ...]:
        """Names of the blocks that a tier may keep of runs of tokens with these hashes."""
        return hashes

    def num_kept(self, first: int, num_found: int, found: Sequence[bool]) -> int:
        """How many of those runs, the first of which is number `first`, can be restored if a tier keeps `num_found`
        leading ones of `lookup_keys`, `found` in all."""
        return num_found

    def num_usable(self, first: int, num_valid: int, num_wanted: int) -> int:
        """How much a request can go on with that held the KV of `first` runs of tokens, wanted that of `num_wanted` and
        has got that of `num_valid`."""
        return num_valid

    def lacks_blocks(self, request: TokenSequence) -> bool:
        """Whether `request` can not go on after its computed tokens, as blocks were left out that it needs for that."""
        return False

    def pin(self, blocks: Sequence[Block]) -> None:
        """Keeps `blocks` from being reused until `unpin`, even if their request ends."""
        self._pool.share(blocks)

    def unpin(self, blocks: Sequence[Block]) -> None:
        """Ends one `pin`."""
        self._pool.free(blocks)

    def reset_prefix_cache(self) -> None:
        """Removes all blocks without users from the prefix cache."""
        self._pool.reset_cache()

    @property
    def holders(self) -> Iterable[RequestId]:
        """Requests that own blocks."""
        return self._tables.keys()

    def check_integrity(self, pinned: Iterable[Block]) -> list[str]:
        """Violations, one line each, given the blocks pinned (as often as they are)."""
        num_users = Counter(block.block_id for block in pinned)
        violations: list[str] = []
        for request_id, table in self._tables.items():
            block_ids = [block.block_id for block in table.blocks]
            num_users.update(block_ids)
            if len(set(block_ids)) != len(block_ids):
                violations.append(f"request {request_id} has a block twice in its table")
            if table.capacity != len(table.blocks) * self.block_size:
                violations.append(f"request {request_id} counts {table.capacity} slots in {len(table.blocks)} blocks")
        return violations + self._pool.check_integrity(num_users)

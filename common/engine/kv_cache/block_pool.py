"""The pool of KV blocks: reference counts, the free queue, and the prefix cache.

A block's life:

1. free and empty, in the free queue;
2. allocated (ref_cnt 1): a request writes KV into it;
3. cached: full and computed, found by its content hash and shared by further requests (ref_cnt > 1);
4. cached and free: without users (ref_cnt 0), it waits at the tail of the free queue and may be shared again;
5. evicted: it reached the head of the queue and was allocated for other content, back to 2.

So the free queue is also the LRU order of the prefix cache, and a free block costs nothing to keep.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from common.engine.kv_cache.cache_changes import CacheChanges
from common.types import BlockHash

NULL_BLOCK_ID = 0


class Block:
    """One block of the pool. Only its `BlockPool` writes to it."""

    __slots__ = ("block_hash", "block_id", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0  # users: block tables and transfers
        self.block_hash: BlockHash | None = None  # set while the prefix cache finds this block under it
        self.prev_free: Block | None = None  # neighbours in the free queue; both None outside it
        self.next_free: Block | None = None

    def __repr__(self) -> str:
        cached = self.block_hash.hex()[:8] if self.block_hash else None
        return f"Block({self.block_id}, ref_cnt={self.ref_cnt}, hash={cached})"


class FreeBlockQueue:
    """Doubly linked list through the blocks themselves: O(1) at both ends and in the middle, no allocation."""

    __slots__ = ("_head", "_len", "_tail")

    def __init__(self) -> None:
        self._head = Block(-1)  # sentinels: every queued block has two neighbours
        self._tail = Block(-1)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self._len = 0

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[Block]:
        block = self._head.next_free
        while block is not None and block is not self._tail:
            yield block
            block = block.next_free

    def append(self, block: Block) -> None:
        """Puts `block` last: it is evicted after all others."""
        last = self._tail.prev_free
        assert last is not None
        self._link(last, block, self._tail)

    def appendleft(self, block: Block) -> None:
        """Puts `block` first: it is the next one allocated."""
        first = self._head.next_free
        assert first is not None
        self._link(self._head, block, first)

    def popleft(self) -> Block:
        """Removes and returns the first block. Raises IndexError if there is none."""
        block = self._head.next_free
        if block is None or block is self._tail:
            raise IndexError("pop from an empty free queue")
        self.remove(block)
        return block

    def remove(self, block: Block) -> None:
        """Removes `block`, wherever it is. Raises ValueError if it is not queued."""
        before, after = block.prev_free, block.next_free
        if before is None or after is None:
            raise ValueError(f"{block} is not in the free queue")
        before.next_free = after
        after.prev_free = before
        block.prev_free = block.next_free = None
        self._len -= 1

    def _link(self, before: Block, block: Block, after: Block) -> None:
        if block.prev_free is not None:
            raise ValueError(f"{block} is in the free queue already")
        before.next_free = block
        block.prev_free = before
        block.next_free = after
        after.prev_free = block
        self._len += 1


class BlockPool:
    """All blocks of one KV cache tensor. Block 0 is the null block: a placeholder that is never allocated.

    Equal content computed twice at the same time yields two blocks; the first one is cached, the other stays
    private to its request and is reused at once when it is freed.
    """

    def __init__(self, num_blocks: int, changes: CacheChanges | None = None) -> None:
        """`num_blocks` counts the null block; at least 2."""
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        self.null_block = self._blocks[NULL_BLOCK_ID]
        self.null_block.ref_cnt = 1
        self._free = FreeBlockQueue()
        self._cached: dict[BlockHash, Block] = {}
        self.changes = CacheChanges() if changes is None else changes  # of the cached hashes, to be reported
        for block in self._blocks[NULL_BLOCK_ID + 1 :]:
            self._free.append(block)

    @property
    def num_blocks(self) -> int:
        """Blocks that can be allocated; the null block excluded."""
        return len(self._blocks) - 1

    @property
    def num_free(self) -> int:
        """Blocks without users, cached ones included."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that the prefix cache finds, used ones included."""
        return len(self._cached)

    def find(self, block_hash: BlockHash) -> Block | None:
        """The cached block with this content, if any. It may be free: `share` it before anything is allocated."""
        return self._cached.get(block_hash)

    def allocate(self, count: int) -> list[Block]:
        """Allocates `count` free blocks, evicting the least recently used cached ones. `count` is at most
        `num_free`."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks requested, {len(self._free)} free")
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            block.ref_cnt = 1
            self._evict(block)
        return blocks

    def share(self, blocks: Iterable[Block]) -> None:
        """Adds one user to each block; free ones leave the free queue."""
        for block in blocks:
            if block.ref_cnt == 0:
                self._free.remove(block)
            block.ref_cnt += 1

    def free(self, blocks: Sequence[Block]) -> None:
        """Removes one user from each of `blocks`, given in prompt order.

        The last blocks of a prompt are queued before its first ones, so that the head of a prefix is evicted last.
        """
        for block in reversed(blocks):
            if block.ref_cnt == 0 or block is self.null_block:
                raise ValueError(f"{block} is freed but has no users")
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                if block.block_hash is None:
                    self._free.appendleft(block)  # not cached: reuse it before any cached one
                else:
                    self._free.append(block)

    def cache(self, block: Block, block_hash: BlockHash) -> None:
        """Adds `block`, which is full, computed and in use, to the prefix cache under `block_hash`."""
        if block.block_hash is None and block_hash not in self._cached:
            block.block_hash = block_hash
            self._cached[block_hash] = block
            self.changes.store(block_hash)

    def demote(self, block: Block, block_hash: BlockHash) -> None:
        """Makes `block` the next to be allocated, if it is still cached under `block_hash`, and free."""
        if block.block_hash == block_hash and block.ref_cnt == 0:
            self._free.remove(block)
            self._free.appendleft(block)

    def forget(self, blocks: Iterable[Block]) -> None:
        """Removes `blocks` from the prefix cache. Their users keep them."""
        for block in blocks:
            self._evict(block)

    def reset_cache(self) -> None:
        """Removes all blocks without users from the prefix cache."""
        for block in self._free:
            self._evict(block)

    def _evict(self, block: Block) -> None:
        if block.block_hash is not None:
            del self._cached[block.block_hash]
            self.changes.remove(block.block_hash)
            block.block_hash = None

    def check_integrity(self, num_users: Mapping[int, int]) -> list[str]:
        """Violations, one line each: every block is either free or used by exactly `num_users[block_id]` owners."""
        violations: list[str] = []
        queued = [block.block_id for block in self._free]
        free = set(queued)
        if len(queued) != len(free) or len(queued) != len(self._free):
            violations.append(
                f"free queue holds {len(queued)} blocks, {len(free)} distinct, and counts {len(self._free)}"
            )
        for block in self._blocks[NULL_BLOCK_ID + 1 :]:
            users = num_users.get(block.block_id, 0)
            if block.ref_cnt != users:
                violations.append(f"block {block.block_id} has ref_cnt {block.ref_cnt} but {users} owners")
            if (block.ref_cnt == 0) != (block.block_id in free):
                where = "in" if block.block_id in free else "outside"
                violations.append(f"block {block.block_id} with ref_cnt {block.ref_cnt} is {where} the free queue")
            if block.block_hash is not None and self._cached.get(block.block_hash) is not block:
                violations.append(f"block {block.block_id} is not found under its hash")
        violations += [
            f"block {block.block_id} is cached under another hash than its own"
            for block_hash, block in self._cached.items()
            if block.block_hash != block_hash
        ]
        if self.null_block.ref_cnt != 1 or NULL_BLOCK_ID in free or NULL_BLOCK_ID in num_users:
            violations.append("the null block was allocated")
        return violations

"""Tiers: blocks that a connector keeps below the device, and their way up and down.

Up, for a request that has no blocks:

1. When it enters the queue, and once more at its turn if its local prefix has shrunk meanwhile, it asks how many blocks
   after that prefix are kept (`Lookup`). It waits for the answer beside the queue, so nobody waits behind it.
2. At its turn it takes blocks for all its tokens, without a seat in the batch, and loads the kept ones (`Restore`).
   When that is over, well or badly, it continues from what was verified.

Down: blocks are offered in the step that fills them (`Offloads`), of all requests in one save. None is offered that
came from the prefix cache or from below, or that a handoff saves to the same store.

A lookup that finds nothing, a broken restore and a failed offload cost computing, never more.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, ClassVar

from common.engine.kv_connector import BlockTransfer, TransferResult
from common.engine.scheduler.transfers import BlockStream, TransferLedger
from common.types import BlockHash, RequestId

if TYPE_CHECKING:
    from common.engine.kv_cache.block_pool import Block
    from common.engine.kv_cache.kv_cache_manager import KVCacheManager
    from common.engine.request import Request

# Offloads may pin one block in so many: pinned blocks cannot be evicted, and a slow medium must not take the memory
# that requests need. What is not offered now is offered later if its request still has it.
PINNED_SHARE = 8

# Requests restored ahead of a seat in the batch, as a share of its seats: enough that a seat never waits for a restore,
# not so many that they crowd out those that run.
AHEAD_SHARE = 4


class Lookup:
    """The question how many of a request's blocks [first, first + num_blocks) are kept, and the answer."""

    __slots__ = ("first", "is_last", "num_blocks", "num_found")

    def __init__(self, first: int, num_blocks: int, *, is_last: bool) -> None:
        """`is_last`: the request must not ask again before it has got blocks."""
        self.first = first
        self.num_blocks = num_blocks
        self.num_found = 0
        self.is_last = is_last

    def settle(self, result: TransferResult, num_blocks: int) -> None:
        """Take the answer; the connector's word is not trusted to make sense."""
        self.num_found = min(max(result.num_blocks_ok, 0), self.num_blocks)


class Restore(BlockStream):
    """A request's full blocks, prompt and output, on their way up."""

    __slots__ = ("stop",)
    is_for_tier: ClassVar[bool] = True

    def __init__(self, start: int, stop: int) -> None:
        """Blocks [start, stop) are kept."""
        super().__init__()
        self.num_started = start
        self.stop = stop

    def num_loadable(self, num_prompt_tokens: int, block_size: int) -> int:
        """Leading blocks whose content can be loaded."""
        return self.stop


class Offloads:
    """Full blocks on their way down, at most one block of the pool in PINNED_SHARE at a time."""

    def __init__(self, kv: KVCacheManager, transfers: TransferLedger) -> None:
        self._kv = kv
        self._transfers = transfers
        self._max_pinned = max(1, kv.num_blocks // PINNED_SHARE)
        self._num_under_way = 0
        self._blocks: list[Block] = []  # of the next save, pinned already
        self._hashes: list[BlockHash] = []
        self.num_saved = 0  # blocks, since start; so are the others
        self.num_failed = 0
        self.num_skipped = 0

    @property
    def offered_blocks(self) -> Collection[Block]:
        """Pinned blocks that no job holds yet."""
        return self._blocks

    def offer(self, request: Request) -> None:
        """Let the next save take the full blocks of `request` that are new, as many as may be pinned. They are computed
        before the save starts."""
        start, stop = self._span(request)
        stop = min(stop, start + self._max_pinned - self._num_under_way - len(self._blocks))
        if stop <= start:
            return
        request.num_offered_blocks = stop
        blocks = self._kv.blocks(request)[start:stop]
        self._kv.pin(blocks)
        self._blocks += blocks
        self._hashes += request.full_block_hashes(self._kv.block_size, start, stop)

    def forgo(self, request: Request) -> None:
        """`request` is about to lose its blocks: what was not offered never will be."""
        start, stop = self._span(request)
        self.num_skipped += max(0, stop - start)

    def _span(self, request: Request) -> tuple[int, int]:
        start, outgoing = request.num_offered_blocks, request.outgoing
        if outgoing is not None and not outgoing.is_direct:
            start = max(start, request.num_prompt_tokens // self._kv.block_size)  # the handoff saves those
        return start, request.num_computed_tokens // self._kv.block_size

    def take_save(self) -> BlockTransfer:
        """Start to save what was offered; something was."""
        blocks, hashes = self._blocks, tuple(self._hashes)
        self._blocks, self._hashes = [], []
        self._num_under_way += len(blocks)
        return BlockTransfer(
            job_id=self._transfers.open(None, self, blocks),
            request_id=RequestId(""),
            block_ids=tuple(block.block_id for block in blocks),
            block_hashes=hashes,
            num_tokens_in_last=self._kv.block_size,
            is_for_tier=True,
        )

    def settle(self, result: TransferResult, num_blocks: int) -> None:
        """A save of `num_blocks` blocks ended."""
        num_saved = min(max(result.num_blocks_ok, 0), num_blocks)
        self._num_under_way -= num_blocks
        self.num_saved += num_saved
        self.num_failed += num_blocks - num_saved


class Tiers:
    """What the scheduler asks of the tiers and gives to them. Without tiers every question is answered with no."""

    def __init__(
        self, kv: KVCacheManager, transfers: TransferLedger, *, keeps_blocks: bool, wants_offloads: bool
    ) -> None:
        self._kv = kv
        self._transfers = transfers
        self._keeps_blocks = keeps_blocks
        self._waiting: dict[Request, None] = {}  # for an answer
        self._unsent: dict[Request, None] = {}  # of those, whose lookup has not started; a dict keeps the order
        self.offloads = Offloads(kv, transfers) if wants_offloads else None
        self.num_queried_tokens = 0  # since start
        self.num_restored_tokens = 0  # since start

    # ---------------------------------------------------------------- lookups

    @property
    def waiting(self) -> Collection[Request]:
        """Requests that wait for an answer."""
        return self._waiting.keys()

    def ask(self, request: Request) -> bool:
        """Ask what is kept of a request that wants to enter the queue. False: there is nothing to ask."""
        request.lookup = None
        if not self._keeps_blocks or request.incoming is not None:
            return False
        return self._ask(request, len(self._kv.find_cached_prefix(request)), is_last=False)

    def ask_again(self, request: Request, num_local: int) -> bool:
        """Ask at the request's turn, if more of its local prefix is gone than the last answer covers."""
        if not self._keeps_blocks or request.incoming is not None:
            return False
        lookup = request.lookup
        if lookup is not None and (lookup.is_last or num_local >= lookup.first):
            return False
        return self._ask(request, num_local, is_last=True)

    def _ask(self, request: Request, num_local: int, *, is_last: bool) -> bool:
        num_blocks = self._kv.num_shareable_blocks(request) - num_local
        if num_blocks <= 0:
            return False
        request.lookup = Lookup(num_local, num_blocks, is_last=is_last)
        self._waiting[request] = self._unsent[request] = None
        self.num_queried_tokens += num_blocks * self._kv.block_size
        return True

    def withdraw(self, request: Request) -> None:
        """`request` waits no longer: it was answered, or ended."""
        del self._waiting[request]
        self._unsent.pop(request, None)

    def take_lookups(self) -> list[BlockTransfer]:
        """Start the lookups asked for since the last call."""
        if not self._unsent:
            return []
        lookups = [self._look_up(request, request.lookup) for request in self._unsent if request.lookup is not None]
        self._unsent.clear()
        return lookups

    def _look_up(self, request: Request, lookup: Lookup) -> BlockTransfer:
        block_size, stop = self._kv.block_size, lookup.first + lookup.num_blocks
        return BlockTransfer(
            job_id=self._transfers.open(request, lookup, ()),
            request_id=request.request_id,
            block_ids=(),
            block_hashes=request.full_block_hashes(block_size, lookup.first, stop),
            num_tokens_in_last=block_size,
            is_for_tier=True,
        )

    # ---------------------------------------------------------------- offloads

    def offer(self, request: Request) -> None:
        """See Offloads."""
        if self.offloads is not None:
            self.offloads.offer(request)

    def forgo(self, request: Request) -> None:
        """See Offloads."""
        if self.offloads is not None:
            self.offloads.forgo(request)

    def take_saves(self, scheduled: Iterable[Request]) -> list[BlockTransfer]:
        """Offer what this step fills of the `scheduled` requests. With what was offered since the last call it is one
        save, if there is anything."""
        if self.offloads is None:
            return []
        for request in scheduled:
            self.offloads.offer(request)
        return [self.offloads.take_save()] if self.offloads.offered_blocks else []

    @property
    def offered_blocks(self) -> Collection[Block]:
        """Pinned blocks that no job holds yet."""
        return self.offloads.offered_blocks if self.offloads is not None else ()

    @property
    def has_work(self) -> bool:
        """True if a lookup or a save is to be started."""
        return bool(self._unsent or self.offered_blocks)

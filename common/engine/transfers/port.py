"""The step loop's side of KV transfers: pins blocks, sends them to the actor, and collects its events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from common.engine.contract.step import Fence
from common.engine.kv_cache import Block, KeyedBlocks, KVCacheManager
from common.engine.kv_connector import ConnectorFacts
from common.engine.messages import EngineStats
from common.engine.phases import Phase, PhaseClock
from common.engine.scheduler.kv_transfers import Arrival, HandedOver, Kept, Restored
from common.engine.scheduler.request import Request
from common.engine.transfers.messages import (
    Blocks,
    Closed,
    End,
    LookUp,
    Message,
    Moved,
    Offload,
    Receive,
    Restore,
    Send,
    TransferEvent,
    Withdraw,
)
from common.types import BlockHash, RequestId

# Offloads may pin one block in so many: pinned blocks cannot be evicted, and a slow medium must not take the memory
# that requests need. What is not offered now is offered later if its request still has it.
PINNED_SHARE = 8


class Actor(Protocol):
    """The actor as the port uses it. All calls return at once."""

    def put(self, message: Message) -> None:
        """Deliver a message; they stay in order."""

    @property
    def has_events(self) -> bool:
        """Whether `take_events` would return something."""

    def take_events(self) -> list[TransferEvent]:
        """Events since the last call, in order."""


class _Lookup(NamedTuple):
    """A lookup of the blocks of a request from `first` on."""

    request: Request
    first: int
    is_last: bool  # the request must not ask again before it has got blocks


class _Restore(NamedTuple):
    request: Request
    first: int  # spans [first, stop) of it
    stop: int
    blocks: Sequence[Block]


class _Offload(NamedTuple):
    blocks: Sequence[Block]


@dataclass(slots=True)
class _Progress:
    """Leading blocks of a request that are dealt with."""

    num_sent: int = 0  # of a producer's prompt, handed to the actor; stays through a preemption
    num_offered: int = 0  # kept below, or about to be, or found in the prefix cache


@dataclass(slots=True)
class _Totals:
    """Counters of lookups and offloads since the start."""

    num_queried_tokens: int = 0
    num_offloaded: int = 0  # blocks, as are the next two
    num_offload_failures: int = 0
    num_offloads_skipped: int = 0  # not offered because too many offloads were in flight


class TransferPort:
    """See KVTransfers. Used on the step loop's thread only."""

    def __init__(self, kv: KVCacheManager, facts: ConnectorFacts, actor: Actor, phases: PhaseClock) -> None:
        """Tiers are used with prefix caching only."""
        self._kv = kv
        self._is_direct = facts.is_direct
        self._keeps_blocks = facts.keeps_blocks and kv.enable_prefix_caching
        self._offloads = facts.wants_offloads and kv.enable_prefix_caching
        self._actor = actor
        self._phases = phases
        self.fence: Fence = 0  # of the last step that has one; set after each
        self._totals = _Totals()
        self._open: dict[RequestId, list[Block]] = {}  # pinned blocks of the handoffs that the actor has not closed
        self._writable: set[RequestId] = set()  # of those, consumers to whose blocks a producer may be writing
        self._tickets: dict[int, _Lookup | _Restore | _Offload] = {}  # not answered
        self._num_tickets = 0  # so far
        self._awaited: dict[RequestId, int] = {}  # the ticket that a request waits for
        self._progress: dict[RequestId, _Progress] = {}
        self._lookups: dict[RequestId, _Lookup] = {}  # the last one of each request since it lost its blocks
        self._max_offloading = max(1, kv.num_blocks // PINNED_SHARE)
        self._num_offloading = 0  # blocks pinned by offloads, `_offered` included
        self._held_back: dict[RequestId, Request] = {}  # more of them could be offered once others have settled
        self._offered: list[Block] = []  # of the next offload, pinned already
        self._offered_keys: list[BlockHash] = []

    def __len__(self) -> int:
        """Handoffs, lookups, restores and offloads that are not over."""
        return len(self._open) + len(self._tickets) + bool(self._offered)

    def figures(self, stats: EngineStats) -> EngineStats:
        """`stats` with the figures that are known here."""
        return msgspec.structs.replace(
            stats,
            tier_queries=self._totals.num_queried_tokens,
            num_offloaded_blocks=self._totals.num_offloaded,
            num_offload_failures=self._totals.num_offload_failures,
            num_offloads_skipped=self._totals.num_offloads_skipped,
        )

    # ---------------------------------------------------------------- KVTransfers

    def begin(self, request: Request) -> None:
        """See KVTransfers."""
        self._open[request.request_id] = []

    def ask(self, request: Request) -> bool:
        """See KVTransfers."""
        self._lookups.pop(request.request_id, None)
        if not (self._keeps_blocks and request.reads_cache) or request.awaits_handoff:
            return False
        return self._ask(request, len(self._kv.find_cached_prefix(request)), is_last=False)

    def ask_again(self, request: Request, num_cached_blocks: int) -> bool:
        """See KVTransfers."""
        if not (self._keeps_blocks and request.reads_cache) or request.awaits_handoff:
            return False
        lookup = self._lookups.get(request.request_id)
        if lookup is not None and (lookup.is_last or num_cached_blocks >= lookup.first):
            return False
        return self._ask(request, num_cached_blocks, is_last=True)

    def admitted(self, request: Request) -> None:
        """See KVTransfers. What a producer found in the prefix cache goes out at once."""
        if request.is_producer or self._offloads:
            progress = self._progress.setdefault(request.request_id, _Progress())
            progress.num_offered = request.num_computed_tokens // self._kv.block_size
        if request.is_producer:
            self._send_computed(request)

    def receive(self, request: Request) -> list[int]:
        """See KVTransfers."""
        first = request.num_computed_tokens // self._kv.block_size
        stop = -(-request.num_prompt_tokens // self._kv.block_size)
        run = self._hand_over(request, first, request.prompt_block_hashes(self._kv.block_size, first, stop))
        self._actor.put(Receive(request.request_id, run))
        if not self._is_direct:
            return []
        self._writable.add(request.request_id)
        return list(run.ids)

    def restore(self, request: Request) -> None:
        """See KVTransfers."""
        first, stop = request.num_computed_tokens // self._kv.block_size, request.num_kept_blocks
        hashes = request.full_block_hashes(self._kv.block_size, first, stop)
        order = self._kv.groups.order(stop * self._kv.block_size)
        keyed = self._kv.keyed(request, first, hashes, stop * self._kv.block_size)
        self._kv.pin(keyed.blocks)
        ticket = self._awaited[request.request_id] = self._issue(_Restore(request, first, stop, keyed.blocks))
        self._actor.put(Restore(ticket, request.request_id, self._run(order.num_blocks(first), keyed)))

    def arrived(self, request: Request, arrival: HandedOver | Restored) -> None:
        """See KVTransfers. What came from a store or a tier is there already."""
        if not self._offloads:
            return
        if isinstance(arrival, Restored) or not self._is_direct:
            self._progress[request.request_id].num_offered = request.num_computed_tokens // self._kv.block_size
        self._offer(request)

    def computed(self, request: Request) -> None:
        """See KVTransfers."""
        if request.is_producer:
            self._send_computed(request)
        if self._offloads:
            self._offer(request)

    def step_ended(self) -> None:
        """See KVTransfers. What was offered since the last step goes below in one job."""
        for request in list(self._held_back.values()):
            self._offer(request)
        if self._offered:
            run = self._run(0, KeyedBlocks(self._offered, tuple(self._offered_keys)))
            self._actor.put(Offload(self._issue(_Offload(self._offered)), run))
            self._offered, self._offered_keys = [], []

    def released(self, request: Request) -> None:
        """See KVTransfers."""
        self._held_back.pop(request.request_id, None)
        if self._offloads and request.request_id in self._progress:
            start, stop = self._offloadable(request)
            self._totals.num_offloads_skipped += max(0, stop - start)

    def ended(self, request: Request, *, is_aborted: bool) -> None:
        """See KVTransfers."""
        self._progress.pop(request.request_id, None)
        self._lookups.pop(request.request_id, None)
        if (ticket := self._awaited.pop(request.request_id, None)) is not None:
            self._actor.put(Withdraw(ticket))
        if request.request_id in self._open:
            self._actor.put(End(request.request_id, is_aborted))

    def collect(self) -> list[Arrival]:
        """See KVTransfers."""
        interrupted = self._phases.enter(Phase.TRANSFER)
        arrivals: list[Arrival] = []
        for event in self._actor.take_events():
            match event:
                case Moved():
                    self._answer(event, arrivals)
                case HandedOver():
                    arrivals.append(event)
                case Closed():
                    self._close(event.request_id)
        self._phases.enter(interrupted)
        return arrivals

    def knows(self, request_id: RequestId) -> bool:
        """See KVTransfers."""
        return request_id in self._open

    @property
    def has_events(self) -> bool:
        """See KVTransfers."""
        return self._actor.has_events

    @property
    def pinned_blocks(self) -> Iterator[Block]:
        """See KVTransfers."""
        yield from self._offered
        for pinned in self._open.values():
            yield from pinned
        for ticket in self._tickets.values():
            if not isinstance(ticket, _Lookup):
                yield from ticket.blocks

    @property
    def writable_blocks(self) -> Iterator[Block]:
        """See KVTransfers."""
        for request_id in self._writable:
            yield from self._open[request_id]

    # ---------------------------------------------------------------- handoffs

    def _send_computed(self, request: Request) -> None:
        """Hand over the prompt's blocks that are complete; the partial last one once nothing more is written to it.
        Those found in the prefix cache too: a store may have lost them."""
        if request.request_id not in self._open:
            return  # no more is wanted: it has failed, or the consumer has everything
        progress, block_size = self._progress[request.request_id], self._kv.block_size
        if request.num_uncomputed_tokens == 0:
            stop = -(-request.num_prompt_tokens // block_size)
        else:
            stop = min(request.num_computed_tokens, request.num_prompt_tokens) // block_size
        start = progress.num_sent
        if stop > start:
            progress.num_sent = stop
            hashes = request.prompt_block_hashes(block_size, start, stop)
            blocks = self._hand_over(request, start, hashes)
            if blocks.ids:  # else the consumer needs none of them
                self._actor.put(Send(request.request_id, blocks))

    def _hand_over(self, request: Request, first: int, hashes: tuple[BlockHash, ...]) -> Blocks:
        """Pin the blocks of a run of the prompt, from its block `first` on, for as long as its handoff is open: those
        that are needed to go on after the prompt."""
        keyed = self._kv.keyed(request, first, hashes, request.num_prompt_tokens)
        self._kv.pin(keyed.blocks)
        self._open[request.request_id] += keyed.blocks
        return self._run(self._kv.groups.order(request.num_prompt_tokens).num_blocks(first), keyed)

    def _close(self, request_id: RequestId) -> None:
        """The blocks are freed together, so that the prompt's end is evicted before its beginning. The handoff of a
        request that was refused was announced to the actor, but never begun here."""
        self._writable.discard(request_id)
        self._kv.unpin(self._open.pop(request_id, []))

    def _run(self, first: int, keyed: KeyedBlocks) -> Blocks:
        return Blocks(first, tuple(block.block_id for block in keyed.blocks), keyed.keys, self.fence)

    # ---------------------------------------------------------------- tiers

    def _ask(self, request: Request, num_cached: int, *, is_last: bool) -> bool:
        num_blocks = self._kv.num_shareable_blocks(request) - num_cached
        if num_blocks <= 0:
            return False
        lookup = self._lookups[request.request_id] = _Lookup(request, num_cached, is_last)
        self._totals.num_queried_tokens += num_blocks * self._kv.block_size
        hashes = request.full_block_hashes(self._kv.block_size, num_cached, num_cached + num_blocks)
        ticket = self._awaited[request.request_id] = self._issue(lookup)
        self._actor.put(LookUp(ticket, request.request_id, self._kv.lookup_keys(hashes)))
        return True

    def _issue(self, question: _Lookup | _Restore | _Offload) -> int:
        self._num_tickets += 1
        self._tickets[self._num_tickets] = question
        return self._num_tickets

    def _answer(self, event: Moved, arrivals: list[Arrival]) -> None:
        match self._tickets.pop(event.ticket):
            case _Lookup(request, first):
                self._stop_waiting(request, event.ticket)
                num_kept = self._kv.num_kept(first, event.num_blocks, event.found)
                arrivals.append(Kept(request, first + num_kept if num_kept else 0))
            case _Restore(request, first, stop, blocks):
                self._stop_waiting(request, event.ticket)
                self._kv.unpin(blocks)
                order = self._kv.groups.order(stop * self._kv.block_size)
                num_valid = order.num_spans(order.num_blocks(first) + event.num_blocks)
                arrivals.append(Restored(request, self._kv.num_usable(first, num_valid, stop)))
            case _Offload(blocks):
                self._kv.unpin(blocks)
                self._num_offloading -= len(blocks)
                self._totals.num_offloaded += event.num_blocks
                self._totals.num_offload_failures += len(blocks) - event.num_blocks

    def _stop_waiting(self, request: Request, ticket: int) -> None:
        if self._awaited.get(request.request_id) == ticket:
            del self._awaited[request.request_id]

    def _offloadable(self, request: Request) -> tuple[int, int]:
        """Full blocks [start, stop) of the request that no tier has been offered."""
        start = self._progress[request.request_id].num_offered
        if request.is_producer and not self._is_direct:
            start = max(start, request.num_prompt_tokens // self._kv.block_size)  # the handoff saves those
        return start, request.num_computed_tokens // self._kv.block_size

    def _offer(self, request: Request) -> None:
        """Let the next offload take the full blocks of `request` that are new, as many as may be pinned."""
        start, end = self._offloadable(request)
        stop = min(end, start + (self._max_offloading - self._num_offloading) // len(self._kv.groups))
        if stop < end:
            self._held_back[request.request_id] = request
        else:
            self._held_back.pop(request.request_id, None)
        if stop <= start:
            return
        self._progress[request.request_id].num_offered = stop
        hashes = request.full_block_hashes(self._kv.block_size, start, stop)
        blocks, keys = self._kv.keyed(request, start, hashes, request.num_computed_tokens)
        self._kv.pin(blocks)
        self._num_offloading += len(blocks)
        self._offered += blocks
        self._offered_keys += keys

"""Which pods hold which KV blocks: the prefix index of one router.

Life of a pod in it:

1. `join` gives it a slot, a bit in the masks below.
2. Its events come in order: first a snapshot, then what changed. `apply` returns False on a gap, and the caller asks
   for a snapshot. An invalid event raises InvalidEventError, and the caller refuses the pod.
3. `expect` adds a prompt that was sent to the pod and that it will therefore hold soon, before any event says so:
   else a burst of equal prefixes would be spread over the pods.
4. `forget` ends it, at a disconnect or a new incarnation. At once for all lookups; memory is given back bit by bit, so
   that the loss of a pod with many blocks does not stop the event loop.

A lookup costs O(log blocks) for each depth at which pods drop out, not O(blocks): block hashes are chained, so a pod
that holds block i of a prompt has seen all blocks before it, and pods evict a prompt from its end. Where a pod breaks
that rule (it may, after equal prompts were computed at the same time), the answer is too high for it until it computes
the hole: a prediction is off, nothing else.

Memory is bounded by the number of (block, pod) pairs, each about 200 bytes. What is beyond is not indexed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.errors import BatonError
from common.types import HASH_BYTES

_SWEPT_PER_EVENT = 2_000  # holdings of forgotten pods given back per event: about a millisecond
_EXPECTED_PER_EXPIRY = 256  # new expectations until all are looked through for those that are over
_MAX_EXPECTATIONS = 16_384  # most expectations that are kept


class InvalidEventError(BatonError):
    """A pod reports something impossible about its cache."""


class IndexSize(NamedTuple):
    """The size of an index."""

    num_blocks: int  # distinct block hashes
    num_holdings: int  # (block, pod) pairs
    num_unindexed: int  # pairs that pods reported and that did not fit
    num_expectations: int


class Held(NamedTuple):
    """Leading blocks of a prompt that each pod has, by slot."""

    computed: NDArray[np.int64]  # held, or computed there before another prompt has its turn
    arriving: NDArray[np.int64]  # and those that are being handed over: later than a prompt that is sent now


class _Holder:
    """One pod's share of the index."""

    __slots__ = ("bit", "capacity", "held", "num_unindexed", "sequence")

    def __init__(self, slot: int, capacity: int) -> None:
        self.bit = 1 << slot
        self.capacity = capacity
        self.sequence: int | None = None  # sequence number of the last event; None: a snapshot is needed
        self.held: set[bytes] = set()
        self.num_unindexed = 0


class Expectation:
    """A prompt that a pod will hold soon. `settle` it when the pod is done with it, whatever the outcome."""

    __slots__ = ("arrives", "block_hashes", "expires_at", "num_held", "slot")

    def __init__(self, slot: int, block_hashes: bytes, num_held: int, expires_at: float, *, arrives: bool) -> None:
        self.slot = slot
        self.arrives = arrives  # is handed over, as opposed to computed there
        self.block_hashes = block_hashes
        self.num_held = num_held  # leading blocks that the pod holds or is expected to hold anyway
        self.expires_at = expires_at  # seconds on the caller's clock

    def settle(self, expires_at: float) -> None:
        """It is there now, or never will be. Count it until `expires_at` at most, when the pod's own event has come."""
        self.expires_at = min(self.expires_at, expires_at)
        self.arrives = False


class PrefixIndex:
    """Block hash -> pods. For one thread. Times are seconds on any one clock, given by the caller."""

    def __init__(self, max_holdings: int) -> None:
        """`max_holdings`: most (block, pod) pairs kept."""
        self._max_holdings = max_holdings
        self._masks: dict[bytes, int] = {}  # block hash -> bits of the pods that hold it
        self._alive = 0  # bits of the pods that count
        self._holders: dict[int, _Holder] = {}  # holder of each slot
        self._num_slots = 0  # slots ever used
        self._free_slots: list[int] = []
        self._dying: deque[tuple[int, _Holder]] = deque()  # holders of pods that are forgotten, until they are swept
        self._num_holdings = 0
        # By how many blocks the pod held anyway, then by the first block that it did not: other prompts need no look.
        self._expected: dict[int, dict[bytes, list[Expectation]]] = {}
        self._num_expected = 0
        self._num_new = 0  # expectations that are new since the last look for expired ones
        self.num_gaps = 0  # events that were refused since others were missing before them

    @property
    def size(self) -> IndexSize:
        """The size now."""
        return IndexSize(
            len(self._masks),
            self._num_holdings,
            sum(holder.num_unindexed for holder in self._holders.values()),
            self._num_expected,
        )

    @property
    def num_slots(self) -> int:
        """Length of what `match` returns: slots are below it."""
        return self._num_slots

    def join(self, capacity: int) -> int:
        """A slot for a pod whose cache has at most `capacity` blocks."""
        if self._free_slots:
            slot = self._free_slots.pop()
        else:
            slot = self._num_slots
            self._num_slots += 1
        self._holders[slot] = _Holder(slot, capacity)
        self._alive |= 1 << slot
        return slot

    def forget(self, slot: int) -> None:
        """The pod is gone; its slot may go to another one."""
        holder = self._holders.pop(slot)
        self._alive &= ~holder.bit
        self._dying.append((slot, holder))
        self._keep_expected(lambda each: each.slot != slot)
        self._sweep()

    def apply(self, slot: int, sequence: int, stored: bytes, removed: bytes, *, is_snapshot: bool = False) -> bool:
        """Take over one event of a pod. Hashes are concatenated, 16 bytes each.

        A snapshot replaces what was known of the pod by `stored`; its `removed` is empty. Any other event must have
        the sequence number after the last one's, and says what changed since: what was `removed`, then what was
        `stored`. A large snapshot may be cut: the rest follows as events that store.

        Returns False, and changes nothing, if events are missing. Raises InvalidEventError.
        """
        holder = self._holders[slot]
        if len(stored) % HASH_BYTES or len(removed) % HASH_BYTES:
            raise InvalidEventError(f"block hashes are cut: {len(stored)} bytes stored, {len(removed)} removed")
        self._sweep()
        if is_snapshot:
            if removed:
                raise InvalidEventError(f"a snapshot removes {len(removed) // HASH_BYTES} blocks")
            self._clear(holder)
        elif holder.sequence is None or sequence != holder.sequence + 1:
            holder.sequence = None
            self.num_gaps += 1
            return False
        holder.sequence = sequence
        self._remove(holder, removed)
        self._store(holder, stored)
        return True

    def match(self, block_hashes: bytes, now: float) -> Held:
        """How many leading blocks of a prompt each pod holds or is expected to hold."""
        counts = np.zeros(self._num_slots, dtype=np.int64)
        num_blocks = len(block_hashes) // HASH_BYTES
        if num_blocks:
            first = self._masks.get(block_hashes[:HASH_BYTES], 0) & self._alive
            depth = 0
            for drop, mask in self._drops(block_hashes, num_blocks, first):
                counts += (drop - depth) * self._bits(mask)
                depth = drop
            return self._with_expected(counts, block_hashes, num_blocks, now)
        return Held(counts, counts)

    def expect(
        self, slot: int, block_hashes: bytes, num_held: int, now: float, lifetime_s: float, *, arrives: bool
    ) -> Expectation:
        """Count a prompt as held by a pod for `lifetime_s` seconds from `now` on, or until it is settled.

        `num_held`: of its blocks, what `match` has said of this pod. `arrives`: it is handed over to the pod.
        """
        expectation = Expectation(slot, block_hashes, num_held, now + lifetime_s, arrives=arrives)
        self._num_new += 1
        if self._num_new >= _EXPECTED_PER_EXPIRY:
            self._num_new = 0
            self._keep_expected(lambda each: now < each.expires_at)
        start = num_held * HASH_BYTES
        if start < len(block_hashes) and self._num_expected < _MAX_EXPECTATIONS:
            group = self._expected.setdefault(num_held, {})
            group.setdefault(block_hashes[start : start + HASH_BYTES], []).append(expectation)
            self._num_expected += 1
        return expectation

    def check_integrity(self) -> list[str]:
        """Returns the inconsistencies, one line each; empty: it is sound. Costs a pass over everything."""
        problems = []
        held: dict[bytes, int] = {}
        holders = [*self._holders.values(), *(holder for _, holder in self._dying)]
        for holder in holders:
            for block_hash in holder.held:
                held[block_hash] = held.get(block_hash, 0) | holder.bit
        if held != self._masks:
            problems.append("masks and holdings differ")
        if self._num_holdings != sum(len(holder.held) for holder in holders):
            problems.append("holdings are miscounted")
        if self._num_holdings > self._max_holdings:
            problems.append("more is held than allowed")
        return problems

    # --- events ---

    def _store(self, holder: _Holder, stored: bytes) -> None:
        held, masks, bit = holder.held, self._masks, holder.bit
        room = self._max_holdings - self._num_holdings
        before = len(held)
        for start in range(0, len(stored), HASH_BYTES):
            block_hash = stored[start : start + HASH_BYTES]
            if block_hash in held:
                continue
            if len(held) - before >= room:
                holder.num_unindexed += 1
                continue
            held.add(block_hash)
            masks[block_hash] = masks.get(block_hash, 0) | bit
        self._num_holdings += len(held) - before
        if len(held) + holder.num_unindexed > holder.capacity:
            raise InvalidEventError(
                f"{len(held) + holder.num_unindexed} blocks are reported as held, the cache has {holder.capacity}"
            )

    def _remove(self, holder: _Holder, removed: bytes) -> None:
        for start in range(0, len(removed), HASH_BYTES):
            block_hash = removed[start : start + HASH_BYTES]
            if block_hash in holder.held:
                holder.held.remove(block_hash)
                self._unmark(block_hash, holder.bit)
            elif holder.num_unindexed:
                holder.num_unindexed -= 1
            else:
                raise InvalidEventError(f"block {block_hash.hex()} is removed but was never stored")

    def _unmark(self, block_hash: bytes, bit: int) -> None:
        mask = self._masks[block_hash] & ~bit
        if mask:
            self._masks[block_hash] = mask
        else:
            del self._masks[block_hash]
        self._num_holdings -= 1

    def _clear(self, holder: _Holder) -> None:
        for block_hash in holder.held:
            self._unmark(block_hash, holder.bit)
        holder.held = set()
        holder.num_unindexed = 0

    def _sweep(self) -> None:
        """Give back some of what forgotten pods held."""
        budget = _SWEPT_PER_EVENT
        while self._dying and budget:
            slot, holder = self._dying[0]
            while holder.held and budget:
                self._unmark(holder.held.pop(), holder.bit)
                budget -= 1
            if not holder.held:
                self._dying.popleft()
                self._free_slots.append(slot)

    # --- lookups ---

    def _drops(self, block_hashes: bytes, num_blocks: int, first: int) -> list[tuple[int, int]]:
        """(depth, pods that hold all blocks before it), for each depth at which pods drop out, in order."""
        masks = self._masks
        drops: list[tuple[int, int]] = []
        stack = [(0, first, num_blocks, 0)]  # held(low) is known, held(high) too, block num_blocks is held by no pod
        while stack:
            low, at_low, high, at_high = stack.pop()
            if at_low == at_high:
                continue
            if high - low == 1:
                drops.append((high, at_low))
                continue
            middle = (low + high) // 2
            start = middle * HASH_BYTES
            at_middle = masks.get(block_hashes[start : start + HASH_BYTES], 0) & at_low | at_high
            stack.append((middle, at_middle, high, at_high))
            stack.append((low, at_low, middle, at_middle))
        return drops

    def _bits(self, mask: int) -> NDArray[np.int64]:
        """0 or 1 per slot."""
        packed = np.frombuffer(mask.to_bytes((self._num_slots + 7) // 8, "little"), dtype=np.uint8)
        return np.unpackbits(packed, count=self._num_slots, bitorder="little").astype(np.int64)

    # --- expectations ---

    def _with_expected(self, counts: NDArray[np.int64], block_hashes: bytes, num_blocks: int, now: float) -> Held:
        due = [
            each
            for num_held, group in self._expected.items()
            for each in group.get(block_hashes[num_held * HASH_BYTES : (num_held + 1) * HASH_BYTES], ())
            if now < each.expires_at
        ]
        for each in due:
            if not each.arrives:
                _raise_count(counts, each, block_hashes, num_blocks)
        if not any(each.arrives for each in due):
            return Held(counts, counts)
        arriving = counts.copy()
        for each in due:
            if each.arrives:
                _raise_count(arriving, each, block_hashes, num_blocks)
        return Held(counts, arriving)

    def _keep_expected(self, keep: Callable[[Expectation], bool]) -> None:
        kept = [
            each
            for group in self._expected.values()
            for expectations in group.values()
            for each in expectations
            if keep(each)
        ]
        self._expected = {}
        self._num_expected = len(kept)
        for each in kept:
            start = each.num_held * HASH_BYTES
            group = self._expected.setdefault(each.num_held, {})
            group.setdefault(each.block_hashes[start : start + HASH_BYTES], []).append(each)


def _same_block(some: bytes, others: bytes, index: int) -> bool:
    """Whether both prompts have a block `index`, and the same one: hashes are chained, so all before it are equal."""
    start = index * HASH_BYTES
    block_hash = some[start : start + HASH_BYTES]
    return len(block_hash) == HASH_BYTES and block_hash == others[start : start + HASH_BYTES]


def _raise_count(counts: NDArray[np.int64], expected: Expectation, block_hashes: bytes, num_blocks: int) -> None:
    """Count what an expected prompt, whose first new block is in this one too, has in common with it."""
    known = max(int(counts[expected.slot]), expected.num_held)
    if known == expected.num_held or _same_block(expected.block_hashes, block_hashes, known - 1):
        counts[expected.slot] = _num_common(expected.block_hashes, block_hashes, known, num_blocks)


def _num_common(some: bytes, others: bytes, known: int, num_blocks: int) -> int:
    """Length of the common prefix in blocks, of which the first `known` are known to be common."""
    low, high = known, num_blocks + 1  # so many are common, so many are not
    while high - low > 1:
        middle = (low + high) // 2
        if _same_block(some, others, middle - 1):
            low = middle
        else:
            high = middle
    return low

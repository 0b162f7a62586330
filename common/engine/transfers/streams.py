"""The blocks of one request in transfer, and the two kinds of handoffs.

A *store* keeps blocks under their content hash: a producer saves them, and a consumer loads those that are reported
ready.

A *direct* connector writes a producer's blocks into those that its consumer has reserved:

1. A consumer's Receive opens a *window* over its reserved blocks: from now on a producer may write there at any time.
2. The producer learns of them (TransferTarget) and writes what it has computed, and further blocks as they are
   computed. It takes digests of what it wrote.
3. The consumer compares its blocks with the digests: a load. Nothing is used before.
4. The producer sends its last report, all tokens or a failure, only when it has stopped writing. The consumer gets
   TransferQuiesced, and the window closes.

The blocks stay pinned while the window is open, even if the request ends. Nothing is computed into them
meanwhile, since a late write would undo it: a consumer whose handoff fails starts again with other blocks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from common.engine.kv_cache import KVGroups
from common.engine.kv_connector import Destination, TransferResult
from common.engine.messages import TransferTarget, TransferUpdate
from common.engine.transfers.messages import Announce, Blocks
from common.types import SampledToken


class BlockStream:
    """A prompt's blocks in a handoff, as many as are needed to go on after it: blocks [0, num_started) were handed to
    the connector, in the order of BlockOrder. A span is a run of tokens, of which each KV group may have a block."""

    def __init__(self, request: Announce, groups: KVGroups) -> None:
        self.request_id = request.request_id
        self.epoch = request.epoch
        self._num_prompt_tokens = request.num_prompt_tokens
        self._block_size = groups.block_size
        self._num_spans = -(-request.num_prompt_tokens // groups.block_size)
        self._order = groups.order(request.num_prompt_tokens)
        self.num_started = 0
        self.error = ""  # of the first job that failed: reason label
        self._broken_at: int | None = None  # first block that was not moved
        self._in_flight: dict[int, int] = {}  # job id -> its first block

    @property
    def in_flight(self) -> list[int]:
        """Jobs that have not settled."""
        return list(self._in_flight)

    @property
    def is_broken(self) -> bool:
        """True once a job failed; the stream goes no further."""
        return self._broken_at is not None

    @property
    def num_moved(self) -> int:
        """Leading blocks that are moved for certain."""
        moved = min(self._in_flight.values(), default=self.num_started)
        return moved if self._broken_at is None else min(moved, self._broken_at)

    @property
    def num_moved_spans(self) -> int:
        """Leading spans of which all blocks are moved for certain."""
        return self._order.num_spans(self.num_moved)

    def num_tokens_in(self, block: int) -> int:
        """Prompt tokens in the block of this index; fewer than it holds in a partial last one."""
        return min(self._block_size, self._num_prompt_tokens - self._order.num_spans(block) * self._block_size)

    def num_last(self, start: int, stop: int) -> int:
        """How many of blocks [start, stop), the last ones, hold the same tokens."""
        return stop - max(start, self._order.num_blocks(self._order.num_spans(stop - 1)))

    def start(self, job_id: int, num_blocks: int) -> None:
        """The next `num_blocks` blocks are in flight."""
        self._in_flight[job_id] = self.num_started
        self.num_started += num_blocks

    def settle(self, result: TransferResult, num_blocks: int) -> None:
        """A job of `num_blocks` blocks ended."""
        first = self._in_flight.pop(result.job_id)
        if result.num_blocks_ok >= num_blocks:
            return
        broken_at = first + max(result.num_blocks_ok, 0)
        if self._broken_at is None:
            self.error = result.error or "transfer"
            self._broken_at = broken_at
        else:
            self._broken_at = min(self._broken_at, broken_at)

    def fail(self, reason: str) -> None:
        """Starts no more jobs; those in flight may still succeed."""
        if self._broken_at is None:
            self.error = reason
            self._broken_at = self.num_started


class Incoming(BlockStream):
    """Consumer: the prompt's KV comes through a store. Updates may come before the blocks are reserved."""

    is_window_open = False  # a producer may write to the reserved blocks

    def __init__(self, request: Announce, groups: KVGroups) -> None:
        super().__init__(request, groups)
        self._num_ready_tokens = 0  # leading prompt tokens that can be loaded
        self.blocks: Blocks | None = None  # once they are reserved
        self.final_at: float | None = None  # when the last update came
        self.first_token: SampledToken | None = None
        self.failure = ""  # reason label, from the last update
        self.is_concluded = False  # the scheduler has the outcome, or does not need it

    def reserve(self, blocks: Blocks) -> None:
        """The request has blocks; those before `blocks.first` hold their KV already."""
        self.blocks = blocks
        self.num_started = blocks.first

    def apply(self, update: TransferUpdate, now: float) -> None:
        """Applies an update of the handoff; nothing follows the final one."""
        if self.final_at is not None:
            return
        self._num_ready_tokens = max(self._num_ready_tokens, update.num_ready_tokens)
        if update.final:
            self.final_at = now
            self.first_token = update.first_token
            self.failure = update.failure

    def quiesce(self) -> None:
        """The producer writes no more."""

    @property
    def num_loadable(self) -> int:
        """Leading blocks whose content can be loaded. The partial last one comes with the end of the prompt."""
        if self.is_broken:
            return 0
        is_whole = self._num_ready_tokens >= self._num_prompt_tokens
        num_spans = self._num_spans if is_whole else self._num_ready_tokens // self._block_size
        return self._order.num_blocks(num_spans)

    def digests(self, start: int, stop: int) -> tuple[bytes, ...]:
        """The digests of blocks [start, stop); empty: the store verifies them."""
        return ()

    @property
    def has_failed(self) -> bool:
        """Some block will certainly be missing."""
        return self.is_broken or self.failure != ""

    @property
    def is_over(self) -> bool:
        """Nothing is in flight and nothing more will come."""
        return not self._in_flight and (self.is_broken or self.final_at is not None)


class DirectIncoming(Incoming):
    """Consumer: a producer writes the prompt's KV into the reserved blocks."""

    def __init__(self, request: Announce, groups: KVGroups) -> None:
        super().__init__(request, groups)
        self._is_quiescent = False
        self._digests: list[bytes] = []  # of the blocks after those that were found in the prefix cache

    def reserve(self, blocks: Blocks) -> None:
        """See Incoming."""
        super().reserve(blocks)
        self.is_window_open = bool(blocks.ids) and not self._is_quiescent and self.final_at is None

    def apply(self, update: TransferUpdate, now: float) -> None:
        """See Incoming."""
        if self.final_at is None:
            self._digests += update.digests
        super().apply(update, now)

    def quiesce(self) -> None:
        """See Incoming."""
        self._is_quiescent = True
        self.is_window_open = False

    @property
    def num_loadable(self) -> int:
        """See Incoming."""
        first = 0 if self.blocks is None else self.blocks.first
        return min(super().num_loadable, first + len(self._digests))

    def digests(self, start: int, stop: int) -> tuple[bytes, ...]:
        """See Incoming."""
        first = 0 if self.blocks is None else self.blocks.first
        return tuple(self._digests[start - first : stop - first])


class Batch(NamedTuple):
    """Adjacent blocks of a producer that can be saved."""

    blocks: Blocks
    destination: Destination | None

    def parts(self, most: int | None) -> Iterator[Batch]:
        """Yields runs of at most so many blocks."""
        blocks, to = self
        for start in range(0, len(blocks.ids), most or len(blocks.ids)):
            run = slice(start, None if most is None else start + most)
            part = Blocks(blocks.first + start, blocks.ids[run], blocks.keys[run], blocks.fence)
            yield Batch(part, to and Destination(to.address, to.block_ids[run]))


class Outgoing(BlockStream):
    """Producer: the prompt's KV leaves for a store as it is computed."""

    def __init__(self, request: Announce, groups: KVGroups) -> None:
        super().__init__(request, groups)
        self._waiting: list[Blocks] = []  # computed, and not handed to the connector
        self.num_reported_tokens = 0  # in the last KVSaved
        self.is_reported_broken = False  # the last KVSaved, with a failure, was sent

    @property
    def num_saved_tokens(self) -> int:
        """Leading prompt tokens whose KV is in the connector."""
        return min(self.num_moved_spans * self._block_size, self._num_prompt_tokens)

    @property
    def is_complete(self) -> bool:
        """The KV of the whole prompt is in the connector."""
        return self.num_saved_tokens == self._num_prompt_tokens

    @property
    def is_over(self) -> bool:
        """Nothing is in flight and nothing more will start."""
        return not self._in_flight and (self.is_broken or self.is_complete)

    @property
    def wants_target(self) -> bool:
        """True while a target would be taken."""
        return False

    @property
    def may_report_failure(self) -> bool:
        """Whether a failure may be reported now."""
        return True

    def aim(self, target: TransferTarget) -> None:
        """Write to `target` from now on. Never called: a store needs none."""
        raise RuntimeError("a store has no target")

    def offer(self, blocks: Blocks) -> None:
        """Further blocks were computed, adjacent to those before."""
        self._waiting.append(blocks)

    def take(self) -> Batch | None:
        """Returns the blocks that can be saved now, as one batch; None: there are none."""
        if not self._waiting or self.is_broken:
            return None
        waiting, self._waiting = self._waiting, []
        return Batch(_join(waiting), None)

    def take_digests(self) -> list[bytes]:
        """Returns the digests of the blocks that `num_saved_tokens` covers and that were not reported; empty: the store
        verifies them."""
        return []


class DirectOutgoing(Outgoing):
    """Producer: the prompt's KV is written to the blocks that a consumer has reserved, once they are known."""

    def __init__(self, request: Announce, groups: KVGroups) -> None:
        super().__init__(request, groups)
        self._target: TransferTarget | None = None
        self._num_held = 0  # leading blocks that the consumer has already
        self._num_taken_digests = 0
        self._digests: dict[int, bytes] = {}  # of moved blocks that were not reported, by index

    @property
    def wants_target(self) -> bool:
        """See Outgoing."""
        return self._target is None and not self.is_broken

    @property
    def may_report_failure(self) -> bool:
        """See Outgoing. A failure also means that nothing is written any more."""
        return not self._in_flight

    def aim(self, target: TransferTarget) -> None:
        """See Outgoing. The stream fails if the target does not fit the prompt."""
        held, block_ids, num_tokens = target.num_held_tokens, target.block_ids, self._num_prompt_tokens
        num_held = self._order.num_blocks(-(-held // self._block_size))
        is_whole = held == num_tokens or (held % self._block_size == 0 and 0 <= held < num_tokens)
        num_lacking = self._order.num_blocks(self._num_spans) - num_held
        if not is_whole or len(block_ids) != num_lacking or len({*block_ids, 0}) != num_lacking + 1:
            self.fail("incompatible")
            return
        self._target = target
        self._num_held = self.num_started = self._num_taken_digests = num_held

    def take(self) -> Batch | None:
        """See Outgoing."""
        target = self._target
        if target is None or (batch := super().take()) is None:
            return None
        blocks, held = batch.blocks, self._num_held
        if (excess := held - blocks.first) > 0:
            blocks = blocks._replace(first=held, ids=blocks.ids[excess:], keys=blocks.keys[excess:])
        start = blocks.first - held
        to_ids = tuple(target.block_ids[start : start + len(blocks.ids)])
        return Batch(blocks, Destination(target.address, to_ids)) if blocks.ids else None

    def settle(self, result: TransferResult, num_blocks: int) -> None:
        """See BlockStream. A block written without a digest cannot be checked: it was not moved."""
        first, num_known = self._in_flight[result.job_id], len(result.digests)
        self._digests.update(zip(itertools.count(first), result.digests[:num_blocks], strict=False))
        super().settle(dataclasses.replace(result, num_blocks_ok=min(result.num_blocks_ok, num_known)), num_blocks)

    def take_digests(self) -> list[bytes]:
        """See Outgoing."""
        start, self._num_taken_digests = self._num_taken_digests, max(self._num_taken_digests, self.num_moved)
        return [self._digests.pop(index) for index in range(start, self._num_taken_digests)]


def _join(runs: Sequence[Blocks]) -> Blocks:
    """Adjacent runs as one. What was computed last is ready last."""
    if len(runs) == 1:
        return runs[0]
    return Blocks(
        runs[0].first,
        tuple(block_id for run in runs for block_id in run.ids),
        tuple(key for run in runs for key in run.keys),
        runs[-1].fence,
    )

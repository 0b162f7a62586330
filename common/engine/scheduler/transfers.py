"""Transfers: what of a request's KV is moving, and which blocks must not be reused meanwhile.

`Incoming` and `Outgoing` are one request's side of a handoff; `TransferLedger` knows every job that has not
settled and pins its blocks. Pins outlive the request: an abort or a preemption frees the request's own share of a
block, never the transport's.

With a direct connector others write into this KV cache:

1. A consumer reserves blocks and opens a *window* over those that it lacks: RequestStarted names them, and from now on
   a producer may write there at any time.
2. The producer learns of them (TransferTarget) and writes what it has computed, and further chunks as they finish. It
   yields the digests of what it wrote.
3. The consumer compares its blocks with the digests: a load. Nothing is used before.
4. The producer's last word, all tokens or a failure, is said only when it writes no more. The consumer is told so
   (`is_quiet`) and the window closes.

The window pins its blocks whatever becomes of the request. While it is open nothing is computed into them, since a late
write would undo it: a consumer whose handoff fails starts again with other blocks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

from common.engine.kv_connector import BlockTransfer, Destination, Regroup, TransferResult
from common.types import RequestId, SampledToken

if TYPE_CHECKING:
    from common.engine.kv_cache.block_pool import Block
    from common.engine.kv_cache.kv_cache_manager import KVCacheManager
    from common.engine.messages import TransferTarget, TransferUpdate
    from common.engine.request import Request


class BlockStream:
    """A request's blocks on the move: blocks [0, num_started) were handed to the connector, in order. They are of
    `unit` tokens."""

    __slots__ = ("_broken_at", "_in_flight", "error", "num_started")
    is_for_tier: ClassVar[bool] = False  # True: full blocks of prompt and output; False: the prompt's, for a handoff

    def __init__(self) -> None:
        self.num_started = 0
        self.error = ""  # of the first job that failed: reason label
        self._broken_at: int | None = None  # first block that was not moved
        self._in_flight: dict[int, int] = {}  # job id -> its first block

    @property
    def in_flight(self) -> bool:
        """True while a job has not settled."""
        return bool(self._in_flight)

    @property
    def is_broken(self) -> bool:
        """True once a job failed; the stream goes no further."""
        return self._broken_at is not None

    @property
    def num_moved(self) -> int:
        """Leading blocks that are moved for certain."""
        moved = min(self._in_flight.values(), default=self.num_started)
        return moved if self._broken_at is None else min(moved, self._broken_at)

    def unit(self, block_size: int) -> int:
        """Tokens of each block of the stream, in an engine with blocks of `block_size`."""
        return block_size

    def start(self, job_id: int, num_blocks: int) -> None:
        """The next `num_blocks` blocks are under way."""
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
        """Start no more; what is in flight may still succeed."""
        if self._broken_at is None:
            self.error = reason
            self._broken_at = self.num_started

    def destination(self, start: int, stop: int) -> Destination | None:
        """Where blocks [start, stop) are written to; None: the medium decides."""
        return None

    def expected_digests(self, start: int, stop: int) -> tuple[bytes, ...]:
        """What blocks [start, stop) are compared with; empty: the medium knows."""
        return ()


class Incoming(BlockStream):
    """Consumer: the prompt's KV comes through the connector. Updates may come before the blocks are reserved. Its
    unit are blocks of the producer's size."""

    __slots__ = (
        "_digests",
        "epoch",
        "failure",
        "final_at",
        "first_token",
        "is_direct",
        "is_quiet",
        "num_local",
        "num_ready_tokens",
        "peer_block_size",
    )

    def __init__(self, epoch: int, *, is_direct: bool, peer_block_size: int = 0) -> None:
        """`peer_block_size`: tokens per block of the producer; 0: as many as here."""
        super().__init__()
        self.epoch = epoch
        self.is_direct = is_direct
        self.peer_block_size = peer_block_size
        self.is_quiet = False  # direct: the producer writes no more
        self._digests: list[bytes] = []  # direct: of the blocks after the local ones
        self.num_local = 0  # leading blocks wholly in the local prefix cache
        self.num_ready_tokens = 0  # leading prompt tokens that can be loaded
        self.final_at: float | None = None  # when the last update came
        self.first_token: SampledToken | None = None
        self.failure = ""  # reason label, from the last update

    def unit(self, block_size: int) -> int:
        """See BlockStream."""
        return self.peer_block_size or block_size

    def reserve(self, num_local_tokens: int, block_size: int) -> None:
        """The request has blocks; the first `num_local_tokens` tokens are in them already."""
        self.num_local = self.num_started = num_local_tokens // self.unit(block_size)

    def apply(self, update: TransferUpdate, now: float) -> None:
        """Take news of the handoff; nothing but quiet follows a final update."""
        self.is_quiet |= update.is_quiet
        if self.final_at is not None:
            return
        self._digests += update.digests
        self.num_ready_tokens = max(self.num_ready_tokens, update.num_ready_tokens)
        if update.final:
            self.final_at = now
            self.first_token = update.first_token
            self.failure = update.failure

    def num_loadable(self, num_prompt_tokens: int, block_size: int) -> int:
        """Leading blocks whose content can be loaded. The partial last one comes with the end of the prompt."""
        if self.is_broken:
            return 0
        block_size = self.unit(block_size)
        if self.num_ready_tokens >= num_prompt_tokens:
            num_blocks = -(-num_prompt_tokens // block_size)
        else:
            num_blocks = self.num_ready_tokens // block_size
        return min(num_blocks, self.num_local + len(self._digests)) if self.is_direct else num_blocks

    def expected_digests(self, start: int, stop: int) -> tuple[bytes, ...]:
        """See BlockStream. The store's connectors know theirs."""
        return tuple(self._digests[start - self.num_local : stop - self.num_local]) if self.is_direct else ()

    @property
    def has_failed(self) -> bool:
        """Something is missing for certain."""
        return self.is_broken or self.failure != ""

    @property
    def is_over(self) -> bool:
        """Nothing is in flight and nothing more will come."""
        return not self.in_flight and (self.is_broken or self.final_at is not None)


class Outgoing(BlockStream):
    """Producer: the prompt's KV leaves through the connector; a direct one's only once it has a target."""

    __slots__ = (
        "_digests",
        "_num_held_blocks",
        "_target",
        "epoch",
        "is_direct",
        "is_reported_broken",
        "num_reported_tokens",
    )

    def __init__(self, epoch: int, *, is_direct: bool) -> None:
        super().__init__()
        self.epoch = epoch
        self.is_direct = is_direct
        self.num_reported_tokens = 0  # in the last KVSaved
        self.is_reported_broken = False  # KVSaved with a failure was said: the last one
        self._target: TransferTarget | None = None
        self._num_held_blocks = 0  # leading blocks that the consumer has already
        self._digests: dict[int, bytes] = {}  # of moved blocks that no KVSaved has told of, by index

    @property
    def can_start(self) -> bool:
        """False: nothing is to be saved now, or ever."""
        return not self.is_broken and (self._target is not None or not self.is_direct)

    @property
    def wants_target(self) -> bool:
        """True while a target would be taken."""
        return self.is_direct and self._target is None and not self.is_broken

    def is_settled(self, num_blocks: int) -> bool:
        """Nothing is in flight and nothing more of the prompt's `num_blocks` blocks will start."""
        return not self.in_flight and (self.is_broken or self.num_started >= num_blocks)

    def aim(self, target: TransferTarget, num_prompt_tokens: int, block_size: int) -> None:
        """Write to `target` from now on; the stream fails if that does not fit the prompt."""
        held, block_ids = target.num_held_tokens, target.block_ids
        num_held_blocks = -(-held // block_size)
        is_whole = held == num_prompt_tokens or (held % block_size == 0 and 0 <= held < num_prompt_tokens)
        num_lacking = -(-num_prompt_tokens // block_size) - num_held_blocks
        if not is_whole or len(block_ids) != num_lacking or len({*block_ids, 0}) != num_lacking + 1:
            self.fail("incompatible")
            return
        self._target = target
        self._num_held_blocks = self.num_started = num_held_blocks

    def settle(self, result: TransferResult, num_blocks: int) -> None:
        """See BlockStream. A block written directly but without a digest cannot be checked: it was not moved."""
        if self.is_direct:
            first, num_known = self._in_flight[result.job_id], len(result.digests)
            self._digests.update(zip(itertools.count(first), result.digests[:num_blocks], strict=False))
            result = dataclasses.replace(result, num_blocks_ok=min(result.num_blocks_ok, num_known))
        super().settle(result, num_blocks)

    def take_digests(self, start: int, stop: int) -> list[bytes]:
        """Those of the moved blocks [start, stop), without those that the consumer had."""
        if not self.is_direct:
            return []
        return [self._digests.pop(index) for index in range(max(start, self._num_held_blocks), stop)]

    def destination(self, start: int, stop: int) -> Destination | None:
        """See BlockStream."""
        if self._target is None:
            return None
        held = self._num_held_blocks
        return Destination(self._target.address, tuple(self._target.block_ids[start - held : stop - held]))


class JobOwner(Protocol):
    """Who started a job and learns how it ended, once."""

    def settle(self, result: TransferResult, num_blocks: int) -> None:
        """A job of `num_blocks` blocks ended."""


@dataclass(frozen=True, slots=True)
class Job:
    """Something that the connector was asked to do."""

    request: Request | None  # None: it has blocks of several requests
    owner: JobOwner
    blocks: Sequence[Block]  # pinned; empty for a lookup
    num_blocks: int  # that it moves, in the owner's unit


@dataclass(frozen=True, slots=True)
class _Window:
    epoch: int
    blocks: Sequence[Block]


class TransferLedger:
    """Every job handed to the connector and not settled, and every window that a producer may write into."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._jobs: dict[int, Job] = {}
        self._windows: dict[RequestId, _Window] = {}
        self._cancelled: set[int] = set()
        self._next_job_id = 1

    def __len__(self) -> int:
        return len(self._jobs) + len(self._windows)

    @property
    def has_cancellations(self) -> bool:
        """True if `take_cancelled` would return something."""
        return bool(self._cancelled)

    @property
    def pinned_blocks(self) -> Iterator[Block]:
        """Blocks under transfer, once per job or window."""
        holders: list[Job | _Window] = [*self._jobs.values(), *self._windows.values()]
        return (block for holder in holders for block in holder.blocks)

    @property
    def windowed_blocks(self) -> Iterator[Block]:
        """Blocks that a producer may be writing to."""
        return (block for window in self._windows.values() for block in window.blocks)

    def has_window(self, request_id: RequestId) -> bool:
        """Whether a producer may be writing to blocks that the request reserved."""
        return request_id in self._windows

    def open_window(self, request: Request, epoch: int, start: int) -> list[int]:
        """Let a producer write to the prompt's blocks from index `start` on, and pin them. Their ids; empty, and no
        window, if there are none."""
        blocks = self._kv.blocks(request)[start : self._kv.num_blocks_for(request.num_prompt_tokens)]
        if blocks:
            self._kv.pin(blocks)
            self._windows[request.request_id] = _Window(epoch, blocks)
        return [block.block_id for block in blocks]

    def close_window(self, request_id: RequestId, epoch: int) -> bool:
        """The producer writes no more. False if there is no such window."""
        window = self._windows.get(request_id)
        if window is None or window.epoch != epoch:
            return False
        self._kv.unpin(self._windows.pop(request_id).blocks)
        return True

    def open(
        self, request: Request | None, owner: JobOwner, blocks: Sequence[Block], num_blocks: int | None = None
    ) -> int:
        """Enter a job whose blocks are pinned already. `num_blocks` if it counts them in another unit. Its id."""
        job_id = self._next_job_id
        self._next_job_id += 1
        self._jobs[job_id] = Job(request, owner, blocks, len(blocks) if num_blocks is None else num_blocks)
        return job_id

    def start(self, request: Request, stream: BlockStream, stop: int) -> BlockTransfer:
        """Begin to move blocks [stream.num_started, stop) of `request` and pin them."""
        block_size = self._kv.block_size
        if stream.unit(block_size) != block_size:
            return self._start_regrouping(request, stream, stop)
        start = stream.num_started
        blocks = self._kv.blocks(request)[start:stop]
        self._kv.pin(blocks)
        job_id = self.open(request, stream, blocks)
        stream.start(job_id, len(blocks))
        if stream.is_for_tier:
            hashes, num_in_last = request.full_block_hashes(block_size, start, stop), block_size
        else:
            hashes = request.prompt_block_hashes(block_size, start, stop)
            num_in_last = min(block_size, request.num_prompt_tokens - (stop - 1) * block_size)
        return BlockTransfer(
            job_id=job_id,
            request_id=request.request_id,
            block_ids=tuple(block.block_id for block in blocks),
            block_hashes=hashes,
            num_tokens_in_last=num_in_last,
            destination=stream.destination(start, stop),
            digests=stream.expected_digests(start, stop),
            is_for_tier=stream.is_for_tier,
        )

    def _start_regrouping(self, request: Request, stream: BlockStream, stop: int) -> BlockTransfer:
        """`start` for blocks of the producer's size. Tokens that are here already are left as they are: their blocks
        may be shared."""
        block_size, unit, start = self._kv.block_size, stream.unit(self._kv.block_size), stream.num_started
        num_tokens = min(stop * unit, request.num_prompt_tokens)
        first = max(start * unit, request.num_computed_tokens) // block_size
        blocks = self._kv.blocks(request)[first : self._kv.num_blocks_for(num_tokens)]
        self._kv.pin(blocks)
        job_id = self.open(request, stream, blocks, stop - start)
        stream.start(job_id, stop - start)
        return BlockTransfer(
            job_id=job_id,
            request_id=request.request_id,
            block_ids=tuple(block.block_id for block in blocks),
            block_hashes=request.peer_block_hashes(unit, start, stop),
            num_tokens_in_last=num_tokens - (stop - 1) * unit,
            regroup=Regroup(unit, start * unit - first * block_size),
        )

    def settle(self, result: TransferResult) -> Job | None:
        """End a job and unpin its blocks. Its request may have ended. None for an unknown job."""
        job = self._jobs.pop(result.job_id, None)
        if job is None:
            return None
        self._cancelled.discard(result.job_id)
        self._kv.unpin(job.blocks)
        job.owner.settle(result, job.num_blocks)
        return job

    def cancel(self, request: Request, owner: JobOwner | None = None) -> None:
        """Hurry the jobs of `request`, or those of one owner. Their blocks stay pinned until they settle."""
        self._cancelled.update(
            job_id
            for job_id, job in self._jobs.items()
            if job.request is request and (owner is None or job.owner is owner)
        )

    def take_cancelled(self) -> list[int]:
        """Jobs cancelled since the last call that have not settled."""
        cancelled = sorted(self._cancelled)
        self._cancelled.clear()
        return cancelled

"""Transfers: what of a request's KV is moving, and which blocks must not be reused meanwhile.

`Incoming` and `Outgoing` are one request's side of a handoff; `TransferLedger` knows every job that has not
settled and pins its blocks. Pins outlive the request: an abort or a preemption frees the request's own share of a
block, never the transport's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from common.engine.kv_connector import BlockTransfer, TransferResult
from common.types import SampledToken

if TYPE_CHECKING:
    from common.engine.kv_cache.block_pool import Block
    from common.engine.kv_cache.kv_cache_manager import KVCacheManager
    from common.engine.messages import TransferUpdate
    from common.engine.request import Request


class BlockStream:
    """A request's prompt blocks on the move: blocks [0, num_started) were handed to the connector, in order."""

    __slots__ = ("_broken_at", "_in_flight", "error", "num_started")

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


class Incoming(BlockStream):
    """Consumer: the prompt's KV comes through the connector. Updates may come before the blocks are reserved."""

    __slots__ = ("epoch", "failure", "final_at", "first_token", "num_local", "num_ready_tokens")

    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch
        self.num_local = 0  # leading blocks found in the local prefix cache
        self.num_ready_tokens = 0  # leading prompt tokens that can be loaded
        self.final_at: float | None = None  # when the last update came
        self.first_token: SampledToken | None = None
        self.failure = ""  # reason label, from the last update

    def reserve(self, num_local: int) -> None:
        """The request has blocks; the first `num_local` of them hold their content already."""
        self.num_local = self.num_started = num_local

    def apply(self, update: TransferUpdate, now: float) -> None:
        """Take news of the handoff; nothing follows a final update."""
        if self.final_at is not None:
            return
        self.num_ready_tokens = max(self.num_ready_tokens, update.num_ready_tokens)
        if update.final:
            self.final_at = now
            self.first_token = update.first_token
            self.failure = update.failure

    def num_loadable(self, num_prompt_tokens: int, block_size: int) -> int:
        """Leading blocks whose content can be loaded. The partial last one comes with the end of the prompt."""
        if self.is_broken:
            return 0
        if self.num_ready_tokens >= num_prompt_tokens:
            return -(-num_prompt_tokens // block_size)
        return self.num_ready_tokens // block_size

    @property
    def is_over(self) -> bool:
        """Nothing is in flight and nothing more will come."""
        return not self.in_flight and (self.is_broken or self.final_at is not None)


class Outgoing(BlockStream):
    """Producer: the prompt's KV leaves through the connector."""

    __slots__ = ("is_reported_broken", "num_reported_tokens")

    def __init__(self) -> None:
        super().__init__()
        self.num_reported_tokens = 0  # in the last KVSaved
        self.is_reported_broken = False  # KVSaved with a failure was said: the last one


@dataclass(frozen=True, slots=True)
class _Job:
    request: Request
    stream: BlockStream
    blocks: Sequence[Block]


class TransferLedger:
    """Every job handed to the connector and not settled."""

    def __init__(self, kv: KVCacheManager) -> None:
        self._kv = kv
        self._jobs: dict[int, _Job] = {}
        self._cancelled: set[int] = set()
        self._next_job_id = 1

    def __len__(self) -> int:
        return len(self._jobs)

    @property
    def has_cancellations(self) -> bool:
        """True if `take_cancelled` would return something."""
        return bool(self._cancelled)

    @property
    def pinned_blocks(self) -> Iterator[Block]:
        """Blocks under transfer, once per job."""
        return (block for job in self._jobs.values() for block in job.blocks)

    def start(self, request: Request, stream: BlockStream, stop: int) -> BlockTransfer:
        """Begin to move blocks [stream.num_started, stop) of the prompt and pin them."""
        block_size = self._kv.block_size
        start = stream.num_started
        blocks = self._kv.blocks(request)[start:stop]
        job_id = self._next_job_id
        self._next_job_id += 1
        self._kv.pin(blocks)
        self._jobs[job_id] = _Job(request, stream, blocks)
        stream.start(job_id, len(blocks))
        return BlockTransfer(
            job_id=job_id,
            request_id=request.request_id,
            block_ids=tuple(block.block_id for block in blocks),
            block_hashes=request.prompt_block_hashes(block_size, start, stop),
            num_tokens_in_last=min(block_size, request.num_prompt_tokens - (stop - 1) * block_size),
        )

    def settle(self, result: TransferResult) -> Request | None:
        """End a job and unpin its blocks. Its request, which may have ended; None for an unknown job."""
        job = self._jobs.pop(result.job_id, None)
        if job is None:
            return None
        self._cancelled.discard(result.job_id)
        self._kv.unpin(job.blocks)
        job.stream.settle(result, len(job.blocks))
        return job.request

    def cancel(self, request: Request) -> None:
        """Hurry the jobs of `request`. Their blocks stay pinned until they settle."""
        self._cancelled.update(job_id for job_id, job in self._jobs.items() if job.request is request)

    def take_cancelled(self) -> list[int]:
        """Jobs cancelled since the last call that have not settled."""
        cancelled = sorted(self._cancelled)
        self._cancelled.clear()
        return cancelled

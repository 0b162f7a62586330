"""A WorkerConnector over any BlockStore: the store keeps a block under its content hash, so a handoff is complete when
all its blocks are stored.

The life of a job:

1. `start_load`, `start_save` or `start_lookup` puts it into the queue. From then on its deadline runs. The queue
   consists of batches, by urgency: a burst of saves for a tier delays a handoff by no more than the running batch.
2. Transfer threads take its blocks, batch by batch, several threads at once, and move them through their staging
   frames. A loaded block reaches the KV cache only after its frame was verified; a block that the store already has is
   not saved again. After a batch that fails no other is started.
3. It settles once: when all batches up to its last, or up to the first that failed, are over; when cancelled, at its
   deadline, or when the connector closes. The leading blocks moved by then count. Settling and touching the KV
   cache exclude each other: a thread that returns from a hanging medium finds its job settled and does not touch the
   cache.
4. Its result can be polled, then `on_settled` is called.

While its circuit breaker is open, a store raises StoreUnavailableError at once. A medium that hangs without an error,
such as a dead network mount, holds the threads instead: once each of them has been in one batch for `stall_s`, jobs
that no thread has begun fail at once, until one of the threads returns.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, NamedTuple

from common.engine.contract.layout import KVLayout
from common.engine.kv_connector import (
    NO_FENCES,
    BlockTransfer,
    ConnectorFacts,
    Fences,
    SplitConnector,
    TransferResult,
)
from common.errors import (
    BlockCorruptError,
    BlockMissingError,
    StoreError,
    StoreUnavailableError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
)
from common.types import BlockHash
from kv_store.base import BlockSink, BlockStore, Buffer, StoreConnectorOptions
from kv_store.block_format import BlockFormat
from kv_store.staging import Staging, create_staging, layout_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0
_STALL_S = 10.0  # for a batch, which takes milliseconds; a Redis server that hangs is noticed long before


JobKind = Literal["load", "save", "lookup"]
_NUM_URGENCIES = 4


class _Block(NamedTuple):
    """One block of a job."""

    block_id: int
    key: BlockHash
    num_tokens: int


@dataclass(slots=True)
class _Batch:
    """A run of a job's blocks that one thread moves."""

    index: int
    blocks: Sequence[_Block]
    num_ok: int = 0  # leading blocks moved
    found: Sequence[bool] = ()  # which blocks a lookup found
    error: str = ""  # why it ended before its last block


class _Job:
    """One transfer. `lock` guards the fields below it; it is held while a batch of the job is copied from or to the KV
    cache and while the job settles."""

    def __init__(self, kind: JobKind, transfer: BlockTransfer, due: float, batch_size: int, block_size: int) -> None:
        self.kind = kind
        self.transfer = transfer
        self._block_size = block_size
        self.due = due  # monotonic seconds
        self.batch_size = batch_size
        num_blocks = 0 if kind == "lookup" else len(transfer.block_hashes)
        self.num_batches = max(1, -(-num_blocks // batch_size))  # with no block to move, an empty one
        self.num_taken = 0  # batches that threads have taken; guarded by the connector's lock
        self.lock = threading.Lock()
        self.num_blocks_ok = 0
        self.found: tuple[bool, ...] = ()  # which blocks a lookup found
        self.settled = False
        self._ended: dict[int, _Batch] = {}  # batches that have ended before an earlier one
        self._num_counted = 0  # batches in `num_blocks_ok`

    @property
    def urgency(self) -> int:
        """Lower is more urgent. First jobs without which a request cannot run, or only at a higher cost; then those for
        which a peer's request waits; last those for which nothing waits."""
        if self.kind == "save":
            return 3 if self.transfer.is_for_tier else 2
        return 0 if self.kind == "lookup" else 1

    def blocks_of(self, index: int) -> list[_Block]:
        """Returns the blocks of one batch; a lookup moves none."""
        if self.kind == "lookup":
            return []
        transfer = self.transfer
        start = index * self.batch_size
        stop = min(start + self.batch_size, len(transfer.block_ids))
        return [
            _Block(transfer.block_ids[i], transfer.block_hashes[i], transfer.num_tokens_in(i, self._block_size))
            for i in range(start, stop)
        ]

    def count(self, batch: _Batch) -> str | None:
        """Counts a batch that has ended, and later ones that had ended before it. Returns the outcome of the job: ""
        when all blocks are moved, an error, or None while earlier batches are running."""
        self._ended[batch.index] = batch
        while (ended := self._ended.pop(self._num_counted, None)) is not None:
            self.num_blocks_ok += ended.num_ok
            self.found = tuple(ended.found)
            if ended.error:
                return ended.error
            self._num_counted += 1
        return "" if self._num_counted == self.num_batches else None


class StoreWorkerConnector:
    """Moves blocks between a KV cache and a BlockStore on `options.threads` threads. Saves of handoffs go to
    `for_handoffs`, if there is such a part of the store."""

    def __init__(
        self,
        store: BlockStore,
        options: StoreConnectorOptions,
        *,
        for_handoffs: BlockSink | None = None,
        stall_s: float = _STALL_S,
    ) -> None:
        self._store = store
        self._for_handoffs = for_handoffs or store
        self._options = options
        self._stall_s = stall_s
        self._kv_cache: torch.Tensor | None = None
        self._threads: list[threading.Thread] = []
        lock = threading.Lock()  # guards all below
        self._work = threading.Condition(lock)  # a job was queued, or the connector closes
        self._deadlines = threading.Condition(lock)  # the next deadline changed, or the connector closes
        self._lock = lock
        # A job pins blocks of the KV cache until it settles or is the lookup of a request, so these are bounded.
        self._unsettled: dict[int, _Job] = {}
        # Those with batches that no thread has taken, by urgency, each in the order of submission.
        self._queued: list[OrderedDict[int, _Job]] = [OrderedDict() for _ in range(_NUM_URGENCIES)]
        self._watching_until = math.inf  # monotonic seconds; the deadline for which the watcher waits
        self._results: list[TransferResult] = []
        self._begun_at: dict[int, float] = {}  # monotonic seconds; start of each busy thread's batch
        self._stalled = False
        self._closed = False

    def register_kv_cache(
        self,
        kv_cache: torch.Tensor,
        fingerprint: bytes,
        layout: KVLayout,
        on_settled: Callable[[], None],
        fences: Fences = NO_FENCES,
        rank: int = 0,
    ) -> ConnectorFacts:
        """See WorkerConnector."""
        if layout.num_ranks > 1:
            raise ValueError("a store keeps whole blocks: of several ranks, one has the connector, over slots")
        self._format = BlockFormat(fingerprint, layout_of(kv_cache, layout.num_feature_layers), layout.digest)
        self._store.open(self._format.namespace, self._format.frame_bytes)
        self._kv_cache = kv_cache
        self._on_settled = on_settled
        stagings = [create_staging(kv_cache, self._options.staging_bytes, fences) for _ in range(self._options.threads)]
        self._batch_size = len(stagings[0].frames)
        self._start_thread("deadlines", self._watch_deadlines)
        for index, staging in enumerate(stagings):
            self._start_thread(str(index), partial(self._run_batches, staging))
        return ConnectorFacts(keeps_blocks=True, wants_offloads=self._options.wants_offloads)

    def split(self) -> SplitConnector:
        """See WorkerConnector."""
        return SplitConnector(per_rank=None, per_engine=self)

    def start_load(self, transfer: BlockTransfer) -> None:
        """See WorkerConnector."""
        self._submit("load", transfer)

    def start_save(self, transfer: BlockTransfer) -> None:
        """See WorkerConnector."""
        self._submit("save", transfer)

    def start_lookup(self, transfer: BlockTransfer) -> None:
        """See WorkerConnector."""
        self._submit("lookup", transfer)

    def cancel(self, job_id: int) -> None:
        """See WorkerConnector."""
        with self._lock:
            job = self._unsettled.get(job_id)
        if job is not None:
            self._settle(job, TransferCancelledError.reason)

    def poll(self) -> list[TransferResult]:
        """See WorkerConnector."""
        with self._lock:
            results, self._results = self._results, []
        return results

    def close(self) -> None:
        """See WorkerConnector. Unsettled jobs settle as cancelled; a thread that hangs in the store is abandoned."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            unsettled = list(self._unsettled.values())
            self._work.notify_all()
            self._deadlines.notify_all()
        for job in unsettled:
            self._settle(job, TransferCancelledError.reason)
        give_up = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
            if thread.is_alive():
                logger.warning("thread %s hangs in the block store and is abandoned", thread.name)
        self._store.close()
        self._kv_cache = None

    def _start_thread(self, name: str, target: Callable[[], None]) -> None:
        # A daemon, because a read from a dead network mount can outlive any deadline.
        thread = threading.Thread(target=target, name=f"kv-store-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _submit(self, kind: JobKind, transfer: BlockTransfer) -> None:
        if self._kv_cache is None:
            raise RuntimeError("the connector is not open")
        timeout_s = self._options.lookup_timeout_s if kind == "lookup" else self._options.timeout_s
        due = time.monotonic() + timeout_s
        job = _Job(kind, transfer, due, self._batch_size, self._format.layout.block_size)
        with self._lock:
            if due < self._watching_until:
                self._deadlines.notify()
            self._unsettled[transfer.job_id] = self._queued[job.urgency][transfer.job_id] = job
            self._work.notify(job.num_batches)
            stuck = self._jobs_behind_a_stall()
        for job in stuck:
            self._settle(job, StoreError.reason)

    def _jobs_behind_a_stall(self) -> list[_Job]:
        """Returns the jobs that no thread has begun, if all threads hang in the store."""
        begun_at = self._begun_at.values()
        if len(begun_at) < self._options.threads or time.monotonic() - max(begun_at) < self._stall_s:
            return []
        if not self._stalled:
            self._stalled = True
            logger.warning(
                "the block store hangs: no call returned for %g s, requests proceed without it", self._stall_s
            )
        return [job for job in self._unsettled.values() if job.num_taken == 0]

    def _settle(self, job: _Job, error: str = "") -> bool:
        """Ends the job with the blocks moved so far. False: it had ended before."""
        with job.lock:
            if job.settled:
                return False
            job.settled = True
            result = TransferResult(job.transfer.job_id, job.num_blocks_ok, error, found=job.found)
        with self._lock:
            del self._unsettled[result.job_id]
            self._queued[job.urgency].pop(result.job_id, None)
            self._results.append(result)
        self._on_settled()
        return True

    def _watch_deadlines(self) -> None:
        while (job := self._next_expired()) is not None:
            if self._settle(job, TransferTimeoutError.reason):
                logger.warning("%s of request %s timed out", job.kind, job.transfer.request_id)

    def _next_expired(self) -> _Job | None:
        """Waits until a job is past its deadline. Returns None when closed."""
        with self._lock:
            while not self._closed:
                job = min(self._unsettled.values(), key=lambda job: job.due, default=None)
                self._watching_until = job.due if job is not None else math.inf
                if job is None:
                    self._deadlines.wait()
                elif (left_s := job.due - time.monotonic()) > 0:
                    self._deadlines.wait(left_s)
                else:
                    return job
        return None

    def _run_batches(self, staging: Staging) -> None:
        while (taken := self._next_batch()) is not None:
            self._run(*taken, staging)

    def _next_batch(self) -> tuple[_Job, _Batch] | None:
        """Waits for a batch to move. Returns None when closed."""
        with self._lock:
            self._work.wait_for(lambda: any(self._queued) or self._closed)
            if self._closed:
                return None
            self._begun_at[threading.get_ident()] = time.monotonic()
            queued = next(filter(None, self._queued))
            job = next(iter(queued.values()))
            index = job.num_taken
            job.num_taken += 1
            if job.num_taken == job.num_batches:
                del queued[job.transfer.job_id]
        return job, _Batch(index, job.blocks_of(index))

    def _run(self, job: _Job, batch: _Batch, staging: Staging) -> None:
        run = {"load": self._load, "save": self._save, "lookup": self._look_up}[job.kind]
        try:
            run(job, batch, staging)
        except StoreUnavailableError as error:  # logged once for all requests, when the breaker opened
            logger.debug("%s of request %s stopped: %s", job.kind, job.transfer.request_id, error)
            batch.error = error.reason
        except TransferError as error:
            logger.warning("%s of request %s stopped: %s", job.kind, job.transfer.request_id, error)
            batch.error = error.reason
        except Exception:  # a bug may cost a recompute, but not the thread that all later jobs need
            logger.exception("%s of request %s failed", job.kind, job.transfer.request_id)
            batch.error = TransferError.reason
        with self._lock:
            del self._begun_at[threading.get_ident()]
            was_stalled, self._stalled = self._stalled, False
            if batch.error:
                self._queued[job.urgency].pop(job.transfer.job_id, None)
        if was_stalled:
            logger.warning("the block store answers again; using it")
        with job.lock:
            outcome = None if job.settled else job.count(batch)
        if outcome is not None:
            self._settle(job, outcome)

    def _look_up(self, job: _Job, batch: _Batch, _: Staging) -> None:
        """Finds out which blocks are stored, in one round trip."""
        batch.found = self._store.touch(job.transfer.block_hashes)
        batch.num_ok = [*batch.found, False].index(False)

    def _save(self, job: _Job, batch: _Batch, staging: Staging) -> None:
        """Stores the blocks of a batch that are not stored yet."""
        store = self._store if job.transfer.is_for_tier else self._for_handoffs
        present = store.touch([block.key for block in batch.blocks])
        absent = [block for block, is_there in zip(batch.blocks, present, strict=True) if not is_there]
        batch.num_ok = present.index(False) if absent else len(batch.blocks)
        if not absent:
            return
        with job.lock:
            if job.settled:
                return
            staging.gather([block.block_id for block in absent], job.transfer.fence)
        frames = staging.frames[: len(absent)]
        for block, frame in zip(absent, frames, strict=True):
            self._format.seal(frame, block.key, block.num_tokens)
        store.write([block.key for block in absent], frames)
        batch.num_ok = len(batch.blocks)

    def _load(self, job: _Job, batch: _Batch, staging: Staging) -> None:
        """Fills the leading blocks of a batch whose frames are valid. Raises the error of the next one."""
        blocks = batch.blocks
        frames = staging.frames[: len(blocks)]
        sizes = self._store.read_into([block.key for block in blocks], frames)
        num_verified = 0
        try:
            for block, frame, size in zip(blocks, frames, sizes, strict=True):
                self._verify(block, frame, size)
                num_verified += 1
        finally:
            with job.lock:
                if not job.settled:
                    staging.scatter([block.block_id for block in blocks[:num_verified]], job.transfer.fence)
                    batch.num_ok = num_verified  # only now: a copy that failed has moved nothing

    def _verify(self, block: _Block, frame: Buffer, size: int | None) -> None:
        if size is None:
            raise BlockMissingError(f"no block {block.key.hex()} in the store")
        try:
            self._format.verify(frame, size, block.key, block.num_tokens)
        except BlockCorruptError:
            self._store.discard(block.key)
            raise

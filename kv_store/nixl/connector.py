"""A direct WorkerConnector over NIXL.

The life of a save:

1. `start_save` queues it. From then on its deadline runs; until step 3 it can be cancelled at once.
2. The saving thread checks the destination's address and waits for the compute stream.
3. It posts one write for all blocks, or for each part of them that goes to another of the consumer's ranks. Over shared
   memory that moves the bytes, over a network it only starts to; either way another thread computes the blocks' digests
   meanwhile.
4. It settles when NIXL reports that all writes are over, and the digests are there unless one has failed. A
   cancelled one also waits for the write, since only the end of the sending agent stops it (see
   `kv_store.nixl.sender`).
5. A write that is still in flight at its deadline ends the sending agent, and with it all other writes: it settles as
   timed out, the others as failed.

A load moves nothing: the verifying thread compares the digest of each block with the producer's.

Digests read all bytes again on either side, as fast as memory provides them; a cheaper checksum would be no faster. So
a long run of blocks comes as several saves, of `_PART_BYTES` each over all ranks: while one is written, the digests of
the one before are compared.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from common.engine.contract.layout import KVLayout
from common.engine.contract.parts import encode_address
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
    StoreError,
    TransferCancelledError,
    TransferError,
    TransferTimeoutError,
)
from kv_store.nixl.address import NixlAddress, RankSlabs, Region, Route, check_block_ids, routes_to
from kv_store.nixl.agent import Agent, load_nixl
from kv_store.nixl.digests import Digester, SlabReader, create_slab_reader, verified
from kv_store.nixl.heads import SlabShape
from kv_store.nixl.jobs import Job, JobTable
from kv_store.nixl.sender import NixlTransfer, Sender
from kv_store.staging import layout_of

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

_MIN_PAUSE_S = 50e-6  # between two polls of what is in flight
_MAX_PAUSE_S = 1e-3
_PAUSE_SHARE = 1 / 8  # of the time since the last event: the end of a write is noticed at most that much late
_PART_BYTES = 32 << 20  # measured: smaller ones cost more than they hide
_DRAIN_S = 2.0  # for writes in flight to complete on close
_CLOSE_TIMEOUT_S = 5.0

_Inbox = queue.SimpleQueue[Job | None]  # None closes


class NixlOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of the nixl connector."""

    timeout_s: Annotated[
        float, Meta(gt=0, le=3600, description="Seconds after which a transfer fails and its blocks are recomputed.")
    ] = 30.0


class NixlWorkerConnector:
    """Writes blocks into the KV caches of peers, and verifies what peers have written into this one."""

    def __init__(self, options: NixlOptions) -> None:
        self._options = options
        self._nixl = load_nixl()
        self._agent: Agent | None = None  # peers write through it
        self._saves: _Inbox = queue.SimpleQueue()
        self._loads: _Inbox = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._kv_cache: torch.Tensor | None = None

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
        block = layout_of(kv_cache, layout.num_feature_layers)
        shard = RankSlabs(fingerprint, layout, rank, SlabShape.of(block))
        region = Region(
            memory="DRAM" if kv_cache.is_cpu else "VRAM",
            device_id=kv_cache.device.index or 0,
            base=kv_cache.data_ptr(),
            num_blocks=kv_cache.shape[0],
            block_bytes=block.slab_bytes,
        )
        self._agent = Agent(self._nixl, region)
        self._jobs = JobTable(on_settled)
        self._kv_cache, self._fences = kv_cache, fences
        sending = _Sending(self._jobs, Sender(self._nixl, region), region, shard)
        self._start_thread("saves", lambda: sending.run(self._saves, kv_cache))
        verifying = _Verifying(self._jobs, region, shard)
        self._start_thread("loads", lambda: verifying.run(self._loads, kv_cache))
        address = NixlAddress(
            agent_name=self._agent.name,
            metadata=self._agent.metadata,
            fingerprint=fingerprint,
            layout=layout,
            region=region,
        )
        whole_bytes = layout.num_kv_heads * layout.num_layers * block.payload_bytes
        return ConnectorFacts(
            is_direct=True,
            address=encode_address(address.encode()),
            max_write_s=self._options.timeout_s,
            part_blocks=max(1, _PART_BYTES * block.num_kv_heads * block.num_layers // whole_bytes),
        )

    def split(self) -> SplitConnector:
        """See WorkerConnector."""
        return SplitConnector(per_rank=self, per_engine=None)

    def start_load(self, transfer: BlockTransfer) -> None:
        """See WorkerConnector."""
        self._submit(transfer, self._loads)

    def start_save(self, transfer: BlockTransfer) -> None:
        """See WorkerConnector."""
        self._submit(transfer, self._saves)

    def start_lookup(self, transfer: BlockTransfer) -> None:
        """See WorkerConnector. Never called: nothing is kept here."""
        raise RuntimeError("a direct connector keeps no blocks")

    def cancel(self, job_id: int) -> None:
        """See WorkerConnector."""
        if self._kv_cache is not None:
            self._jobs.cancel(job_id)

    def poll(self) -> list[TransferResult]:
        """See WorkerConnector."""
        return self._jobs.poll() if self._agent is not None else []

    def close(self) -> None:
        """See WorkerConnector. Writes in flight have a moment to complete."""
        if self._kv_cache is None:
            return
        self._saves.put(None)
        self._loads.put(None)
        give_up = time.monotonic() + _CLOSE_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, give_up - time.monotonic()))
            if thread.is_alive():
                logger.warning("thread %s hangs in nixl and is abandoned", thread.name)
        self._jobs.settle_all(TransferCancelledError.reason)
        if self._agent is not None:
            self._agent.close()
        self._kv_cache = None

    def _start_thread(self, name: str, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=f"kv-nixl-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _submit(self, transfer: BlockTransfer, inbox: _Inbox) -> None:
        if self._kv_cache is None:
            raise RuntimeError("the connector is not open")
        job = Job(transfer, time.monotonic() + self._options.timeout_s, self._fences)
        self._jobs.add(job)
        inbox.put(job)


@dataclass(slots=True)
class _Posted:
    """A write in flight."""

    job: Job
    transfers: list[NixlTransfer]  # transfers that have not ended, one for each part
    digests: Future[tuple[bytes, ...]]
    error: StoreError | None = None  # error of the first part that failed


class _Sending:
    """The work of the saving thread."""

    def __init__(self, jobs: JobTable, sender: Sender, region: Region, shard: RankSlabs) -> None:
        self._jobs = jobs
        self._sender = sender
        self._region = region
        self._shard = shard
        self._queued: deque[Job] = deque()
        self._posted: list[_Posted] = []

    def run(self, inbox: _Inbox, kv_cache: torch.Tensor) -> None:
        """Serves the inbox until it is closed. Blocks while there is nothing to do, and polls what is in flight at
        growing intervals."""
        self._digester = Digester(kv_cache, self._shard.layout.block_size, self._shard.slab)
        last_event = time.monotonic()
        while True:
            pause_s = min(max(_MIN_PAUSE_S, _PAUSE_SHARE * (time.monotonic() - last_event)), _MAX_PAUSE_S)
            with suppress(queue.Empty):
                job = inbox.get(timeout=pause_s if self._queued or self._posted else None)
                if job is None:
                    break
                self._queued.append(job)
                last_event = time.monotonic()
            self._post_ready()
            if self._reap():
                last_event = time.monotonic()
        self._close()

    def _post_ready(self) -> None:
        """Posts the next save if the compute stream has finished its blocks. One at a time: posting may take as long as
        the write, and earlier ones are over meanwhile."""
        if self._queued and (self._queued[0].is_ready or self._queued[0].is_overdue):
            job = self._queued.popleft()
            if job.is_overdue:
                self._jobs.settle(job, TransferTimeoutError.reason)
            elif self._jobs.begin(job):
                self._post(job)

    def _post(self, job: Job) -> None:
        try:
            routes, to_ids = self._checked(job.transfer)
            if to_ids:
                self._post_parts(job, routes, to_ids)
            else:
                self._jobs.settle(job)
        except TransferError as error:
            self._fail(job, error)
        except Exception as error:  # a bug may cost a recompute, but not the thread that all later jobs need
            logger.exception("a save failed")
            self._fail(job, TransferError(str(error)))

    def _post_parts(self, job: Job, routes: Sequence[Route], to_ids: Sequence[int]) -> None:
        """Posts a write for each part. After one that cannot be posted, the job waits for those before it."""
        posted = _Posted(job, [], self._digester.start(job.transfer, [route.part for route in routes]))
        block_ids = job.transfer.block_ids
        try:
            for route in routes:
                transfer = self._sender.post(route.address, route.source, block_ids, route.target, to_ids)
                posted.transfers.append(transfer)
        except StoreError as error:
            if not posted.transfers:
                raise
            posted.error = error
        self._posted.append(posted)

    def _checked(self, transfer: BlockTransfer) -> tuple[list[Route], tuple[int, ...]]:
        """Returns the checked ways of the parts, and blocks of the destination. Raises TransferError."""
        if transfer.destination is None:
            raise TransferError("connector nixl cannot save without a destination", param="destination")
        routes = routes_to(transfer.destination.address, self._shard)
        to_ids = transfer.destination.block_ids
        if len(to_ids) != len(transfer.block_ids):
            raise TransferError(f"{len(transfer.block_ids)} blocks for {len(to_ids)}", param="block_ids")
        check_block_ids(self._region, transfer.block_ids)
        for route in routes:
            check_block_ids(route.address.region, to_ids)
        return routes, to_ids

    def _reap(self) -> bool:
        """Settles writes that have ended. True: there was one."""
        under_way = [posted for posted in self._posted if not self._is_over(posted)]
        progressed = len(under_way) < len(self._posted)
        self._posted = under_way
        if any(posted.job.is_overdue for posted in under_way):
            self._abandon()
        return progressed

    def _is_over(self, posted: _Posted) -> bool:
        job = posted.job
        posted.transfers = [transfer for transfer in posted.transfers if not self._has_ended(posted, transfer)]
        if posted.transfers:
            return False
        if posted.error is not None:
            self._fail(job, posted.error)
        elif job.is_unwanted:
            self._jobs.settle(job, TransferCancelledError.reason)
        elif posted.digests.done():
            self._settle_written(job, posted.digests)
        else:
            return False
        return True

    def _has_ended(self, posted: _Posted, transfer: NixlTransfer) -> bool:
        try:
            return self._sender.is_done(transfer)
        except StoreError as error:
            posted.error = posted.error or error
            return True

    def _settle_written(self, job: Job, pending: Future[tuple[bytes, ...]]) -> None:
        try:
            digests = pending.result()
        except Exception:  # a bug may cost a recompute, but not the thread that all later jobs need
            logger.exception("the digests of a save failed")
            self._jobs.settle(job, TransferError.reason)
        else:
            self._jobs.settle(job, num_blocks_ok=len(digests), digests=digests)

    def _abandon(self) -> None:
        """Ends the agent, and so all writes, because one of them does not end."""
        logger.warning("a save exceeded its deadline; aborting all %d saves in flight", len(self._posted))
        self._sender.abandon()
        for posted in self._posted:
            error = TransferTimeoutError if posted.job.is_overdue else StoreError
            self._jobs.settle(posted.job, error.reason)
        self._posted.clear()

    def _fail(self, job: Job, error: TransferError) -> None:
        logger.warning("save of request %s failed: %s", job.transfer.request_id, error)
        self._jobs.settle(job, error.reason)

    def _close(self) -> None:
        give_up = time.monotonic() + _DRAIN_S
        while self._posted and time.monotonic() < give_up:
            self._reap()
            time.sleep(_MAX_PAUSE_S)
        self._sender.abandon()
        self._digester.close()


class _Verifying:
    """The work of the verifying thread."""

    def __init__(self, jobs: JobTable, region: Region, shard: RankSlabs) -> None:
        self._jobs = jobs
        self._region = region
        self._shard = shard

    def run(self, inbox: _Inbox, kv_cache: torch.Tensor) -> None:
        """Serve the inbox until it is closed."""
        reader = create_slab_reader(kv_cache)
        while (job := inbox.get()) is not None:
            try:
                self._verify(job, reader)
            except TransferError as error:
                logger.warning("load of request %s failed: %s", job.transfer.request_id, error)
                self._jobs.settle(job, error.reason)
            except Exception:  # a bug may cost a recompute, but not the thread that all later jobs need
                logger.exception("a load failed")
                self._jobs.settle(job, TransferError.reason)

    def _verify(self, job: Job, reader: SlabReader) -> None:
        transfer = job.transfer
        check_block_ids(self._region, transfer.block_ids)
        if len(transfer.digests) != len(transfer.block_ids):
            raise TransferError(f"{len(transfer.digests)} digests for {len(transfer.block_ids)} blocks")
        num_ok = 0
        shard = self._shard
        for is_right in verified(transfer, reader, shard.layout, shard.slab, shard.rank):
            if job.is_settled:
                return
            if not is_right or job.is_overdue:
                reason = TransferTimeoutError.reason if is_right else BlockCorruptError.reason
                logger.warning("load of request %s stopped at block %d: %s", transfer.request_id, num_ok, reason)
                self._jobs.settle(job, reason, num_ok)
                return
            num_ok += 1
        self._jobs.settle(job, num_blocks_ok=num_ok)

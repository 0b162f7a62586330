"""The connector of an engine of several ranks whose medium takes whole blocks, such as a store.

The driver has one connector for all ranks, over slots of host memory (`common.engine.worker.slots`), so that what
lies in the medium, and its digest, is the same whatever the number of ranks. The life of a job:

1. It waits for slots, loads before saves, saves for a tier last. Its blocks go in batches, of half the slots at most.
2. Of a batch that is saved, all ranks copy their heads to the slots; then the connector saves those. Of one that is
   loaded, the connector fills the slots, whole and verified; then all ranks copy their heads.
3. The job settles when its batches have, or those before the first that failed, and no other of its batches runs. The
   leading blocks of the batches count.

Jobs between pods, if there is a direct connector, do not pass through slots: each rank's connector does its part.
"""

from __future__ import annotations

import itertools
import os
import secrets
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import msgspec

from common.engine.config import EngineConfig
from common.engine.contract.layout import KVLayout
from common.engine.kv_connector import BlockTransfer, Connector, OpenConnector, TransferResult, WorkerConnector
from common.engine.worker.connector import create_connector
from common.engine.worker.slots import ELSEWHERE, SlotHeads, open_slots, slots_bytes
from common.errors import ConfigError, TransferCancelledError, TransferTimeoutError

_MEMORY = "/dev/shm"  # noqa: S108 - of the file only its owner may open
_MAX_WAIT_S = 30.0  # for slots, while a medium hangs
_NUM_URGENCIES = 3


@dataclass(slots=True)
class _Batch:
    """A run of a job's blocks: [first, stop)."""

    job: _Job
    first: int
    stop: int
    slots: list[int]
    is_in_slots: bool = False  # the first of its two steps is over


@dataclass(slots=True, eq=False)
class _Job:
    """A transfer through slots."""

    transfer: BlockTransfer
    is_load: bool
    due: float  # monotonic seconds; when it must have begun
    num_taken: int = 0  # blocks in batches that have begun
    running: set[int] = field(default_factory=set)  # ids of batches
    ended: dict[int, int] = field(default_factory=dict)  # first block of a batch -> the block after its last good one
    error: str = ""
    is_cancelled: bool = False

    @property
    def num_blocks(self) -> int:
        return len(self.transfer.block_ids)

    @property
    def urgency(self) -> int:
        """Lower is more urgent."""
        return 0 if self.is_load else 2 if self.transfer.is_for_tier else 1

    @property
    def num_blocks_ok(self) -> int:
        """Leading blocks that were moved."""
        num_ok = 0
        while (stop := self.ended.get(num_ok, num_ok)) > num_ok:
            num_ok = stop
        return num_ok


class Staging(NamedTuple):
    """How an engine of several ranks uses its connector."""

    store: StagedStore | None  # the driver's, if the connector moves whole blocks
    config: EngineConfig  # for the ranks

    @property
    def config_elsewhere(self) -> EngineConfig:
        """The configuration of ranks on other machines."""
        connector = self.config.connector
        if self.store is None or connector is None:
            return self.config
        return msgspec.structs.replace(self.config, connector=msgspec.structs.replace(connector, slots_path=ELSEWHERE))


def stage_connector(config: EngineConfig) -> Staging:
    """Divides the connector that is configured between the driver and the ranks. Raises ConfigError if its name or
    options are wrong."""
    if config.connector is None:
        return Staging(None, config)
    whole = create_connector(config.connector).split().per_engine
    if whole is None:
        return Staging(None, config)
    store = StagedStore(whole)
    of_ranks = msgspec.structs.replace(config.connector, slots_path=store.path)
    return Staging(store, msgspec.structs.replace(config, connector=of_ranks))


class StagedConnector:
    """See Connector. `whole` moves the slots' blocks, `ranks` copy between KV caches and slots."""

    def __init__(
        self,
        whole: Connector,
        ranks: OpenConnector,
        num_slots: int,
        block_size: int,
        on_settled: Callable[[], None],
    ) -> None:
        self._whole = whole
        self._ranks = ranks.connector
        self._is_direct = ranks.facts.is_direct
        self._block_size = block_size
        self._on_settled = on_settled
        self._lock = threading.Lock()  # guards all below, for who checks them
        self._num_slots = num_slots
        self._free = list(range(num_slots))
        self._batch_size = num_slots // 2
        self._ids = itertools.count(-1, -1)  # of batches; jobs have positive ones
        self._jobs: dict[int, _Job] = {}
        self._queued: list[deque[_Job]] = [deque() for _ in range(_NUM_URGENCIES)]  # with blocks that wait for slots
        self._running: dict[int, _Batch] = {}
        self._settled: list[TransferResult] = []

    def start_load(self, transfer: BlockTransfer) -> None:
        """See Connector."""
        if self._is_direct and not transfer.is_for_tier:
            self._ranks.start_load(transfer)
        else:
            self._submit(transfer, is_load=True)

    def start_save(self, transfer: BlockTransfer) -> None:
        """See Connector."""
        if self._is_direct and not transfer.is_for_tier:
            self._ranks.start_save(transfer)
        else:
            self._submit(transfer, is_load=False)

    def start_lookup(self, transfer: BlockTransfer) -> None:
        """See Connector."""
        self._whole.start_lookup(transfer)

    def cancel(self, job_id: int) -> None:
        """See Connector."""
        with self._lock:
            job = self._jobs.get(job_id)
            for each in (job_id,) if job is None else tuple(job.running):
                self._whole.cancel(each)
                self._ranks.cancel(each)
            if job is not None:
                job.is_cancelled, job.error = True, job.error or TransferCancelledError.reason
                self._settle_if_over(job)
        if job is not None:
            self._tell()

    def poll(self) -> list[TransferResult]:
        """See Connector."""
        with self._lock:
            for connector in (self._whole, self._ranks):
                for result in connector.poll():
                    batch = self._running.pop(result.job_id, None)
                    if batch is None:
                        self._settled.append(result)
                    else:
                        self._advance(batch, result)
            self._begin_batches()
            settled, self._settled = self._settled, []
        return settled

    def violations(self) -> list[str]:
        """Slots that are not either free or of one batch whose job lives, one line each. May be called from any
        thread."""
        with self._lock:
            running = [*self._running.values()]
            owners = Counter(self._free) + Counter(slot for batch in running for slot in batch.slots)
            ended = [batch for batch in running if self._jobs.get(batch.job.transfer.job_id) is not batch.job]
            return [
                *(f"slot {slot} has {owners[slot]} owners" for slot in range(self._num_slots) if owners[slot] != 1),
                *(f"slots {batch.slots} are of job {batch.job.transfer.job_id}, which has settled" for batch in ended),
            ]

    def _submit(self, transfer: BlockTransfer, *, is_load: bool) -> None:
        job = _Job(transfer, is_load, time.monotonic() + _MAX_WAIT_S)
        with self._lock:
            self._jobs[transfer.job_id] = job
            self._queued[job.urgency].append(job)
            self._settle_if_over(job)
            self._begin_batches()
        self._tell()

    def _tell(self) -> None:
        if self._settled:
            self._on_settled()

    def _begin_batches(self) -> None:
        """Begins batches of the most urgent jobs while there are slots."""
        for jobs in self._queued:
            while jobs:
                job = jobs[0]
                if job.num_taken == 0 and time.monotonic() >= job.due:
                    job.error = job.error or TransferTimeoutError.reason
                    self._settle_if_over(job)
                if job.error or job.num_taken == job.num_blocks:
                    jobs.popleft()
                    continue
                stop = min(job.num_taken + self._batch_size, job.num_blocks)
                if len(self._free) < stop - job.num_taken:
                    return
                slots = [self._free.pop() for _ in range(job.num_taken, stop)]
                batch = _Batch(job, job.num_taken, stop, slots)
                job.num_taken = stop
                self._start(batch)

    def _start(self, batch: _Batch) -> None:
        """Starts the next of a batch's two steps."""
        batch_id, job = next(self._ids), batch.job
        self._running[batch_id] = batch
        job.running.add(batch_id)
        slots = tuple(batch.slots[: batch.stop - batch.first])
        if job.is_load == batch.is_in_slots:
            part = self._part_of(batch, batch_id, job.transfer.block_ids[batch.first : batch.stop], slots)
            start = self._ranks.start_load if job.is_load else self._ranks.start_save
        else:
            part = self._part_of(batch, batch_id, slots, ())
            start = self._whole.start_load if job.is_load else self._whole.start_save
        start(part)

    def _part_of(
        self, batch: _Batch, batch_id: int, block_ids: tuple[int, ...], slots: tuple[int, ...]
    ) -> BlockTransfer:
        transfer = batch.job.transfer
        num_last = max(0, batch.stop - max(batch.first, batch.job.num_blocks - transfer.num_last))
        return replace(
            transfer,
            job_id=batch_id,
            block_ids=block_ids,
            block_hashes=transfer.block_hashes[batch.first : batch.stop],
            num_tokens_in_last=transfer.num_tokens_in_last if num_last else self._block_size,
            num_last=max(1, num_last),
            slots=slots,
        )

    def _advance(self, batch: _Batch, result: TransferResult) -> None:
        """Goes on with a batch of which a step is over."""
        job = batch.job
        job.running.discard(result.job_id)
        batch.stop = batch.first + result.num_blocks_ok
        job.error = job.error or result.error
        if not batch.is_in_slots and result.num_blocks_ok and not job.is_cancelled:
            batch.is_in_slots = True
            self._start(batch)
            return
        if batch.is_in_slots:
            job.ended[batch.first] = batch.stop
        self._free += batch.slots
        self._settle_if_over(job)

    def _settle_if_over(self, job: _Job) -> None:
        if job.running or (not job.error and job.num_taken < job.num_blocks):
            return
        if self._jobs.pop(job.transfer.job_id, None) is not None:
            self._settled.append(TransferResult(job.transfer.job_id, job.num_blocks_ok, job.error))


class StagedStore:
    """The driver's end: the connector of whole blocks, and the file with the slots, until all have opened it. Used in
    this order: `path` for the ranks, `allocate`, `open`, `close`."""

    def __init__(self, whole: WorkerConnector) -> None:
        """`whole`: see SplitConnector."""
        self._whole = whole
        self._staged: StagedConnector | None = None
        directory = _MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir()
        self.path = f"{directory}/baton-slots-{secrets.token_hex(16)}"

    def allocate(self, layout: KVLayout) -> None:
        """Reserves the memory of the slots, for the ranks to open. Raises ConfigError if there is too little."""
        num_bytes = slots_bytes(layout)
        try:
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode=0o600)
            try:
                os.posix_fallocate(descriptor, 0, num_bytes)
            finally:
                os.close(descriptor)
        except OSError as error:
            problem = f"ranks need {num_bytes >> 20} MiB in {os.path.dirname(self.path)}: {error}"
            raise ConfigError.of("connector", problem) from error

    def open(
        self, ranks: OpenConnector, fingerprint: bytes, layout: KVLayout, on_settled: Callable[[], None]
    ) -> OpenConnector:
        """Opens the connector over those of all ranks, which have opened the slots."""
        slots = self._slots = open_slots(self.path, layout)
        self._remove_file()
        kept = self._whole.register_kv_cache(slots, fingerprint, layout.of_store, on_settled)
        staged = self._staged = StagedConnector(self._whole, ranks, len(slots), layout.block_size, on_settled)
        facts = replace(ranks.facts, keeps_blocks=kept.keeps_blocks, wants_offloads=kept.wants_offloads)
        return OpenConnector(staged, facts)

    def violations(self) -> list[str]:
        """See StagedConnector."""
        return [] if self._staged is None else self._staged.violations()

    def heads_of(self, rank: int, layout: KVLayout) -> SlotHeads:
        """A rank's heads in the slots, once they are open."""
        return SlotHeads(self._slots, layout, rank)

    def close(self) -> None:
        """Releases the medium and the memory. Idempotent; safe after a partial start."""
        self._whole.close()
        self._remove_file()

    def _remove_file(self) -> None:
        with suppress(FileNotFoundError):
            os.unlink(self.path)

"""The table of unsettled jobs. Thread-safe; each job settles once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from common.engine.kv_connector import NO_FENCES, BlockTransfer, Fences, TransferResult
from common.errors import TransferCancelledError


class Job:
    """One transfer. `due` is in monotonic seconds."""

    def __init__(self, transfer: BlockTransfer, due: float, fences: Fences = NO_FENCES) -> None:
        self.transfer = transfer
        self.due = due
        self._fences = fences
        self.is_settled = False
        self.is_unwanted = False  # cancelled, while the transport still has it
        self.is_with_transport = False  # while True, only the transport's thread may settle it

    @property
    def is_overdue(self) -> bool:
        """True once the deadline has passed."""
        return time.monotonic() >= self.due

    @property
    def is_ready(self) -> bool:
        """True once the compute stream has written the blocks."""
        return self._fences.is_over(self.transfer.fence)


class JobTable:
    """All unsettled jobs, and the results that were not polled."""

    def __init__(self, on_settled: Callable[[], None]) -> None:
        self._on_settled = on_settled
        self._lock = threading.Lock()
        self._unsettled: dict[int, Job] = {}
        self._results: list[TransferResult] = []

    def add(self, job: Job) -> None:
        """Adds a job, which must settle."""
        with self._lock:
            self._unsettled[job.transfer.job_id] = job

    def begin(self, job: Job) -> bool:
        """Gives the job's blocks to the transport. False: it has settled before."""
        with self._lock:
            job.is_with_transport = not job.is_settled
            return job.is_with_transport

    def cancel(self, job_id: int) -> None:
        """Settles the job, unless the transport has it and will settle it. Unknown ids are ignored."""
        with self._lock:
            job = self._unsettled.get(job_id)
            if job is None:
                return
            job.is_unwanted = True
            if job.is_with_transport:
                return
        self.settle(job, TransferCancelledError.reason)

    def settle(self, job: Job, error: str = "", num_blocks_ok: int = 0, digests: tuple[bytes, ...] = ()) -> bool:
        """Settles the job. False: it has settled before."""
        job_id = job.transfer.job_id
        with self._lock:
            if job.is_settled:
                return False
            job.is_settled = True
            del self._unsettled[job_id]
            self._results.append(TransferResult(job_id, num_blocks_ok, error, digests))
        self._on_settled()
        return True

    def settle_all(self, error: str) -> None:
        """Settles every job."""
        with self._lock:
            jobs = list(self._unsettled.values())
        for job in jobs:
            self.settle(job, error)

    def poll(self) -> list[TransferResult]:
        """Returns the results since the last call."""
        with self._lock:
            results, self._results = self._results, []
        return results

"""What the contract suite of direct connectors needs: an engine's worker around a KV cache, with saves to a peer."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Sequence

import torch

from common.engine.kv_connector import BlockTransfer, Destination, TransferResult, WorkerConnector
from common.types import BlockHash, RequestId
from kv_store.registry import create_connector
from tests.contract.connector_rig import BLOCK_SIZE, DEADLINE_S, FINGERPRINT, create_kv_cache


class DirectRig:
    """A KV cache with its connector, driven as a worker drives it. Checks that every job settles exactly once."""

    def __init__(
        self,
        connector: WorkerConnector,
        kv_cache: torch.Tensor | None = None,
        *,
        fingerprint: bytes = FINGERPRINT,
    ) -> None:
        self.kv_cache = create_kv_cache() if kv_cache is None else kv_cache
        self.connector = connector
        self.results: dict[int, TransferResult] = {}
        self._wake = threading.Semaphore(0)
        self._job_ids = itertools.count(1)
        self._started: set[int] = set()
        facts = connector.register_kv_cache(self.kv_cache, fingerprint, self._wake.release)
        assert facts.is_direct
        self.address = facts.address

    def start_save(
        self,
        block_ids: Sequence[int],
        hashes: Sequence[BlockHash],
        address: bytes,
        to_ids: Sequence[int],
        num_in_last: int = BLOCK_SIZE,
    ) -> int:
        transfer = self._transfer(block_ids, hashes, num_in_last, destination=Destination(address, tuple(to_ids)))
        self.connector.start_save(transfer)
        return transfer.job_id

    def start_load(
        self,
        block_ids: Sequence[int],
        hashes: Sequence[BlockHash],
        digests: Sequence[bytes],
        num_in_last: int = BLOCK_SIZE,
    ) -> int:
        transfer = self._transfer(block_ids, hashes, num_in_last, digests=tuple(digests))
        self.connector.start_load(transfer)
        return transfer.job_id

    def save(
        self,
        block_ids: Sequence[int],
        hashes: Sequence[BlockHash],
        address: bytes,
        to_ids: Sequence[int],
        num_in_last: int = BLOCK_SIZE,
    ) -> TransferResult:
        return self.wait(self.start_save(block_ids, hashes, address, to_ids, num_in_last))

    def load(
        self,
        block_ids: Sequence[int],
        hashes: Sequence[BlockHash],
        digests: Sequence[bytes],
        num_in_last: int = BLOCK_SIZE,
    ) -> TransferResult:
        return self.wait(self.start_load(block_ids, hashes, digests, num_in_last))

    def wait(self, job_id: int) -> TransferResult:
        """Sleep until woken, as an idle engine does, until the job has settled."""
        while job_id not in self.results:
            assert self._wake.acquire(timeout=DEADLINE_S), f"job {job_id} did not settle"
            self.collect()
        return self.results[job_id]

    def collect(self) -> None:
        for result in self.connector.poll():
            assert result.job_id in self._started, f"job {result.job_id} was never started"
            assert result.job_id not in self.results, f"job {result.job_id} settled twice"
            self.results[result.job_id] = result

    def close(self) -> None:
        """Close, and check that nothing is left unsettled."""
        self.connector.close()
        self.collect()
        assert set(self.results) == self._started

    def bits(self, block_ids: Sequence[int]) -> list[bytes]:
        """The bytes of these blocks."""
        return [self.kv_cache[block_id].flatten().view(torch.uint8).numpy().tobytes() for block_id in block_ids]

    def _transfer(
        self,
        block_ids: Sequence[int],
        hashes: Sequence[BlockHash],
        num_in_last: int,
        *,
        destination: Destination | None = None,
        digests: tuple[bytes, ...] = (),
    ) -> BlockTransfer:
        job_id = next(self._job_ids)
        self._started.add(job_id)
        request_id = RequestId(f"request-{job_id}")
        return BlockTransfer(
            job_id, request_id, tuple(block_ids), tuple(hashes), num_in_last, destination=destination, digests=digests
        )


def nixl_rig(
    kv_cache: torch.Tensor | None = None,
    *,
    fingerprint: bytes = FINGERPRINT,
    timeout_s: float = DEADLINE_S,
    host_bytes: int = 0,
) -> DirectRig:
    """A worker with a nixl connector, and with host memory below its KV cache if it is to have any."""
    connector = create_connector("nixl", {"timeout_s": timeout_s, "host_bytes": host_bytes})
    return DirectRig(connector, kv_cache, fingerprint=fingerprint)

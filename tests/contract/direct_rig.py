"""What the contract suite of direct connectors needs: an engine's worker around a KV cache, with saves to a peer."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from common.engine.kv_connector import Destination, TransferResult
from common.types import BlockHash
from kv_store.registry import create_connector
from tests.contract.connector_rig import BLOCK_SIZE, DEADLINE_S, FINGERPRINT, WorkerRig


class DirectRig(WorkerRig):
    """With saves to a peer, and loads by digest."""

    @property
    def address(self) -> bytes:
        """Where peers write to."""
        assert self.facts.is_direct
        return self.facts.address

    def start_save(
        self,
        block_ids: Sequence[int],
        hashes: Sequence[BlockHash],
        address: bytes,
        to_ids: Sequence[int],
        num_in_last: int = BLOCK_SIZE,
        num_last: int = 1,
    ) -> int:
        to = Destination(address, tuple(to_ids))
        start = self.connector.start_save
        return self._start(start, block_ids, hashes, num_in_last, num_last=num_last, destination=to)

    def start_load(
        self,
        block_ids: Sequence[int],
        hashes: Sequence[BlockHash],
        digests: Sequence[bytes],
        num_in_last: int = BLOCK_SIZE,
        num_last: int = 1,
    ) -> int:
        start = self.connector.start_load
        return self._start(start, block_ids, hashes, num_in_last, num_last=num_last, digests=tuple(digests))

    def save(
        self,
        block_ids: Sequence[int],
        hashes: Sequence[BlockHash],
        address: bytes,
        to_ids: Sequence[int],
        num_in_last: int = BLOCK_SIZE,
        num_last: int = 1,
    ) -> TransferResult:
        return self.wait(self.start_save(block_ids, hashes, address, to_ids, num_in_last, num_last))

    def load(
        self,
        block_ids: Sequence[int],
        hashes: Sequence[BlockHash],
        digests: Sequence[bytes],
        num_in_last: int = BLOCK_SIZE,
        num_last: int = 1,
    ) -> TransferResult:
        return self.wait(self.start_load(block_ids, hashes, digests, num_in_last, num_last))


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

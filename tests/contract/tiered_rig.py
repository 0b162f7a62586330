"""A medium below host memory, for the contract suite: what is tampered with is the medium, and no pool hides that."""

from __future__ import annotations

from common.engine.kv_connector import WorkerConnector
from common.types import BlockHash
from kv_store.base import StoreConnectorOptions
from kv_store.host_pool import HostPool
from kv_store.store_connector import StoreWorkerConnector
from kv_store.tiered_store import TieredStore
from tests.contract.connector_rig import Medium

HOST_BYTES = 1 << 20


class TieredRig:
    """Every connector and every store on it has a host pool of its own."""

    def __init__(self, lower: Medium) -> None:
        self._lower = lower
        self._pools: list[HostPool] = []

    def connector(self) -> WorkerConnector:
        tiers = self.store()
        return StoreWorkerConnector(tiers, StoreConnectorOptions(), for_handoffs=tiers.shared)

    def store(self) -> TieredStore:
        self._pools.append(HostPool(HOST_BYTES))
        return TieredStore(self._pools[-1], self._lower.store())

    def frames(self) -> dict[BlockHash, bytes]:
        return self._lower.frames()

    def put(self, key: BlockHash, frame: bytes) -> None:
        self._lower.put(key, frame)
        self._forget(key)

    def remove(self, key: BlockHash) -> None:
        self._lower.remove(key)
        self._forget(key)

    def clear(self) -> None:
        keys = list(self.frames())
        self._lower.clear()
        for key in keys:
            self._forget(key)

    def _forget(self, key: BlockHash) -> None:
        for pool in self._pools:
            pool.discard(key)

"""What the contract suite needs of a connector under test: a medium to tamper with, and an engine around a KV cache."""

from __future__ import annotations

import itertools
import shutil
import threading
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import redis
import torch

from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.contract.layout import KVLayout
from common.engine.kv_connector import BlockTransfer, ConnectorFacts, TransferResult, WorkerConnector
from common.types import BlockHash, RequestId
from kv_store.base import BlockStore, StoreConnectorOptions
from kv_store.block_format import BlockFormat
from kv_store.faulty_store import FaultyStore
from kv_store.memory_store import InMemoryStore, MemoryMedium, MemoryStoreOptions
from kv_store.redis_store import RedisOptions, RedisStore
from kv_store.registry import create_connector
from kv_store.shared_storage import SharedStorageOptions, SharedStorageStore
from kv_store.staging import layout_of
from kv_store.store_connector import StoreWorkerConnector
from tests.redis_server import RedisServer

DEADLINE_S = 60.0  # no test is meant to wait for it
BLOCK_SIZE = 4
FINGERPRINT = bytes(range(32))


class Place(Protocol):
    """Where a store can be opened."""

    def store(self) -> BlockStore: ...


class Medium(Place, Protocol):
    """What connectors put blocks on."""

    def connector(self) -> WorkerConnector: ...

    def frames(self) -> dict[BlockHash, bytes]: ...

    def put(self, key: BlockHash, frame: bytes) -> None:
        """Replace what the medium holds under FINGERPRINT and `key`."""

    def remove(self, key: BlockHash) -> None: ...

    def clear(self) -> None:
        """Remove everything, as a restart of the medium does."""


class MemoryMediumRig:
    def __init__(self, namespace: str) -> None:
        self._name = uuid.uuid4().hex
        self._medium = MemoryMedium.named(self._name)
        self._namespace = namespace

    def connector(self) -> WorkerConnector:
        return create_connector("memory", {"store": self._name})

    def store(self) -> BlockStore:
        return InMemoryStore(MemoryStoreOptions(store=self._name))

    def frames(self) -> dict[BlockHash, bytes]:
        return {key: frame for (_, key), frame in self._medium.frames.items()}

    def put(self, key: BlockHash, frame: bytes) -> None:
        self._medium.put((self._namespace, key), frame, max_bytes=1 << 30)

    def remove(self, key: BlockHash) -> None:
        self._medium.remove((self._namespace, key))

    def clear(self) -> None:
        for key in list(self._medium.frames):
            self._medium.remove(key)


class SharedStorageRig:
    def __init__(self, namespace: str, path: Path) -> None:
        self._path = path
        self._namespace = namespace

    def connector(self) -> WorkerConnector:
        return create_connector("shared-storage", {"path": str(self._path), "max_bytes": 1 << 30})

    def store(self) -> BlockStore:
        return SharedStorageStore(SharedStorageOptions(path=str(self._path), max_bytes=1 << 30))

    def frames(self) -> dict[BlockHash, bytes]:
        return {BlockHash(bytes.fromhex(file.stem)): file.read_bytes() for file in self._path.rglob("*.kv")}

    def put(self, key: BlockHash, frame: bytes) -> None:
        file = self._file_of(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(frame)

    def remove(self, key: BlockHash) -> None:
        self._file_of(key).unlink()

    def clear(self) -> None:
        shutil.rmtree(self._path)

    def _file_of(self, key: BlockHash) -> Path:
        return self._path / self._namespace / key.hex()[:2] / f"{key.hex()}.kv"


class RedisRig:
    """Takes the server for itself: what was on it is gone."""

    def __init__(self, namespace: str, server: RedisServer) -> None:
        self._url = server.url
        self._prefix = f"baton:{namespace}:"
        self._client = redis.Redis.from_url(server.url)
        self._client.flushall()

    def connector(self) -> WorkerConnector:
        return create_connector("redis", {"url": self._url, "lookup_timeout_s": DEADLINE_S})

    def store(self) -> BlockStore:
        return RedisStore(RedisOptions(url=self._url, lookup_timeout_s=DEADLINE_S))

    def frames(self) -> dict[BlockHash, bytes]:
        return {
            BlockHash(bytes.fromhex(name.decode().rpartition(":")[2])): self._client.get(name)
            for name in self._client.keys("*")
        }

    def put(self, key: BlockHash, frame: bytes) -> None:
        self._client.set(self._prefix + key.hex(), frame)

    def remove(self, key: BlockHash) -> None:
        assert self._client.delete(self._prefix + key.hex()) == 1

    def clear(self) -> None:
        self._client.client_kill_filter(_type="normal", skipme=True)
        self._client.flushall()


def create_kv_cache(num_blocks: int = 12, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Random bits, NaN patterns included."""
    shape = (num_blocks, 3, 2, 2, BLOCK_SIZE, 8)
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)


def kv_layout(kv_cache: torch.Tensor) -> KVLayout:
    """The layout of a model with this KV cache."""
    _, num_layers, _, num_kv_heads, block_size, head_dim = kv_cache.shape
    dtype = str(kv_cache.dtype).removeprefix("torch.")
    return KVLayout(block_size, (KVGroupSpec(tuple(range(num_layers)), num_kv_heads, head_dim, head_dim, dtype),))


def block_format(kv_cache: torch.Tensor) -> BlockFormat:
    """Format in which its blocks are stored."""
    return BlockFormat(FINGERPRINT, layout_of(kv_cache), kv_layout(kv_cache).digest)


class WorkerRig:
    """A KV cache with its connector, driven as a worker drives it. Checks that every job settles exactly once."""

    def __init__(
        self, connector: WorkerConnector, kv_cache: torch.Tensor | None = None, *, fingerprint: bytes = FINGERPRINT
    ) -> None:
        self.kv_cache = create_kv_cache() if kv_cache is None else kv_cache
        self.connector = connector
        self.results: dict[int, TransferResult] = {}
        self._wake = threading.Semaphore(0)
        self._job_ids = itertools.count(1)
        self._started: set[int] = set()
        layout = kv_layout(self.kv_cache)
        self.facts: ConnectorFacts = connector.register_kv_cache(self.kv_cache, fingerprint, layout, self._wake.release)

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

    def _start(
        self,
        start: Callable[[BlockTransfer], None],
        block_ids: Sequence[int],
        hashes: Sequence[BlockHash],
        num_in_last: int = BLOCK_SIZE,
        **how: Any,
    ) -> int:
        job_id = next(self._job_ids)
        self._started.add(job_id)
        request_id = RequestId(f"request-{job_id}")
        start(BlockTransfer(job_id, request_id, tuple(block_ids), tuple(hashes), num_in_last, **how))
        return job_id


class EngineRig(WorkerRig):
    """With the saves and loads of a store's handoffs."""

    def start_save(self, *blocks: Any, **how: Any) -> int:
        return self._start(self.connector.start_save, *blocks, **how)

    def start_load(self, *blocks: Any, **how: Any) -> int:
        return self._start(self.connector.start_load, *blocks, **how)

    def save(self, *blocks: Any, **how: Any) -> TransferResult:
        return self.wait(self.start_save(*blocks, **how))

    def load(self, *blocks: Any, **how: Any) -> TransferResult:
        return self.wait(self.start_load(*blocks, **how))


def gated_connector(
    medium: Place, *, threads: int = 1, timeout_s: float = DEADLINE_S, frames: int = 100
) -> tuple[StoreWorkerConnector, FaultyStore]:
    """A connector on the medium that moves `frames` blocks at a time, and the store in between, which stalls and fails
    on demand."""
    store = FaultyStore(medium.store())
    staging_bytes = frames * block_format(create_kv_cache(1)).frame_bytes
    options = StoreConnectorOptions(threads=threads, timeout_s=timeout_s, staging_bytes=staging_bytes)
    return StoreWorkerConnector(store, options), store

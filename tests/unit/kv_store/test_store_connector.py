from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from common.engine.kv_connector import BlockTransfer, TransferResult
from common.types import BlockHash, RequestId
from kv_store import store_connector
from kv_store.base import StoreConnectorOptions
from kv_store.faulty_store import FaultyStore
from kv_store.memory_store import InMemoryStore, MemoryStoreOptions
from kv_store.registry import create_connector
from kv_store.staging import HostStaging
from kv_store.store_connector import StoreWorkerConnector
from tests.contract.connector_rig import kv_layout


def test_blocks_whose_copy_into_the_kv_cache_fails_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    kv_cache = torch.ones(4, 1, 2, 1, 4, 8)
    settled = threading.Event()
    connector = create_connector("memory", {})
    connector.register_kv_cache(kv_cache, bytes(32), kv_layout(kv_cache), settled.set)

    def result_of() -> TransferResult:
        assert settled.wait(10)
        settled.clear()
        (result,) = connector.poll()
        return result

    def transfer(job_id: int, block_ids: tuple[int, ...]) -> BlockTransfer:
        hashes = (BlockHash(bytes([1]) * 16), BlockHash(bytes([2]) * 16))
        return BlockTransfer(job_id, RequestId("r"), block_ids, hashes, 4)

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    try:
        connector.start_save(transfer(1, (0, 1)))
        assert result_of().num_blocks_ok == 2
        monkeypatch.setattr(HostStaging, "scatter", fail)
        connector.start_load(transfer(2, (2, 3)))
        assert result_of() == TransferResult(2, 0, "transfer")
    finally:
        connector.close()


class RecordingStore(InMemoryStore):
    """Keeps what it was asked for."""

    def __init__(self) -> None:
        super().__init__(MemoryStoreOptions(store="recording"))
        self.touched: list[tuple[BlockHash, ...]] = []

    def touch(self, keys: Sequence[BlockHash]) -> list[bool]:
        self.touched.append(tuple(keys))
        return super().touch(keys)


def test_a_lookup_is_one_call_however_many_blocks_a_batch_has() -> None:
    kv_cache = torch.ones(4, 1, 2, 1, 4, 8)
    store, settled = RecordingStore(), threading.Event()
    connector = StoreWorkerConnector(store, StoreConnectorOptions(threads=1, staging_bytes=1))
    connector.register_kv_cache(kv_cache, bytes(32), kv_layout(kv_cache), settled.set)
    hashes = tuple(BlockHash(bytes([index]) * 16) for index in range(3))
    try:
        connector.start_save(BlockTransfer(1, RequestId("r"), (0, 1), hashes[:2], 4))
        assert settled.wait(10)
        assert connector.poll() == [TransferResult(1, 2, "")]
        assert store.touched == [hashes[:1], hashes[1:2]]  # a batch is one block
        settled.clear()
        connector.start_lookup(BlockTransfer(2, RequestId("r"), (), hashes, 4))
        assert settled.wait(10)
        assert connector.poll() == [TransferResult(2, 2, found=(True, True, False))]
        assert store.touched[2:] == [hashes]
    finally:
        connector.close()


@pytest.mark.parametrize("hangs", [False, True])
def test_closing_waits_for_threads_unless_they_hang(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hangs: bool
) -> None:
    monkeypatch.setattr(store_connector, "_CLOSE_TIMEOUT_S", 0.01 if hangs else 60.0)
    store = FaultyStore(InMemoryStore(MemoryStoreOptions(store="closing")))
    connector = StoreWorkerConnector(store, StoreConnectorOptions(threads=1))
    others = set(threading.enumerate())
    kv_cache = torch.ones(4, 1, 2, 1, 4, 8)
    connector.register_kv_cache(kv_cache, bytes(32), kv_layout(kv_cache), lambda: None)
    threads = set(threading.enumerate()) - others
    with store.gate("touch") as gate:
        if hangs:
            connector.start_save(BlockTransfer(1, RequestId("r"), (0,), (BlockHash(bytes(16)),), 4))
            gate.wait_for_arrival()
        connector.close()
        if hangs:
            assert "thread kv-store-0 hangs in the block store and is abandoned" in caplog.messages
        else:
            assert not any(thread.is_alive() for thread in threads)
            assert not caplog.messages
    for thread in threads:
        thread.join(10)


def test_a_store_takes_no_parts_of_blocks() -> None:
    kv_cache = torch.ones(4, 1, 2, 1, 4, 8)
    layout = replace(kv_layout(kv_cache), tensor_parallel_size=2)
    connector = create_connector("memory", {})
    with pytest.raises(ValueError, match="a store keeps whole blocks"):
        connector.register_kv_cache(kv_cache, bytes(32), layout, lambda: None)
    connector.close()

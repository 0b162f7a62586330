"""A store that hangs, as requests see it: who waits, who is refused at once, and what is logged."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from common.engine.kv_connector import TransferResult
from common.errors import StoreUnavailableError
from common.types import BlockHash, hash_prompt, root_hash
from kv_store.base import BlockStore, StoreConnectorOptions
from kv_store.faulty_store import FaultyStore
from kv_store.guard import Backoff
from kv_store.memory_store import InMemoryStore, MemoryStoreOptions
from kv_store.redis_store import RedisOptions, RedisStore, _Server
from kv_store.registry import create_connector
from kv_store.store_connector import StoreWorkerConnector
from tests.contract.connector_rig import BLOCK_SIZE, DEADLINE_S, EngineRig
from tests.redis_server import running_redis

HASHES = hash_prompt(list(range(100, 100 + 6 * BLOCK_SIZE)), BLOCK_SIZE, root_hash())
NUM_THREADS = 2


class OutageRig(EngineRig):
    """With lookups."""

    def start_lookup(self, hashes: Sequence[BlockHash]) -> int:
        return self._start(self.connector.start_lookup, (), hashes, is_for_tier=True)

    def look_up(self, hashes: Sequence[BlockHash]) -> TransferResult:
        return self.wait(self.start_lookup(hashes))


@pytest.fixture
def create_rig() -> Iterator[Callable[..., OutageRig]]:
    rigs: list[OutageRig] = []

    def create(store: BlockStore, *, stall_s: float = math.inf, lookup_timeout_s: float = DEADLINE_S) -> OutageRig:
        options = StoreConnectorOptions(threads=NUM_THREADS, lookup_timeout_s=lookup_timeout_s)
        rigs.append(OutageRig(StoreWorkerConnector(store, options, stall_s=stall_s)))
        return rigs[-1]

    yield create
    for rig in rigs:
        rig.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def ok(result: TransferResult, num_blocks: int) -> bool:
    return result.num_blocks_ok == num_blocks and result.error == ""


def failed_at_once(rig: OutageRig, job: int) -> bool:
    """Whether the job has settled when its start returns."""
    rig.collect()
    return rig.results.get(job) == TransferResult(job, 0, "store_failed")


def test_while_all_threads_hang_in_the_store_jobs_fail_at_once(create_rig, request, caplog):
    store = FaultyStore(InMemoryStore(MemoryStoreOptions(store=request.node.name)))
    rig = create_rig(store, stall_s=0.0)
    assert ok(rig.save([1, 2], HASHES[:2]), 2)
    with store.gate("touch") as gate:
        hanging = []
        for _ in range(NUM_THREADS):
            hanging.append(rig.start_lookup(HASHES))
            gate.wait_for_arrival()
        for _ in range(5):
            assert failed_at_once(rig, rig.start_lookup(HASHES))
            assert failed_at_once(rig, rig.start_load([5, 6], HASHES[:2]))
            assert failed_at_once(rig, rig.start_save([3], HASHES[2:3]))
        assert not any(job in rig.results for job in hanging)
    assert all(ok(rig.wait(job), 2) for job in hanging)
    assert ok(rig.load([5, 6], HASHES[:2]), 2)
    begin, end = warnings(caplog)
    assert "the block store hangs: no call returned for" in begin
    assert "the block store answers again" in end


def test_jobs_that_wait_for_a_thread_fail_when_the_stall_is_noticed(create_rig, request):
    store = FaultyStore(InMemoryStore(MemoryStoreOptions(store=request.node.name)))
    rig = create_rig(store)
    with store.gate("touch") as gate:
        hanging = []
        for _ in range(NUM_THREADS):
            hanging.append(rig.start_lookup(HASHES))
            gate.wait_for_arrival()
        waiting = rig.start_save([1], HASHES[:1])
        rig.collect()
        assert waiting not in rig.results
        rig.connector._stall_s = 0.0
        assert failed_at_once(rig, rig.start_lookup(HASHES))
        assert failed_at_once(rig, waiting)
    assert all(ok(rig.wait(job), 0) for job in hanging)
    assert rig.save([1], HASHES[:1]).error == ""


def test_one_thread_that_hangs_leaves_the_others_at_work(create_rig, request):
    store = FaultyStore(InMemoryStore(MemoryStoreOptions(store=request.node.name)))
    rig = create_rig(store, stall_s=0.0)
    with store.gate("read_into") as gate:
        hanging = rig.start_load([1], HASHES[:1])
        gate.wait_for_arrival()
        assert ok(rig.look_up(HASHES), 0)
    assert rig.wait(hanging).error == "block_missing"


def test_a_hung_redis_costs_one_batch_of_transfers_a_time_out(create_rig, monkeypatch, caplog):
    """The sole server stops in the middle of work; it is used again when it goes on."""
    operations: list[object] = []
    send = _Server.send
    with running_redis() as server:
        store = RedisStore(RedisOptions(url=server.url, lookup_timeout_s=4.0), backoff=Backoff(base_s=0.01, max_s=0.01))
        rig = create_rig(store)
        assert ok(rig.save([1, 2, 3, 4], HASHES[:4]), 4)
        monkeypatch.setattr(
            _Server,
            "send",
            lambda server, commands, silence_s: (
                operations.append(commands) if commands[0][1] != b"baton:probe" else None,
                send(server, commands, silence_s),
            )[1],
        )
        with server.hung():
            jobs = [rig.start_load([5, 6, 7, 8], HASHES[:4]) for _ in range(10)]
            jobs += [rig.start_lookup(HASHES) for _ in range(10)]
            jobs += [rig.start_save([1], HASHES[4:5]) for _ in range(10)]
            assert {rig.wait(job).error for job in jobs} == {"store_failed"}
            assert 1 <= len(operations) <= NUM_THREADS
            for _ in range(20):
                assert rig.look_up(HASHES).error == "store_failed"
            assert len(operations) <= NUM_THREADS
            (line,) = warnings(caplog)
            assert f"Redis at {server.address}/0 is unavailable, requests proceed without it" in line
        wait_until(lambda: rig.look_up(HASHES).error == "")
        assert ok(rig.load([5, 6, 7, 8], HASHES[:4]), 4)
        assert rig.bits([5, 6, 7, 8]) == rig.bits([1, 2, 3, 4])
        assert ok(rig.save([9], HASHES[4:5]), 1)
        assert len(warnings(caplog)) == 2


def test_a_request_waits_for_a_hung_redis_once(create_rig):
    """What it waits for is its lookup, which opens the breaker before its time is over: its save is refused at once."""
    with running_redis() as server:
        rig = create_rig(RedisStore(RedisOptions(url=server.url, lookup_timeout_s=4.0)), lookup_timeout_s=4.0)
        with server.hung():
            assert rig.look_up(HASHES).error == "store_failed"
            with pytest.raises(StoreUnavailableError):
                rig.connector._store.touch(HASHES)


@pytest.mark.parametrize(("name", "path"), [("redis", ""), ("nixl", "store.")])
@pytest.mark.parametrize("host_bytes", [0, 1 << 20])
def test_a_pod_starts_while_its_store_is_down(name, path, host_bytes):
    options = {f"{path}url": "redis://127.0.0.1:1", "host_bytes": host_bytes} | ({"store": "redis"} if path else {})
    rig = OutageRig(create_connector(name, options))
    assert rig.facts.keeps_blocks
    looked_up = rig.look_up(HASHES)
    assert (looked_up.num_blocks_ok, looked_up.error) == (0, "" if host_bytes else "store_failed")
    rig.close()

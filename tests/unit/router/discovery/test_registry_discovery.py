"""Pods of the registry as a router sees them: leases, a dead registry, records that make no sense."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest
import redis
from prometheus_client import CollectorRegistry

from common.cancellation import end_tasks
from common.errors import UnavailableError
from common.registry import PodRecord, Reading, RedisRegistry
from router.discovery import Endpoint
from router.discovery.registry import RegistryDiscovery, RegistryView
from router.metrics import DiscoveryMetrics
from tests.redis_server import running_redis


def record(address="10.0.0.1:8000", role="decode", lease_s=30.0):
    return PodRecord(
        role=role,
        address=address,
        pod_id="pod",
        incarnation=1,
        fingerprint="ab",
        num_blocks=1,
        max_num_seqs=1,
        max_model_len=1,
        lease_s=lease_s,
    )


A, B = Endpoint("decode", "10.0.0.1:8000"), Endpoint("decode", "10.0.0.2:8000")


class Following:
    """A RegistryDiscovery at work."""

    def __init__(self, discovery, metrics):
        self.metrics = metrics
        self.latest = None
        self._changed = asyncio.Condition()
        self.task = asyncio.create_task(discovery.follow(self._take))

    def _take(self, endpoints):
        self.latest = endpoints

    async def until(self, condition):
        async with asyncio.timeout(60):
            while not condition():
                assert not self.task.done()
                await asyncio.sleep(0.005)

    def failures(self):
        return self.metrics.failures.labels("registry")._value.get()


@asynccontextmanager
async def following(server, poll_s=0.02):
    metrics = DiscoveryMetrics(CollectorRegistry())
    registry = RedisRegistry(server.url, "test")
    follower = Following(RegistryDiscovery(registry, metrics, poll_s=poll_s), metrics)
    try:
        yield follower
    finally:
        await end_tasks({follower.task})
        await registry.close()


@asynccontextmanager
async def announcing(server):
    registry = RedisRegistry(server.url, "test")
    try:
        yield registry
    finally:
        await registry.close()


async def test_pods_come_with_the_news_and_go():
    with running_redis() as server:
        async with announcing(server) as pods, following(server, poll_s=600) as router:
            await router.until(lambda: router.latest == ())
            await pods.announce(record(A.address))
            await router.until(lambda: router.latest == (A,))
            await pods.announce(record(B.address))
            await router.until(lambda: router.latest == (A, B))
            await pods.withdraw(record(A.address))
            await router.until(lambda: router.latest == (B,))


async def test_a_dead_registry_removes_nobody_and_is_told_once(caplog):
    caplog.set_level("INFO")
    with running_redis() as server:
        async with announcing(server) as pods, following(server) as router:
            await pods.announce(record(A.address))
            await router.until(lambda: router.latest == (A,))
            server.kill()
            await router.until(lambda: router.failures() >= 3)
            assert router.latest == (A,)
            server.start()  # and knows nothing any more
            await router.until(lambda: "answers again" in caplog.text)
            await pods.announce(record(B.address))
            await router.until(lambda: router.latest == (B, A))
    assert caplog.text.count("does not answer") == 1


async def test_records_that_make_no_sense_are_ignored_counted_and_told_once(caplog):
    with running_redis() as server:
        async with announcing(server) as pods, following(server) as router:
            with redis.Redis(port=server.port) as client:
                await pods.announce(record(B.address))
                for address, text in (("x", "{"), ("y", record(A.address).encode()), (b"\xff" * 300, b"\xff")):
                    client.hset("baton:{pods:test}:records", address, text)
                    client.zadd("baton:{pods:test}:leases", {address: 9e15})
                await router.until(lambda: router.latest == (B,))
                await router.until(lambda: router.metrics.ignored_records._value.get() == 3)
                await pods.announce(record(A.address))
                await router.until(lambda: router.latest == (A, B))
    assert caplog.text.count("makes no sense") == 3
    assert router.metrics.ignored_records._value.get() == 3


async def test_a_registry_whose_keys_are_of_another_kind_is_a_failure_and_not_the_end():
    with running_redis() as server, redis.Redis(port=server.port) as client:
        client.set("baton:{pods:test}:leases", "mine")
        async with announcing(server) as pods, following(server) as router:
            await router.until(lambda: router.failures() >= 2)
            client.delete("baton:{pods:test}:leases")
            await pods.announce(record(A.address))
            await router.until(lambda: router.latest == (A,))


class Scripted:
    """A registry that answers in this way, then for ever with the last answer."""

    def __init__(self, *answers):
        self._answers = list(answers)
        self.num_read = 0

    @asynccontextmanager
    async def changes(self):
        yield self

    async def wait(self, timeout_s):
        await asyncio.sleep(0)

    async def read(self):
        self.num_read += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_leases_that_ended_while_the_registry_did_not_answer_remove_nobody(clock):
    known = Reading(b"1", {A.address.encode(): record(A.address).encode()})
    registry = Scripted(known, UnavailableError("it hangs"), Reading(b"1", {}))
    discovery = RegistryDiscovery(registry, DiscoveryMetrics(CollectorRegistry()), clock, poll_s=0.001)
    views = []
    following = asyncio.create_task(discovery.follow(views.append))
    async with asyncio.timeout(60):
        while registry.num_read < 4:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    following.cancel()
    await asyncio.wait({following})
    assert set(views) == {(A,)}


@pytest.fixture
def clock():
    class Clock:
        now = 100.0

        def __call__(self):
            return self.now

    return Clock()


def test_after_a_failure_the_known_pods_count_for_one_more_lease(clock):
    view = RegistryView(clock)
    assert view.take(b"1", [record(A.address, lease_s=10)]) == (A,)
    view.doubt()
    clock.now += 1000
    assert view.take(b"1", []) == (A,)
    clock.now += 9
    assert view.take(b"1", [record(B.address)]) == (B, A)
    clock.now += 1
    assert view.take(b"1", [record(B.address)]) == (B,)


def test_a_registry_that_lost_its_data_is_doubted_as_well(clock):
    view = RegistryView(clock)
    view.take(b"1", [record(A.address, lease_s=10)])
    assert view.take(b"", []) == (A,)
    clock.now += 9
    assert view.take(b"2", [record(B.address)]) == (B, A), "the hold does not begin anew"
    clock.now += 1
    assert view.take(b"2", [record(B.address)]) == (B,)


def test_a_pod_that_is_missing_without_a_reason_for_doubt_is_gone(clock):
    view = RegistryView(clock)
    view.take(b"1", [record(A.address)])
    assert view.take(b"1", []) == ()


def test_a_pod_that_comes_back_in_another_role_is_not_held_in_the_old_one(clock):
    view = RegistryView(clock)
    view.take(b"1", [record(A.address)])
    view.doubt()
    assert view.take(b"1", [record(A.address, role="prefill")]) == (Endpoint("prefill", A.address),)

"""Records and leases on a real redis-server."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
import redis

from common.errors import ConfigError, UnavailableError
from common.registry import PodRecord, RecordError, RedisRegistry
from tests.redis_server import running_redis


def record(**changes: Any) -> PodRecord:
    facts = {
        "role": "decode",
        "address": "10.0.0.1:8000",
        "pod_id": "decode-1",
        "incarnation": 7,
        "fingerprint": "ab12",
        "num_blocks": 100,
        "max_num_seqs": 8,
        "max_model_len": 4096,
        "lease_s": 30.0,
    }
    return PodRecord(**{**facts, **changes})


@pytest.fixture(scope="module")
def server():
    with running_redis() as server:
        yield server


@pytest.fixture
async def registry(server):
    with redis.Redis(port=server.port) as client:
        client.flushall()
    registry = RedisRegistry(server.url, "test")
    yield registry
    await registry.close()


async def test_what_is_announced_is_read_until_it_is_withdrawn(registry):
    one, other = record(), record(address="[fd00::1]:8000", role="prefill")
    await registry.announce(one)
    await registry.announce(other)
    await registry.announce(one)
    reading = await registry.read()
    assert {PodRecord.decode(text) for text in reading.records.values()} == {one, other}
    await registry.withdraw(one)
    after = await registry.read()
    assert list(after.records) == [b"[fd00::1]:8000"]
    assert after.epoch == reading.epoch


async def test_a_successor_at_the_same_address_is_not_withdrawn_by_its_predecessor(registry):
    await registry.announce(record(incarnation=1))
    await registry.announce(record(incarnation=2))
    await registry.withdraw(record(incarnation=1))
    assert len((await registry.read()).records) == 1


async def test_a_lease_ends_by_itself_and_leaves_nothing_behind(registry, server):
    await registry.announce(record(lease_s=0.05))
    async with asyncio.timeout(60):
        while (await registry.read()).records:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    await registry.announce(record(address="10.0.0.2:8000"))
    with redis.Redis(port=server.port) as client:
        assert client.hkeys("baton:{pods:test}:records") == [b"10.0.0.2:8000"]
        assert 0 < client.pttl("baton:{pods:test}:records") <= 30_000


async def test_namespaces_do_not_meet(registry, server):
    other = RedisRegistry(server.url, "other")
    await other.announce(record())
    assert not (await registry.read()).records
    await other.close()


async def test_news_comes_with_new_records_and_not_with_renewals(registry):
    async with registry.changes() as changes:
        for change in (registry.announce(record()), registry.withdraw(record())):
            waiting = asyncio.create_task(changes.wait(60))
            await change
            async with asyncio.timeout(60):
                await waiting


async def test_data_that_was_lost_has_another_epoch(registry, server):
    await registry.announce(record())
    before = (await registry.read()).epoch
    with redis.Redis(port=server.port) as client:
        client.flushall()
    assert (await registry.read()).epoch != before
    await registry.announce(record())
    assert (await registry.read()).epoch not in (before, b"")


async def test_a_server_that_is_gone_is_an_unavailable_error():
    with running_redis() as server:
        registry = RedisRegistry(server.url.replace("redis://", "redis://user:secret@"), "test")
        with pytest.raises(UnavailableError) as refused:
            await registry.read()  # no such user
        server.kill()
        for call in (registry.read(), registry.announce(record()), registry.withdraw(record())):
            with pytest.raises(UnavailableError) as gone:
                await call
        with pytest.raises(UnavailableError):
            async with registry.changes():
                pass
        await registry.close()
    assert "secret" not in refused.value.message + gone.value.message


@pytest.mark.parametrize("url", ["http://a", "redis://", "redis://:secret@host:port", "secret"])
def test_a_url_that_is_none_is_refused_and_not_repeated(url):
    with pytest.raises(ConfigError, match="--registry") as refused:
        RedisRegistry(url, "test")
    assert "secret" not in refused.value.message


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"role": "router"}, "role"),
        ({"address": "nowhere"}, "address"),
        ({"address": "a b:1"}, "address"),
        ({"pod_id": ""}, "pod_id"),
        ({"address": "10.0.0.1:0"}, "address"),
        ({"address": "10.0.0.1:65536"}, "address"),
        ({"incarnation": -1}, "incarnation"),
        ({"fingerprint": "xyz"}, "fingerprint"),
        ({"num_blocks": 0}, "num_blocks"),
        ({"max_num_seqs": "8"}, "max_num_seqs"),
        ({"max_model_len": 2**70}, "max_model_len"),
        ({"num_blocks": 1e99}, "num_blocks"),
        ({"lease_s": 0}, "lease_s"),
        ({"lease_s": 1e9}, "lease_s"),
    ],
)
def test_a_record_that_makes_no_sense_is_refused(changes, said):
    text = json.dumps({**msgspec.structs.asdict(record()), **changes}).encode()
    with pytest.raises(RecordError, match=said):
        PodRecord.decode(text)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"\xff\xfe", b"null", b'{"role": "decode"}'])
def test_text_that_is_no_record_is_refused(text):
    with pytest.raises(RecordError):
        PodRecord.decode(text)


def test_what_a_newer_pod_adds_is_ignored():
    text = msgspec.json.encode({**msgspec.structs.asdict(record()), "colour": "red"})
    assert PodRecord.decode(text) == record()

"""A pod makes itself known in the registry."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from common.errors import UnavailableError
from common.pod.announce import AnnounceConfig, Announcer
from common.registry import PodRecord, RedisRegistry
from decode_service.__main__ import main as decode_main
from decode_service.config import DecodeConfig
from tests.pods import decode_pod, prefill_pod, wait_for
from tests.redis_server import running_redis


async def records(registry: RedisRegistry) -> list[PodRecord]:
    return [PodRecord.decode(text) for text in (await registry.read()).records.values()]


async def test_a_pod_is_listed_from_when_it_serves_until_it_ends() -> None:
    with running_redis() as server:
        registry = RedisRegistry(server.url, "blue")
        announcing = AnnounceConfig(registry=server.url, registry_namespace="blue", registry_lease_s=20.0)

        async def is_listed() -> bool:
            return bool(await records(registry))

        async with decode_pod({}, announcing=announcing) as pod:
            await wait_for(is_listed)
            (found,) = await records(registry)
            spec = pod.context.spec
            assert found == PodRecord(
                role="decode",
                address=pod.address,
                pod_id=pod.context.pod_id,
                incarnation=pod.context.incarnation,
                fingerprint=spec.fingerprint.hex(),
                num_blocks=spec.num_blocks,
                max_num_seqs=spec.max_num_seqs,
                max_model_len=spec.max_model_len,
                lease_s=20.0,
            )
        assert not await is_listed()
        announcing = AnnounceConfig(registry=server.url, registry_namespace="blue", advertise="pod.example:77")
        async with prefill_pod({}, announcing=announcing):
            await wait_for(is_listed)
            (found,) = await records(registry)
            assert (found.role, found.address) == ("prefill", "pod.example:77")
        await registry.close()


async def test_a_registry_that_is_gone_does_not_keep_a_pod_from_serving(caplog: pytest.LogCaptureFixture) -> None:
    with running_redis() as server:
        server.kill()
        async with decode_pod({}, announcing=AnnounceConfig(registry=server.url)):
            await wait_for(lambda: "cannot announce this pod" in caplog.text)
    assert "cannot withdraw from the registry" in caplog.text


class Flaky:
    """A registry that fails when told to."""

    def __init__(self) -> None:
        self.fails = False
        self.num_renewals = 0
        self.num_failures = 0

    async def announce(self, record: PodRecord) -> None:
        if self.fails:
            self.num_failures += 1
            raise UnavailableError("gone")
        self.num_renewals += 1

    async def withdraw(self, record: PodRecord) -> None:
        raise UnavailableError("gone")


async def test_a_lease_is_renewed_through_failures_which_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    registry = Flaky()
    record = PodRecord(
        role="decode",
        address="a:1",
        pod_id="a",
        incarnation=1,
        fingerprint="",
        num_blocks=1,
        max_num_seqs=1,
        max_model_len=1,
        lease_s=0.003,
    )
    announcer = Announcer(registry, record)
    running = asyncio.create_task(announcer.run())
    await wait_for(lambda: registry.num_renewals >= 3)
    registry.fails = True
    await wait_for(lambda: registry.num_failures >= 3)
    registry.fails = False
    before = registry.num_renewals
    await wait_for(lambda: registry.num_renewals >= before + 2)
    running.cancel()
    await asyncio.wait({running})
    await announcer.withdraw()
    assert caplog.text.count("cannot announce") == 1
    assert caplog.text.count("announced in the registry as a:1") == 2


@pytest.mark.parametrize(
    ("host", "advertise", "address"),
    [
        ("10.0.0.1", "", "10.0.0.1:80"),
        ("::1", "", "[::1]:80"),
        ("0.0.0.0", "pod.svc", "pod.svc:80"),
        ("::", "fd00::1", "[fd00::1]:80"),
        ("::", "[fd00::1]:8000", "[fd00::1]:8000"),
        ("0.0.0.0", "10.0.0.1:8000", "10.0.0.1:8000"),
    ],
)
def test_the_address_is_that_which_others_reach(host: str, advertise: str, address: str) -> None:
    assert AnnounceConfig(advertise=advertise).address(host, 80) == address


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"host": "0.0.0.0"}, "--advertise: must be given"),
        ({"host": "::"}, "--advertise: must be given"),
        ({"advertise": "a:99999"}, "--advertise: expected"),
        ({"advertise": ":80"}, "--advertise: expected"),
    ],
)
def test_a_pod_that_nobody_could_reach_is_refused(settings: dict[str, Any], said: str) -> None:
    announcing = AnnounceConfig(registry="redis://localhost", advertise=settings.pop("advertise", ""))
    with pytest.raises(ValueError, match=said):
        DecodeConfig(announcing=announcing, **settings)


def test_a_wrong_registry_is_one_line_before_the_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert decode_main(["--registry", "http://user:secret@host"]) == 2
    said = capsys.readouterr().err
    assert "baton: error: --registry: expected redis://" in said
    assert "secret" not in said

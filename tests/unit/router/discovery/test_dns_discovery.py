"""Pods behind a name."""

from __future__ import annotations

import asyncio
import socket

import pytest
from prometheus_client import CollectorRegistry

from router.config import RouterConfig
from router.discovery import Endpoint, StaticDiscovery
from router.discovery.combined import CombinedDiscovery
from router.discovery.dns import DnsDiscovery, parse_dns
from router.metrics import DiscoveryMetrics

ENTRY = "dns:decode.svc:8000"


class Answers:
    """A resolver that gives these one after the other, then the last one for ever."""

    def __init__(self, *answers):
        self._answers = list(answers)
        self.num_asked = 0

    async def __call__(self, name, port):
        assert (name, port) == ("decode.svc", 8000)
        self.num_asked += 1
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def views_of(resolve, metrics, *, num_lookups):
    """What is published in the course of so many lookups."""
    views = []
    following = asyncio.create_task(
        DnsDiscovery("decode", ENTRY, metrics, resolve, interval_s=0.001).follow(views.append)
    )
    async with asyncio.timeout(60):
        while resolve.num_asked < num_lookups:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following
    return [[endpoint.address for endpoint in view] for view in views]


@pytest.fixture
def metrics():
    return DiscoveryMetrics(CollectorRegistry())


async def test_all_addresses_of_both_families_are_pods(metrics):
    resolve = Answers(["10.0.0.2", "10.0.0.1", "fd00::1", "10.0.0.2"], ["10.0.0.3"])
    views = await views_of(resolve, metrics, num_lookups=3)
    assert views[0] == ["10.0.0.1:8000", "10.0.0.2:8000", "[fd00::1]:8000"]
    assert views[1] == ["10.0.0.3:8000"]


@pytest.mark.parametrize(
    "failure",
    [
        socket.gaierror(socket.EAI_NONAME, "Name or service not known"),
        TimeoutError("no answer"),
        UnicodeError("label too long"),
        [],
        ["not an address"],
    ],
)
async def test_a_failed_lookup_changes_nothing_is_counted_and_told_once(failure, metrics, caplog):
    resolve = Answers(["10.0.0.1"], failure, failure, ["10.0.0.2"])
    views = await views_of(resolve, metrics, num_lookups=5)
    assert views[:2] == [["10.0.0.1:8000"], ["10.0.0.2:8000"]]
    assert metrics.failures.labels(ENTRY)._value.get() == 2
    assert caplog.text.count("cannot be resolved") == 1


async def test_the_system_resolves():
    views = []
    published = asyncio.Event()

    def publish(endpoints):
        views.append(endpoints)
        published.set()

    metrics = DiscoveryMetrics(CollectorRegistry())
    following = asyncio.create_task(DnsDiscovery("prefill", "dns:localhost:9", metrics).follow(publish))
    async with asyncio.timeout(60):
        await published.wait()
    following.cancel()
    assert Endpoint("prefill", "127.0.0.1:9") in views[0]


@pytest.mark.parametrize(
    "entry", ["dns:", "dns:name", "dns::80", "dns:name:0", "dns:name:70000", "dns:a b:80", "dns:a..b:80", "dns:-a:80"]
)
def test_an_entry_that_is_none_is_refused_by_name(entry):
    with pytest.raises(ValueError):
        parse_dns(entry)
    with pytest.raises(ValueError, match="--decode"):
        RouterConfig(decode=[entry])


async def test_several_sources_are_one(metrics):
    class Fails:
        initial = ()
        num_tried = 0

        async def follow(self, publish):
            self.num_tried += 1
            raise RuntimeError("a fault of ours")

    fails = Fails()
    static = StaticDiscovery(["a:1"], ["b:1"])
    resolve = Answers(["10.0.0.1"])
    dns = DnsDiscovery("decode", ENTRY, metrics, resolve)
    combined = CombinedDiscovery({"static": static, ENTRY: dns, "bad": fails}, metrics)
    assert combined.initial == (Endpoint("prefill", "a:1"), Endpoint("decode", "b:1"))
    views = []
    following = asyncio.create_task(combined.follow(views.append))
    async with asyncio.timeout(60):
        while not (views and len(views[-1]) == 3 and fails.num_tried):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert views[-1][-1] == Endpoint("decode", "10.0.0.1:8000")
    assert metrics.pods.labels(ENTRY)._value.get() == 1
    assert metrics.failures.labels("bad")._value.get() == 1
    following.cancel()
    with pytest.raises(asyncio.CancelledError):
        await following

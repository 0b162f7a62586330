"""A cluster whose sole Redis is down at the start, comes up, hangs and goes on: every request is answered."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

import httpx

from common.demo_model import DEMO_MODEL_NAME
from tests.e2e.cluster import SETTLE_DEADLINE_S, Cluster, running_cluster
from tests.e2e.reference import greedy_completion
from tests.redis_server import RedisServer, running_redis

MAX_TOKENS = 8
LOOKUP_TIMEOUT_S = 4  # a hung server is noticed in half of it, however busy the machine is
_numbers = itertools.count()


async def test_requests_go_on_without_redis_and_use_it_when_it_is_there() -> None:
    with running_redis() as server:
        server.kill()
        options = ("--connector", "redis", "--connector-options", f"url={server.url}")
        options += ("--connector-options", f"lookup_timeout_s={LOOKUP_TIMEOUT_S}")
        with running_cluster("--prefill", "1", "--decode", "1", *options) as cluster:
            await ask(cluster)
            async with asyncio.timeout(SETTLE_DEADLINE_S):
                while len(outages(cluster, server)) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            assert len(outages(cluster, server)) == 2, "one line of each pod"
            server.start()
            await ask_until(cluster, lambda: external_tokens(cluster) > 0)
            before = external_tokens(cluster)
            with server.hung():
                for _ in range(5):
                    await ask(cluster)
                assert external_tokens(cluster) == before
            assert len(outages(cluster, server)) <= 4
            assert not [line for line in cluster.lines if "lookup of request" in line and "timed out" in line]
            await ask_until(cluster, lambda: external_tokens(cluster) > before)
            cluster.check_integrity()


async def ask(cluster: Cluster) -> None:
    """One request with a prompt that no pod knows, and the right answer to it."""
    prompt = f"{next(_numbers)}. The sun is a star and the sky is blue. " * 8
    body = {"model": DEMO_MODEL_NAME, "prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=150) as client:
        response = (await client.post(f"{cluster.url}/v1/completions", json=body)).raise_for_status().json()
    assert response["choices"][0]["text"] == greedy_completion(prompt, MAX_TOKENS, ignore_eos=True)


async def ask_until(cluster: Cluster, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(SETTLE_DEADLINE_S):
        while not await asyncio.to_thread(condition):
            await ask(cluster)


def outages(cluster: Cluster, server: RedisServer) -> list[str]:
    """What pods have logged of outages that began."""
    return [line for line in cluster.lines if f"Redis at {server.address}/0 is unavailable, requests proceed" in line]


def external_tokens(cluster: Cluster) -> float:
    """Prompt tokens whose KV came through the connector so far."""
    lines = httpx.get(f"{cluster.url}/metrics").text.splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith("baton_router_external_tokens_total{")
    )

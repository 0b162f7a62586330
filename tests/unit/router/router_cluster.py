"""A router over fake pods, in this process, on real ports."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import msgspec

from common.config import build
from router.config import RouterConfig
from router.pods.pod import PodState
from router.runtime import Router


class RouterCluster:
    """Fake pods, a router over them, and an HTTP client for it."""

    def __init__(self, router: Router, client: httpx.AsyncClient, prefill, decode):
        self.router = router
        self.client = client
        self.prefill = prefill
        self.decode = decode

    async def post(self, path, **body):
        return await self.client.post(path, json=body)

    async def complete(self, **body):
        """Text and whole body of a completion that must succeed."""
        response = await self.post("/v1/completions", **body)
        assert response.status_code == 200, response.text
        return response.json()

    def metric(self, name, **labels):
        """A figure of the router; of the first model if it is one of each."""
        registry = self.router.metrics.registry
        value = registry.get_sample_value(name, labels)
        if value is None:
            of_model = {"model_name": self.router.service.models[0].name, **labels}
            value = registry.get_sample_value(name, of_model)
        return value or 0.0

    async def until(self, condition):
        """Wait for something about the pods as the router sees them."""
        cluster = self.router.cluster
        while not condition():
            await cluster._changed.wait()

    async def until_ready(self):
        await self.until(lambda: all(pod.state is PodState.READY for pod in self.router.cluster.pods))

    async def until_quiet(self):
        """No pod has anything left of any request."""
        for pod in self.decode:
            await pod.until(lambda pod=pod: not pod.live)
        assert not self.router.service._running
        for pod in self.router.cluster.pods:
            load = pod.engines[0].load
            assert (load.num_requests, load.num_tokens, load.work, load.num_blocks) == (0, 0, 0, 0)


@asynccontextmanager
async def run_cluster(prefill=(), decode=(), **settings):
    """Settings by their names, or the structs that hold them. With prefill pods, prompts go there unless the settings
    say otherwise: tests choose where, not predictions."""
    given = {}
    for name, value in settings.items():
        given |= msgspec.structs.asdict(value) if isinstance(value, msgspec.Struct) else {name: value}
    async with AsyncExitStack() as stack:
        for pod in (*prefill, *decode):
            await stack.enter_async_context(pod)
        config = build(
            RouterConfig,
            section={
                "port": 0,
                "grpc_port": 0,
                "shutdown_grace_s": 0.0,
                "remote_prefill": "prefer",
                "canary_interval_s": 0,  # which sends requests of its own when a busy machine makes a test slow
                "stall_timeout_s": 0,
                **given,
                "prefill": [pod.address for pod in prefill],
                "decode": [pod.address for pod in decode],
            },
        )
        router = await stack.enter_async_context(Router(config).running())
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=router.http_url, timeout=60))
        yield RouterCluster(router, client, prefill, decode)


async def until(condition):
    """Wait for something about the router that nothing announces."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)

"""LoRA adapters from an operator's request to the tokens of an answer: router and pods over gRPC, engines whose model
does not exist."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from common.engine.config import AdapterConfig
from common.engine.executor.fake import expected_tokens
from router.config import RouterConfig
from router.placing.config import RoutingConfig
from router.pods.config import HealthConfig
from router.runtime import Router
from router.serving.config import ServingConfig
from tests.integration.cluster import all_ready
from tests.pods import DEADLINE_S, RunningPod, Store, decode_pod, prefill_pod, prompt_of, wait_for

MODEL = "baton-demo"
PROMPT = prompt_of(40)


class Cluster(NamedTuple):
    client: httpx.AsyncClient
    prefill: RunningPod
    decode: RunningPod

    async def act(self, path: str, **body: object) -> None:
        response = await self.client.post(path, json=body)
        assert response.status_code == 200, response.text

    async def load(self, name: str, path: str, *, in_place: bool = False) -> None:
        await self.act("/v1/load_lora_adapter", lora_name=name, lora_path=path, load_inplace=in_place)

    async def complete(self, name: str, **body: object) -> httpx.Response:
        asked = {"model": name, "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        return await self.client.post("/v1/completions", json={**asked, "max_tokens": 8, **body})

    async def tokens(self, name: str, **body: object) -> list[list[int]]:
        response = await self.complete(name, **body)
        assert response.status_code == 200, response.text
        assert response.json()["model"] == name
        return [choice["token_ids"] for choice in response.json()["choices"]]


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    store: Store = {}
    settings = {"served_model_name": MODEL, "lora_grace_s": 0.2, "adapters": AdapterConfig(max_loras=2)}
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(prefill_pod(store, **settings))
        decode = await stack.enter_async_context(decode_pod(store, executor={"step_s": 0.01}, **settings))
        config = RouterConfig(
            port=0,
            grpc_port=0,
            prefill=[prefill.address],
            decode=[decode.address],
            serving=ServingConfig(routing=RoutingConfig(remote_prefill="prefer")),
            pod_health=HealthConfig(stall_timeout_s=0, canary_interval_s=0),  # a crowded machine may stop an engine
        )
        router = await stack.enter_async_context(Router(config).running())
        await all_ready(router, 1, 1)
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=router.http_url, timeout=DEADLINE_S))
        yield Cluster(client, prefill, decode)


def adapter(directory: Path, weights: bytes) -> tuple[str, bytes]:
    """The path of an adapter for a fake executor, and its digest."""
    directory.mkdir(exist_ok=True)
    (directory / "adapter_model.safetensors").write_bytes(weights)
    return str(directory), hashlib.sha256(weights).digest()


async def test_each_adapter_has_its_own_answers_through_the_handoff(cluster: Cluster, tmp_path: Path):
    adapters = {name: adapter(tmp_path / name, name.encode()) for name in ("polite", "terse")}
    for name, (path, _) in adapters.items():
        await cluster.load(name, path)
    names = (MODEL, *adapters)
    answers = await asyncio.gather(*(cluster.tokens(name) for name in names))
    digests = (b"", *(digest for _, digest in adapters.values()))
    expected = [[expected_tokens(PROMPT, 8, adapter=digest)] for digest in digests]
    assert answers == expected
    assert len({str(each) for each in expected}) == 3
    assert cluster.decode.metric("baton_pod_handoff_external_tokens_total") == 3 * len(PROMPT), "none has another's KV"
    assert cluster.decode.metric("baton_pod_kv_recompute_total") == 0
    ((first, second),) = [await cluster.tokens("polite", n=2)]
    assert first == second == expected[1][0]
    (found,) = await cluster.tokens("terse", use_beam_search=True, n=1, max_tokens=4)
    assert found == expected[2][0][:4]


async def test_prompts_are_pooled_with_their_adapter(cluster: Cluster, tmp_path: Path):
    path, digest = adapter(tmp_path / "a", b"weights")
    await cluster.load("polite", path)

    async def embedding(name: str) -> list[float]:
        response = await cluster.client.post("/v1/embeddings", json={"model": name, "input": PROMPT[:30]})
        assert response.status_code == 200, response.text
        assert response.json()["model"] == name
        values: list[float] = response.json()["data"][0]["embedding"]
        return values

    plain, adapted = [await embedding(name) for name in (MODEL, "polite")]
    assert plain != adapted
    cluster.prefill.gate.shut()
    accepted = asyncio.create_task(embedding("polite"))
    await wait_for(lambda: len(cluster.prefill.context.requests) == 1)
    await cluster.act("/v1/unload_lora_adapter", lora_name="polite")
    assert (await cluster.complete("polite")).status_code == 404
    await wait_for(lambda: not cluster.decode.executor.adapters.installed)
    assert cluster.prefill.executor.adapters.installed == {digest}
    cluster.prefill.gate.open()
    assert await accepted == adapted
    await wait_for(lambda: not cluster.prefill.executor.adapters.installed)


async def test_nothing_that_was_accepted_fails_by_an_unload(cluster: Cluster, tmp_path: Path):
    path, digest = adapter(tmp_path / "a", b"weights")
    await cluster.load("polite", path)
    expected = expected_tokens(PROMPT, 8, adapter=digest)
    cluster.decode.gate.shut()
    accepted = [asyncio.create_task(cluster.complete("polite")) for _ in range(12)]
    await wait_for(lambda: len(cluster.decode.context.requests) == 12)
    await cluster.act("/v1/unload_lora_adapter", lora_name="polite")
    assert (await cluster.complete("polite")).status_code == 404
    await wait_for(
        lambda: not cluster.prefill.executor.adapters.installed
    )  # after its grace, as nothing needs it there
    assert cluster.decode.executor.adapters.installed == {digest}
    cluster.decode.gate.open()
    for task in accepted:
        assert (await task).json()["choices"][0]["token_ids"] == expected
    await wait_for(lambda: not cluster.decode.executor.adapters.installed)


async def test_replaced_weights_are_for_new_requests(cluster: Cluster, tmp_path: Path):
    path, old = adapter(tmp_path / "a", b"old")
    await cluster.load("polite", path)
    running = asyncio.create_task(cluster.tokens("polite", max_tokens=100))
    await wait_for(lambda: len(cluster.decode.context.requests) == 1)
    _, new = adapter(tmp_path / "a", b"new")
    await cluster.load("polite", path, in_place=True)
    assert await cluster.tokens("polite") == [expected_tokens(PROMPT, 8, adapter=new)]
    assert await running == [expected_tokens(PROMPT, 100, adapter=old)]


async def test_a_stream_that_broke_goes_on_with_its_adapter(cluster: Cluster, tmp_path: Path):
    path, digest = adapter(tmp_path / "a", b"weights")
    await cluster.load("polite", path)
    body = {"model": "polite", "prompt": PROMPT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}

    async def read(headers: dict[str, str], num_tokens: int) -> tuple[list[int], str]:
        """The first tokens, and the id of the last event."""
        tokens, last_id = [], ""
        asked = {**body, "max_tokens": 20, "stream": True}
        async with cluster.client.stream("POST", "/v1/completions", json=asked, headers=headers) as response:
            assert response.status_code == 200
            async for line in response.aiter_lines():
                if line.startswith("id: "):
                    last_id = line.removeprefix("id: ")
                elif line.startswith("data: {"):
                    tokens += json.loads(line.removeprefix("data: "))["choices"][0].get("token_ids") or []
                elif not line and len(tokens) >= num_tokens:
                    break
        return tokens, last_id

    first, last_id = await read({"x-baton-resumable": "1"}, 5)
    rest, _ = await read({"last-event-id": last_id}, 20 - len(first))
    assert 5 <= len(first) < 20
    assert first + rest == expected_tokens(PROMPT, 20, adapter=digest)

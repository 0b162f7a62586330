"""Two prefill pods, two decode pods, many clients at once, over every connector."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import NamedTuple

import httpx
import openai
import pytest

from common.demo_model import DEMO_MODEL_NAME
from common.engine.llm import LLM
from common.types import SamplingParams
from tests.e2e.cluster import Cluster, running_cluster
from tests.e2e.reference import PROMPTS, greedy_completion

CONNECTORS = ("shared-storage", "redis", "nixl")
NUM_REQUESTS = 200
MAX_TOKENS = 16
ANCHOR_EVERY = 20  # so many requests, one is also answered by `transformers`
RESTART_DEADLINE_S = 120.0


class Job(NamedTuple):
    """One request, and what colocated serving answers it with."""

    prompt: str
    params: SamplingParams
    text: str


@pytest.fixture(scope="module")
def jobs() -> list[Job]:
    """Prompts of one to a dozen blocks, half of which begin alike; greedy and seeded in turn."""
    asked = []
    for index in range(NUM_REQUESTS):
        filling = "The sun is a star and the sky is blue. " * (index % 14)
        prompt = f"{filling}{index}. " if index % 4 < 2 else f"{index}. {filling}"
        seed = None if index % 2 == 0 else index
        params = SamplingParams(temperature=0.0 if seed is None else 0.9, seed=seed, max_tokens=MAX_TOKENS)
        asked.append((prompt + PROMPTS[index % len(PROMPTS)], params))
    with LLM() as llm:
        answers = llm.generate([prompt for prompt, _ in asked], [params for _, params in asked], use_tqdm=False)
    jobs = [Job(prompt, params, answer.text) for (prompt, params), answer in zip(asked, answers, strict=True)]
    for job in jobs[::ANCHOR_EVERY]:
        assert job.text == greedy_completion(job.prompt, MAX_TOKENS)
    return jobs


@pytest.mark.slow
@pytest.mark.parametrize("connector", CONNECTORS)
async def test_two_hundred_requests_are_answered_as_if_colocated(connector: str, jobs: list[Job]) -> None:
    with running_cluster("--prefill", "2", "--decode", "2", "--connector", connector) as cluster:
        assert await answers(cluster, jobs) == [job.text for job in jobs]
        metrics = router_metrics(cluster)
        assert f',prefill="remote",reason="planned"}} {NUM_REQUESTS}.0' in metrics
        assert "baton_router_recompute_total{" not in metrics, "some KV did not come through the connector"
        cluster.check_integrity()


@pytest.mark.slow
async def test_a_killed_redis_costs_nobody_an_answer(jobs: list[Job]) -> None:
    """Killed among the prefills; it comes back empty on its port and is used again."""
    with running_cluster("--prefill", "2", "--decode", "2", "--connector", "redis") as cluster:
        assert await answers(cluster, jobs, kill_at=NUM_REQUESTS // 10) == [job.text for job in jobs]
        await asyncio.to_thread(
            cluster.wait_line, lambda line: "redis" in line and "ready again" in line, RESTART_DEADLINE_S
        )
        cluster.check_integrity()
        before = external_tokens(cluster)
        async with asyncio.timeout(RESTART_DEADLINE_S):
            while external_tokens(cluster) == before:  # until the pods' probes find it
                jobs = [job._replace(prompt=f"Again: {job.prompt}") for job in jobs[:2]]
                await answers(cluster, jobs)
        cluster.check_integrity()


async def answers(cluster: Cluster, jobs: list[Job], kill_at: int | None = None) -> list[str]:
    """The texts of streams that all run at once. The store is killed when `kill_at` of them have begun to answer."""
    started = 0

    async def stream(client: openai.AsyncOpenAI, job: Job) -> str:
        nonlocal started
        chunks = await client.completions.create(
            model=DEMO_MODEL_NAME,
            prompt=job.prompt,
            max_tokens=job.params.max_tokens,
            temperature=job.params.temperature,
            seed=job.params.seed,
            stream=True,
        )
        pieces: list[str] = []
        async for chunk in chunks:
            if not pieces:
                started += 1
                if started == kill_at:
                    os.kill(cluster.pid_of("redis"), signal.SIGKILL)
            pieces += [choice.text for choice in chunk.choices]
        return "".join(pieces)

    async with openai.AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120) as client:
        return await asyncio.gather(*(stream(client, job) for job in jobs))


def router_metrics(cluster: Cluster) -> str:
    """As Prometheus reads them."""
    return httpx.get(f"{cluster.url}/metrics").text


def external_tokens(cluster: Cluster) -> float:
    """Prompt tokens whose KV came through the connector so far."""
    lines = router_metrics(cluster).splitlines()
    return sum(
        float(line.rpartition(" ")[2]) for line in lines if line.startswith("baton_router_external_tokens_total{")
    )

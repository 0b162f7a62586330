"""Two prefill pods, two decode pods, many clients at once."""

from __future__ import annotations

import asyncio

import openai

from common.demo_model import DEMO_MODEL_NAME
from tests.e2e.cluster import running_cluster
from tests.e2e.reference import PROMPTS, greedy_completion

NUM_STREAMS = 50
MAX_TOKENS = 32


async def test_fifty_streams_over_four_pods() -> None:
    prompts = [PROMPTS[index % len(PROMPTS)] for index in range(NUM_STREAMS)]
    expected = [greedy_completion(prompt, MAX_TOKENS) for prompt in prompts]
    with running_cluster("--prefill", "2", "--decode", "2") as cluster:
        async with openai.AsyncOpenAI(
            base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=120
        ) as client:
            answers = await asyncio.gather(*(_stream(client, prompt) for prompt in prompts))
        assert answers == expected
        cluster.check_integrity()


async def _stream(client: openai.AsyncOpenAI, prompt: str) -> str:
    stream = await client.completions.create(
        model=DEMO_MODEL_NAME, prompt=prompt, max_tokens=MAX_TOKENS, temperature=0, stream=True
    )
    return "".join([chunk.choices[0].text async for chunk in stream if chunk.choices])

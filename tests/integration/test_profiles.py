"""A profile of a real engine, in its own process: what is in the trace, and that it changes no token."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

from common.engine.client.mp import AsyncMPClient
from common.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from common.engine.messages import AddRequest
from common.types import RequestId, SamplingParams
from tests.tiny_models import prompt_of, reference_generate, tiny_model_dir

MODEL = "llama"
NUM_TOKENS = 60
TIMEOUT_S = 60.0


async def generate(client: AsyncMPClient, prompt: list[int]) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    client.add_request(AddRequest(request_id=RequestId("a"), prompt_token_ids=prompt, sampling=sampling))
    tokens: list[int] = []
    async with asyncio.timeout(TIMEOUT_S):
        async for step in client.outputs():
            tokens += [token.token_id for output in step.outputs for token in output.tokens]
            if len(tokens) == NUM_TOKENS:
                break
    return tokens


def events_of(trace: Path) -> list[dict[str, Any]]:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


async def test_a_trace_has_the_operators_of_each_step() -> None:
    model = tiny_model_dir(MODEL)
    config = EngineConfig(
        model=ModelConfig(model=str(model), num_threads=1),
        cache=CacheConfig(block_size=4, num_blocks=64),
        scheduler=SchedulerConfig(target_itl_ms=None),  # the prompt is one chunk
    )
    client = AsyncMPClient(config)
    try:
        await client.start()
        prompt = prompt_of(37)
        profile = asyncio.create_task(_profile(client))
        await asyncio.sleep(0)  # it starts before the request
        assert await generate(client, prompt) == reference_generate(model, prompt, NUM_TOKENS)
        events = await profile
    finally:
        await client.close()
    steps = sorted((event for event in events if event["name"].startswith("step ")), key=lambda step: step["ts"])
    assert steps[0]["name"] == "step 1: 1 prompt chunk of 37 tokens"
    assert [step["name"] for step in steps[1:]] == [f"step {number}: 1 decode" for number in range(2, NUM_TOKENS + 1)]
    for step in steps:
        inside = Counter(event["name"] for event in events if _contains(step, event))
        assert inside["forward"] == inside["sample"] == 1
        assert inside["aten::empty"], "an operator of torch"
        assert inside["baton::embed"] == 1
        assert inside["baton::silu_mul"] > 0, "a compiled kernel"
    assert len({event["tid"] for event in events if event["cat"] == "cpu_op"}) == 1, "the step loop's thread only"


async def _profile(client: AsyncMPClient) -> list[dict[str, Any]]:
    async with client.profile(seconds=TIMEOUT_S, max_steps=NUM_TOKENS) as profile:
        assert profile.report.num_steps == NUM_TOKENS
        return events_of(profile.trace)


def _contains(step: dict[str, Any], event: dict[str, Any]) -> bool:
    return bool(step["ts"] <= event["ts"] and event["ts"] + event["dur"] <= step["ts"] + step["dur"])

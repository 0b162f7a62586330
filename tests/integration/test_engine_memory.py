"""What an engine process holds on to, whatever the shapes of its steps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import psutil
import pytest

from common.demo_model import demo_model_path
from common.engine.client import AsyncMPClient
from common.engine.config import CacheConfig, EngineConfig, ModelConfig
from common.engine.messages import AddRequest
from common.types import RequestId, SamplingParams

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
LENGTHS = range(20, 160)  # each a shape of its own, for each of the model's matrix sizes
WARM_UP = LENGTHS[:70]  # fills the caches
TIMEOUT_S = 120.0


async def prefill(client: AsyncMPClient, lengths: Iterable[int]) -> None:
    """One prompt of each length, alone in its step."""
    sampling = SamplingParams(temperature=0.0, max_tokens=1)
    outputs = aiter(client.outputs())
    for length in lengths:
        client.add_request(
            AddRequest(request_id=RequestId(f"{length}"), prompt_token_ids=[5] * length, sampling=sampling)
        )
        while not any(output.finish_reason is not None for output in (await anext(outputs)).outputs):
            pass


@pytest.mark.slow
async def test_memory_does_not_grow_with_the_number_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = EngineConfig(
        model=ModelConfig(model=str(demo_model_path()), num_threads=1),
        cache=CacheConfig(num_blocks=32, enable_prefix_caching=False),  # so few that all are touched by the first
    )
    client = AsyncMPClient(config)
    await client.start()
    try:
        assert client.pid is not None
        process = psutil.Process(client.pid)
        async with asyncio.timeout(TIMEOUT_S):
            await prefill(client, WARM_UP)
            warm = process.memory_info().rss
            await prefill(client, LENGTHS[len(WARM_UP) :])
        growth = process.memory_info().rss - warm
    finally:
        await client.close()
    assert growth < 80 * MIB, f"{growth / MIB:.0f} MiB more after {len(LENGTHS) - len(WARM_UP)} other lengths"


async def test_a_ready_engine_has_not_loaded_the_compiler_of_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch._dynamo would have brought Triton along."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    model = ModelConfig(model=str(demo_model_path()), device="cpu", num_threads=1)
    client = AsyncMPClient(EngineConfig(model=model, cache=CacheConfig(num_blocks=32)))
    await client.start()
    try:
        assert client.pid is not None
        loaded = {Path(mapping.path).name for mapping in psutil.Process(client.pid).memory_maps()}
        assert any(name.startswith("libtorch") for name in loaded)
        assert not any("triton" in name for name in loaded)
    finally:
        await client.close()

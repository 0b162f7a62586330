"""Models with latent attention keep and send latents: the same tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from common.engine.devices.gpu.decode_graphs import DecodeGraphs
from common.engine.llm import LLM
from common.types import SamplingParams
from tests.integration.handoff_rig import BLOCK_SIZE, CHUNK, Handoffs, create_engine
from tests.redis_server import RedisServer, running_redis
from tests.tiny_models import prompt_of, random_model, reference_generate, tiny_config, tiny_model_dir

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
RANKS = {"deepseek_v3": 16, "wide": 40}  # of latents; wide ones are expanded in chunks of 32 tokens
ROTARY_DIM = 8
ON_GPU: dict[str, Any] = {"device": "cuda", "dtype": "float32"}


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with running_redis() as server:
        yield server


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("wide")
    heads = {"qk_rope_head_dim": ROTARY_DIM, "qk_nope_head_dim": 16, "v_head_dim": 12, "head_dim": ROTARY_DIM}
    config = tiny_config("MiniCPM3Config", num_key_value_heads=4, q_lora_rank=24, kv_lora_rank=RANKS["wide"], **heads)
    random_model(config).save_pretrained(directory)
    return directory


def expected(directory: Path, prompts: list[list[int]]) -> list[list[int]]:
    return [reference_generate(directory, prompt, GREEDY.max_tokens or 0) for prompt in prompts]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cpu_kernels": "reference"},
        pytest.param(ON_GPU, marks=pytest.mark.gpu),
        pytest.param({**ON_GPU, "enforce_eager": True}, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("model", RANKS)
def test_tokens_are_those_of_transformers(model: str, settings: dict[str, Any], wide: Path) -> None:
    """In chunks, beside each other, in so few blocks that some are preempted, and with prefix hits."""
    directory = wide if model == "wide" else tiny_model_dir(model)
    prompts = [prompt_of(length) for length in (1, 3, 4, 11, 37, 64, 70)]
    with LLM(directory, block_size=4, num_blocks=33, max_num_batched_tokens=CHUNK, num_threads=1, **settings) as llm:
        assert llm.spec.kernels == ("torch" if "cpu_kernels" in settings else "attention")
        assert llm.spec.bytes_per_block == 4 * 3 * (RANKS[model] + ROTARY_DIM) * 4  # tokens, layers, numbers, bytes
        completions = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [completion.token_ids for completion in completions] == expected(directory, prompts)
        assert llm._client.stats().num_preemptions > 0
        for _ in range(2):
            (completion,) = llm.generate(prompts[-1:], GREEDY, use_tqdm=False)
            assert [completion.token_ids] == expected(directory, prompts[-1:])
        assert llm._client.stats().prefix_cache_hits > 0
        assert llm.check_integrity().violations == []


@pytest.mark.gpu
def test_decode_steps_are_cuda_graphs(wide: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model without experts, whose code copies between host and GPU."""
    sizes: list[int] = []
    run = DecodeGraphs.run
    monkeypatch.setattr(DecodeGraphs, "run", lambda self, inputs: sizes.append(len(inputs.tokens)) or run(self, inputs))
    prompts = [prompt_of(length) for length in (5, 70, 200)]
    with LLM(wide, block_size=16, num_blocks=64, **ON_GPU) as llm:
        completions = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [completion.token_ids for completion in completions] == expected(wide, prompts)
        assert llm._client.stats().num_failed_recordings == 0
    assert sizes.count(len(prompts)) >= 10


@pytest.mark.parametrize("connector", ["shared-storage", "nixl", "redis"])
def test_latents_are_handed_over(connector: str, wide: Path, redis_server: RedisServer, tmp_path: Path) -> None:
    """Also to an engine in which some of those that decode are preempted."""
    options = {"url": redis_server.url} if connector == "redis" else {}
    prompts = [prompt_of(length) for length in (1, 2, BLOCK_SIZE, CHUNK + 1, 3 * CHUNK + 5)]
    producer, consumer = (
        create_engine(wide, tmp_path / "kv", connector_name=connector, options=options, num_blocks=num_blocks)
        for num_blocks in (64, 17)
    )
    handoffs = Handoffs(producer, consumer)
    try:
        decoded = handoffs.run(prompts, GREEDY)
        assert [each.token_ids for each in decoded] == expected(wide, prompts)
        assert {each.received.recompute_reason for each in decoded if each.received} == {""}
        handoffs.check_integrity()
    finally:
        handoffs.close()
    if connector == "shared-storage":
        sizes = {file.stat().st_size for file in (tmp_path / "kv").rglob("*.kv")}
        assert sizes == {192 + BLOCK_SIZE * 3 * (RANKS["wide"] + ROTARY_DIM) * 4}

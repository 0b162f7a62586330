"""Real models whose layers with a window form KV groups of their own generate what transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.engine.llm import LLM, engine_config
from common.types import SamplingParams
from tests.integration.handoff_rig import BLOCK_SIZE, CHUNK, Handoffs, create_engine
from tests.integration.window_groups import WindowGroupsExecutor, each_alone
from tests.tiny_models import SLIDING_WINDOW, prompt_of, reference_generate, tiny_model_dir

EXECUTOR = f"{WindowGroupsExecutor.__module__}:{WindowGroupsExecutor.__name__}"
NUM_GROUPS = {"gemma2": 3, "gemma3": 3, "gpt_oss": 3, "mistral": 1, "llama": 1}
GREEDY = SamplingParams(temperature=0.0, max_tokens=2 * SLIDING_WINDOW)  # so many that blocks fall out


def expected(model: str, prompts: list[list[int]]) -> list[list[int]]:
    return [reference_generate(tiny_model_dir(model), prompt, GREEDY.max_tokens or 0) for prompt in prompts]


@pytest.mark.parametrize(
    "on",
    [
        {"cpu_kernels": "auto"},
        {"cpu_kernels": "reference"},
        pytest.param({"device": "cuda", "dtype": "float32", "block_size": 16}, marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("model", NUM_GROUPS)
def test_tokens_are_those_of_transformers(model: str, on: dict[str, object]) -> None:
    """In chunks, beside each other, in so few blocks that some are preempted, and with prefix hits."""
    prompts = [prompt_of(length) for length in (1, 3, 4, 11, 37, 38, 53)]
    settings = {"block_size": 4, "max_num_batched_tokens": 10, "num_threads": 1, **on}
    settings["num_blocks"] = 1 + 24 * NUM_GROUPS[model]
    executor = WindowGroupsExecutor(engine_config(str(tiny_model_dir(model)), **settings))
    with LLM(tiny_model_dir(model), executor=executor, **settings) as llm:
        for _ in range(2):
            completions = llm.generate(prompts, GREEDY, use_tqdm=False)
            assert [completion.token_ids for completion in completions] == expected(model, prompts)
        report = llm.check_integrity()
        assert report.violations == []
        assert (report.num_requests, report.num_blocks_in_use, report.num_transfers) == (0, 0, 0)


def test_a_fused_decoder_takes_one_group_only() -> None:
    prompts = [prompt_of(length) for length in (3, 37)]
    config = engine_config(str(tiny_model_dir("llama")), block_size=4, num_blocks=64)
    with LLM(tiny_model_dir("llama"), executor=WindowGroupsExecutor(config), block_size=4, num_blocks=64) as llm:
        assert llm.spec.kernels == "fused"
    executor = WindowGroupsExecutor(config, each_alone)
    with LLM(tiny_model_dir("llama"), executor=executor, block_size=4, num_blocks=64) as llm:
        assert llm.spec.kernels == "attention"
        completions = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert [completion.token_ids for completion in completions] == expected("llama", prompts)


@pytest.mark.parametrize("model", NUM_GROUPS)
def test_tokens_after_a_handoff(model: str, tmp_path: Path) -> None:
    prompts = [prompt_of(length) for length in (1, BLOCK_SIZE, CHUNK + 1, 3 * CHUNK + 5)]
    engines = [create_engine(tiny_model_dir(model), tmp_path, executor=EXECUTOR, num_blocks=256) for _ in range(2)]
    handoffs = Handoffs(*engines)
    decoded = handoffs.run(prompts, GREEDY)
    assert [request.token_ids for request in decoded] == expected(model, prompts)
    assert handoffs.consumer.stats().num_prompt_tokens == 0
    handoffs.check_integrity()
    handoffs.close()

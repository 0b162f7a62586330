"""Models over several ranks, each a process."""

from __future__ import annotations

import os
import signal
import time

import pytest

from common.engine.config import ParallelConfig
from common.engine.llm import LLM, Completion
from common.errors import EngineDeadError
from common.types import SamplingParams
from tests.integration.ranks_rig import assert_same, generate, open_llm
from tests.rank_processes import ranks_of
from tests.tiny_models import prompt_of, reference_generate, tiny_model_dir


@pytest.fixture(scope="module")
def alone() -> dict[str, Completion]:
    with open_llm() as llm:
        return generate(llm)


@pytest.mark.cell(feature="sampling, log probabilities, structured output", degrees="2")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain", marks=pytest.mark.matrix),
        pytest.param({"speculative": "tests.extensions.proposer:create"}, id="drafts"),
    ],
)
def test_two_ranks_say_what_one_says(alone: dict[str, Completion], options: dict[str, object]) -> None:
    with open_llm(tensor_parallel_size=2, **options) as llm:
        assert_same(generate(llm), alone)


@pytest.mark.cell(feature="{architecture}", degrees="2")
@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen3", marks=pytest.mark.matrix)])
def test_tokens_are_those_of_transformers(architecture: str) -> None:
    directory = tiny_model_dir(architecture)
    prompts = [prompt_of(length) for length in (1, 5, 33)]
    with LLM(directory, block_size=4, num_blocks=128, max_num_batched_tokens=16, tensor_parallel_size=2) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        answers = llm.generate(prompts, params, use_tqdm=False)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == reference_generate(directory, prompt, 12)


@pytest.mark.cell(feature="llama", degrees="2", fault="a rank is killed")
def test_a_rank_that_is_killed_ends_the_engine() -> None:
    with LLM(tiny_model_dir("llama"), num_blocks=128, tensor_parallel_size=2) as llm:
        _, second = ranks_of(os.getpid())
        second.suspend()
        killed = time.monotonic() + 0.5

        def kill(*_: object) -> None:
            os.kill(second.pid, signal.SIGKILL)

        signal.signal(signal.SIGALRM, kill)
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(EngineDeadError, match="rank 1 of 2 was ended by SIGKILL"):
            llm.generate([prompt_of(5)], SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)
        assert time.monotonic() - killed < ParallelConfig().step_timeout_s


@pytest.mark.cell(feature="experts of {architecture} cut whole", degrees="2")
@pytest.mark.matrix
@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
def test_experts_cut_whole_give_the_tokens_of_transformers(architecture: str) -> None:
    directory = tiny_model_dir(architecture)
    prompts = [prompt_of(length) for length in (1, 5, 33)]
    with LLM(
        directory,
        block_size=4,
        num_blocks=128,
        max_num_batched_tokens=16,
        tensor_parallel_size=2,
        enable_expert_parallel=True,
    ) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        answers = llm.generate(prompts, params, use_tqdm=False)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == reference_generate(directory, prompt, 12)

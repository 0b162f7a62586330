"""Models over several ranks, each a process."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence

import pytest

from common.engine.config import ParallelConfig
from common.engine.llm import LLM, Completion
from common.errors import EngineDeadError
from common.types import Constraint, Logprobs, SamplingParams
from tests.rank_processes import ranks_of
from tests.tiny_models import prompt_of, reference_generate, tiny_model_dir

MAX_TOKENS = 24
REGEX = Constraint.regex("[a-f]{9}")
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, num_logprobs=2, ignore_eos=True),
    "drawn": SamplingParams(temperature=1.1, seed=7, top_p=0.9, max_tokens=MAX_TOKENS),
    "drawn again": SamplingParams(temperature=1.1, seed=8, top_k=40, min_p=0.01, max_tokens=MAX_TOKENS),
    "penalised": SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4, max_tokens=MAX_TOKENS),
    "biased": SamplingParams(temperature=0.0, logit_bias={65: 12.0, 70: -100.0}, max_tokens=MAX_TOKENS),
    "allowed": SamplingParams(temperature=0.8, seed=3, allowed_token_ids=tuple(range(60, 90)), max_tokens=MAX_TOKENS),
    "not to stop yet": SamplingParams(
        temperature=0.0, min_tokens=9, stop_token_ids=tuple(range(40, 296)), max_tokens=MAX_TOKENS
    ),
    "prompt": SamplingParams(temperature=0.0, prompt_logprobs=2, max_tokens=MAX_TOKENS),
    "regex": SamplingParams(temperature=0.9, seed=1, max_tokens=MAX_TOKENS, structured_outputs=REGEX),
    "json": SamplingParams(temperature=1.0, seed=2, max_tokens=MAX_TOKENS, structured_outputs=Constraint.json_object()),
}
PROMPT = "The capital of France is"


def generate(num_ranks: int, **options: object) -> dict[str, Completion]:
    with LLM(dtype="float32", num_blocks=64, tensor_parallel_size=num_ranks, **options) as llm:
        answers = llm.generate([PROMPT] * len(PARAMS), list(PARAMS.values()), use_tqdm=False)
        assert llm.check_integrity().violations == []
    return dict(zip(PARAMS, answers, strict=True))


def values_of(logprobs: Sequence[Logprobs | None] | None) -> list[float]:
    return [value for each in logprobs or () if each for value in (each.sampled, *(top for _, top in each.top))]


@pytest.fixture(scope="module")
def alone() -> dict[str, Completion]:
    return generate(1)


@pytest.mark.cell(feature="sampling, log probabilities, structured output", degrees="2")
@pytest.mark.parametrize("options", [{}, {"speculative": "tests.extensions.proposer:create"}], ids=["plain", "drafts"])
def test_two_ranks_say_what_one_says(alone: dict[str, Completion], options: dict[str, object]) -> None:
    together = generate(2, **options)
    for name in PARAMS:
        assert together[name].token_ids == alone[name].token_ids, name
        for found, expected in (
            (together[name].logprobs, alone[name].logprobs),
            (together[name].prompt_logprobs, alone[name].prompt_logprobs),
        ):
            assert values_of(found) == pytest.approx(values_of(expected), abs=1e-3), name
    assert len(together["regex"].text) == 9
    assert len(together["not to stop yet"].token_ids) >= 9
    assert len(values_of(together["greedy"].logprobs)) == 3 * MAX_TOKENS
    assert values_of(together["prompt"].prompt_logprobs)


@pytest.mark.cell(feature="{architecture}", degrees="2")
@pytest.mark.parametrize("architecture", ["llama", "qwen3"])
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

"""Models in stages, each rank a process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from common.engine.llm import LLM, Completion
from common.errors import EngineDeadError
from common.types import Constraint, SamplingParams
from tests.rank_processes import ranks_of
from tests.tiny_models import prompt_of, reference_generate, tiny_model_dir

MAX_TOKENS = 24
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, num_logprobs=2),
    "drawn": SamplingParams(temperature=1.1, seed=7, top_p=0.9, max_tokens=MAX_TOKENS),
    "penalised": SamplingParams(temperature=0.0, repetition_penalty=1.3, max_tokens=MAX_TOKENS),
    "regex": SamplingParams(
        temperature=0.9, seed=1, max_tokens=MAX_TOKENS, structured_outputs=Constraint.regex("[a-f]{9}")
    ),
    "prompt": SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1),
}
PROMPT = "The capital of France is"


def generate(num_stages: int) -> dict[str, Completion]:
    with LLM(dtype="float32", num_blocks=64, pipeline_parallel_size=num_stages) as llm:
        answers = llm.generate([PROMPT] * len(PARAMS), list(PARAMS.values()), use_tqdm=False)
        assert llm.check_integrity().violations == []
    return dict(zip(PARAMS, answers, strict=True))


@pytest.mark.cell(feature="sampling, log probabilities, structured output", degrees="1x2")
def test_two_stages_say_what_one_says() -> None:
    alone, together = generate(1), generate(2)
    for name in PARAMS:
        assert together[name].token_ids == alone[name].token_ids, name
    assert len(together["regex"].text) == 9
    assert len(together["prompt"].prompt_logprobs or []) == len(alone["prompt"].prompt_logprobs or []) > 0


@pytest.mark.cell(feature="{architecture}", degrees="{num_ranks}x{num_stages}", fault="preemption")
@pytest.mark.parametrize(
    ("architecture", "num_stages", "num_ranks", "settings"),
    [
        ("llama", 3, 1, {}),
        ("llama", 2, 2, {}),
        ("gemma2", 2, 1, {"cpu_kernels": "reference"}),
    ],
)
def test_tokens_are_those_of_transformers(
    architecture: str, num_stages: int, num_ranks: int, settings: dict[str, object]
) -> None:
    """With so few blocks that requests are preempted while they are in steps."""
    directory = tiny_model_dir(architecture)
    prompts = [prompt_of(length, seed=length) for length in (1, 5, 33, 12, 20, 7)]
    parallel = {"pipeline_parallel_size": num_stages, "tensor_parallel_size": num_ranks}
    limits = {"block_size": 4, "num_blocks": 30, "max_num_batched_tokens": 16, "max_model_len": 64}
    with LLM(directory, **limits, **parallel, **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
        answers = llm.generate(prompts, params, use_tqdm=False)
        assert llm.check_integrity().violations == []
        assert llm._client.stats().num_preemptions > 0
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer.token_ids == reference_generate(directory, prompt, 20)


@pytest.fixture
def stages() -> Iterator[LLM]:
    with LLM(tiny_model_dir("llama"), num_blocks=128, pipeline_parallel_size=2) as llm:
        yield llm


@pytest.mark.cell(feature="llama", degrees="1x2", fault="stage {number} is killed")
@pytest.mark.parametrize("number", [0, 1])
def test_a_stage_that_is_killed_ends_the_engine(stages: LLM, number: int) -> None:
    ranks = ranks_of(os.getpid())
    ranks[number].suspend()

    def kill(*_: object) -> None:
        os.kill(ranks[number].pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(EngineDeadError, match=f"rank {number} of 2 was ended by SIGKILL"):
        stages.generate([prompt_of(5)], SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)

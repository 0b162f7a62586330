"""Models in stages, each rank a process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from common.engine.llm import LLM
from common.engine.messages import AddRequest
from common.errors import EngineDeadError
from common.types import RequestId, SamplingParams
from tests.integration.handoff_rig import check_integrity
from tests.integration.handoff_rig import generate as generate_tokens
from tests.integration.ranks_rig import assert_same, generate, open_llm
from tests.integration.speculation_rig import ask_and_verify_always
from tests.rank_processes import ranks_of
from tests.tiny_models import prompt_of, reference_generate, tiny_model_dir


@pytest.fixture(scope="module")
def pair() -> Iterator[LLM]:
    """Two stages, with drafts, all of which are verified."""
    with pytest.MonkeyPatch.context() as patched:
        ask_and_verify_always(patched)
        with open_llm(pipeline_parallel_size=2, speculative="tests.extensions.proposer:create") as llm:
            yield llm


@pytest.mark.cell(feature="sampling, log probabilities, structured output, drafts", degrees="1x2")
def test_two_stages_say_what_one_says(pair: LLM) -> None:
    with open_llm() as llm:
        alone = generate(llm)
    assert_same(generate(pair), alone)
    drafts = pair._client.stats().drafts
    assert drafts.num_verified > drafts.num_accepted > 0


@pytest.mark.cell(feature="requests that end while steps run", degrees="1x2")
def test_requests_may_leave_steps_in_flight_and_come_back(pair: LLM) -> None:
    """Under the same ids, and with prompts of which the cache has nothing, all and some."""
    client, params = pair._client, SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    first, second = ([prompt_of(length, seed=seed) for length in (5, 40, 9, 21)] for seed in (1, 2))
    second[1] = first[1] + second[1]
    expected = generate_tokens(client, second, params)
    pair.reset_prefix_cache()
    ids = [RequestId(f"local-{number}") for number in range(len(first))]
    for request_id, prompt in zip(ids, first, strict=True):
        client.add_request(AddRequest(request_id=request_id, prompt_token_ids=prompt, sampling=params))
    for _ in range(5):  # a step begins before the one before it is over
        client.step()
        assert client.check_integrity().violations == []
    client.abort_requests(ids)
    for _ in range(2):
        assert generate_tokens(client, second, params) == expected
    assert client.stats().prefix_cache_hits >= 48
    check_integrity(client)


@pytest.mark.cell(feature="{architecture}", degrees="{num_ranks}x{num_stages}", fault="preemption")
@pytest.mark.parametrize(
    ("architecture", "num_stages", "num_ranks", "settings"),
    [
        pytest.param("llama", 3, 1, {}, marks=pytest.mark.matrix),
        pytest.param("llama", 2, 2, {}, marks=pytest.mark.matrix),
        pytest.param("gemma2", 2, 1, {"cpu_kernels": "reference"}, marks=pytest.mark.matrix),
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
@pytest.mark.parametrize("number", [0, pytest.param(1, marks=pytest.mark.matrix)])
def test_a_stage_that_is_killed_ends_the_engine(stages: LLM, number: int) -> None:
    ranks = ranks_of(os.getpid())
    ranks[number].suspend()

    def kill(*_: object) -> None:
        os.kill(ranks[number].pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(EngineDeadError, match=f"rank {number} of 2 was ended by SIGKILL"):
        stages.generate([prompt_of(5)], SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False)

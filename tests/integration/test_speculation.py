"""Drafts change no token, whether they are right or not."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from common.engine.llm import LLM
from common.types import Constraint, FinishReason, Logprobs, SamplingParams
from tests.integration import speculation_rig as rig
from tests.tiny_models import TINY_MODELS, prompt_of, reference_generate, tiny_model_dir

MAX_TOKENS = 14
LENGTHS = (1, 4, 5, 11, 30)
PARAMS = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
    "drawn": SamplingParams(temperature=1.3, seed=7, max_tokens=MAX_TOKENS),
    "limited": SamplingParams(temperature=0.9, top_p=0.9, top_k=20, min_p=0.01, seed=8, max_tokens=MAX_TOKENS),
    "penalised": SamplingParams(
        temperature=0.7,
        seed=9,
        repetition_penalty=1.4,
        presence_penalty=0.3,
        frequency_penalty=0.2,
        max_tokens=MAX_TOKENS,
    ),
    "ruled": SamplingParams(
        temperature=0.8, seed=1, logit_bias={5: 3.0, 6: -2.0}, bad_words=(), min_tokens=6, max_tokens=MAX_TOKENS
    ),
    "logprobs": SamplingParams(temperature=0.5, seed=2, num_logprobs=3, max_tokens=MAX_TOKENS),
}


def make_llm(name: str, **options: object) -> LLM:
    settings = {"block_size": 4, "num_blocks": 128, "max_num_batched_tokens": 40, "num_threads": 1}
    return LLM(tiny_model_dir(name), **settings | options)


@pytest.fixture(params=["right", "wrong", "half"])
def accuracy(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(autouse=True)
def _no_answers() -> Iterator[None]:
    yield
    rig.ANSWERS.clear()


@pytest.mark.parametrize("name", TINY_MODELS)
def test_greedy_output_is_the_references(name: str, accuracy: str) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    expected = [reference_generate(tiny_model_dir(name), prompt, MAX_TOKENS) for prompt in prompts]
    rig.ANSWERS[:] = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]
    with make_llm(name, speculative=f"tests.integration.speculation_rig:{accuracy}") as llm:
        rig.LAST[0].num_calls = 0  # steps were measured
        completions = llm.generate(prompts, PARAMS["greedy"], use_tqdm=False)
        report, stats = llm.check_integrity(), llm._client.stats()
    assert [completion.token_ids for completion in completions] == expected
    assert (report.violations, report.num_blocks_in_use, stats.num_failed_recordings) == ([], 0, 0)
    assert rig.LAST[0].num_proposed
    if accuracy == "right":
        assert rig.LAST[0].num_calls < MAX_TOKENS


@pytest.mark.parametrize("kind", PARAMS)
def test_every_way_of_sampling_gives_the_same_tokens(kind: str, accuracy: str) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    with make_llm("llama") as llm:
        plain = llm.generate(prompts, PARAMS[kind], use_tqdm=False)
    rig.ANSWERS[:] = [prompt + answer.token_ids for prompt, answer in zip(prompts, plain, strict=True)]
    with make_llm("llama", speculative=f"tests.integration.speculation_rig:{accuracy}") as llm:
        found = llm.generate(prompts, PARAMS[kind], use_tqdm=False)
    for one, other in zip(plain, found, strict=True):
        assert (one.token_ids, one.finish_reason) == (other.token_ids, other.finish_reason)
        assert one.logprobs == other.logprobs or _are_close(one.logprobs, other.logprobs)


def test_a_small_cache_preempts_and_changes_nothing(accuracy: str) -> None:
    """Each of the four needs seven of the 15 blocks."""
    prompts = [prompt_of(length) for length in (9, 10, 11, 12)]
    expected = [reference_generate(tiny_model_dir("llama"), prompt, MAX_TOKENS) for prompt in prompts]
    rig.ANSWERS[:] = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]
    settings = {"num_blocks": 16, "max_model_len": 28, "enable_prefix_caching": False}
    with make_llm("llama", speculative=f"tests.integration.speculation_rig:{accuracy}", **settings) as llm:
        completions = llm.generate(prompts, PARAMS["greedy"], use_tqdm=False)
        report = llm.check_integrity()
    assert [completion.token_ids for completion in completions] == expected
    assert report.violations == []


def _are_close(one: list[Logprobs] | None, other: list[Logprobs] | None) -> bool:
    assert one is not None
    assert other is not None
    return all(
        a.sampled == pytest.approx(b.sampled, abs=1e-4) and [t for t, _ in a.top] == [t for t, _ in b.top]
        for a, b in zip(one, other, strict=True)
    )


def test_constrained_output_is_the_same(accuracy: str) -> None:
    """Masks are filled along the drafts, and one that is late costs a step, no token."""
    pattern = r"(yes|no|perhaps)(, (yes|no|perhaps)){0,5}\."
    params = [
        SamplingParams(temperature=1.2, seed=1, max_tokens=40, structured_outputs=Constraint.regex(pattern)),
        SamplingParams(temperature=0.0, max_tokens=40, structured_outputs=Constraint.json_object(), min_tokens=5),
        SamplingParams(temperature=0.9, seed=2, max_tokens=40),
    ]
    prompts = ["Shall we? ", "An object: ", "Once "]
    with LLM(num_threads=1) as llm:
        plain = llm.generate(prompts, params, use_tqdm=False)
    rig.ANSWERS[:] = [each.prompt_token_ids + each.token_ids for each in plain]
    with LLM(num_threads=1, speculative=f"tests.integration.speculation_rig:{accuracy}") as llm:
        rig.LAST[0].num_calls = 0
        found = llm.generate(prompts, params, use_tqdm=False)
        report, stats = llm.check_integrity(), llm._client.stats()
    assert [(each.token_ids, each.finish_reason) for each in found] == [
        (each.token_ids, each.finish_reason) for each in plain
    ]
    assert (report.violations, stats.num_failed_recordings) == ([], 0)
    assert re.fullmatch(pattern, found[0].text) or found[0].finish_reason is FinishReason.LENGTH

"""Requests of all kinds, to compare what one rank and several say."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest

from common.engine.llm import LLM, Completion
from common.types import Constraint, Logprobs, SamplingParams

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


def open_llm(**options: object) -> LLM:
    return LLM(dtype="float32", num_blocks=64, **options)


def generate(llm: LLM) -> dict[str, Completion]:
    answers = llm.generate([PROMPT] * len(PARAMS), list(PARAMS.values()), use_tqdm=False)
    assert llm.check_integrity().violations == []
    return dict(zip(PARAMS, answers, strict=True))


def assert_same(together: Mapping[str, Completion], alone: Mapping[str, Completion]) -> None:
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


def values_of(logprobs: Sequence[Logprobs | None] | None) -> list[float]:
    return [value for each in logprobs or () if each for value in (each.sampled, *(top for _, top in each.top))]

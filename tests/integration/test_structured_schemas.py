"""Answers to random constraints: each is valid to a checker that has no part in making it."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence

import jsonschema_rs
import pytest

from common.demo_model import demo_model_path
from common.engine.config import GrammarBackendName
from common.engine.grammar.base import Vocabulary
from common.engine.grammar.registry import backend_for, create_backend
from common.engine.grammar.vocabulary import load_vocabulary
from common.engine.llm import LLM, Completion
from common.types import Constraint, FinishReason, SamplingParams
from tests.random_schemas import random_schema

MAX_TOKENS = 200
MAX_WHITESPACE = 2
EOS = frozenset({0, 2})  # of the demo model


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(num_threads=1, max_num_seqs=32, grammar_timeout_s=10, max_whitespace_cnt=MAX_WHITESPACE) as llm:
        yield llm


@pytest.fixture(scope="module")
def vocabulary(llm: LLM) -> Vocabulary:
    return load_vocabulary(demo_model_path(), llm.spec.vocab_size, EOS)


def answers(llm: LLM, constraints: Sequence[Constraint]) -> list[Completion]:
    params = [
        SamplingParams(temperature=1.5, seed=seed, max_tokens=MAX_TOKENS, structured_outputs=constraint)
        for seed, constraint in enumerate(constraints)
    ]
    return llm.generate(["Answer: "] * len(params), params, use_tqdm=False)


def accepts(name: GrammarBackendName, vocabulary: Vocabulary, constraint: Constraint, token_ids: Sequence[int]) -> bool:
    """Whether the backend of that name follows the whole answer."""
    matcher = create_backend(name, vocabulary, MAX_WHITESPACE).compile(constraint).matcher()
    return all(matcher.accept(token_id) for token_id in token_ids)


def check_schemas(llm: LLM, vocabulary: Vocabulary, seeds: range) -> None:
    schemas = [random_schema(seed) for seed in seeds]
    constraints = [
        Constraint.json_schema(schema, any_whitespace=bool(seed % 2))
        for seed, schema in zip(seeds, schemas, strict=True)
    ]
    completions = answers(llm, constraints)
    for schema, constraint, completion in zip(schemas, constraints, completions, strict=True):
        assert completion.finish_reason is FinishReason.STOP, (schema, completion.text)
        assert jsonschema_rs.is_valid(schema, json.loads(completion.text)), (schema, completion.text)
        if backend_for(constraint) == "xgrammar":
            assert accepts("llguidance", vocabulary, constraint, completion.token_ids), (schema, completion.text)
    assert len({backend_for(constraint) for constraint in constraints}) == 2


def test_answers_are_valid_to_their_schemas(llm: LLM, vocabulary: Vocabulary) -> None:
    check_schemas(llm, vocabulary, range(48))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_answers_are_valid_to_500_schemas(llm: LLM, vocabulary: Vocabulary) -> None:
    for start in range(1000, 1500, 50):
        check_schemas(llm, vocabulary, range(start, start + 50))


def test_expressions_match_whole_answers(llm: LLM, vocabulary: Vocabulary) -> None:
    patterns = [
        r"[a-z]{3,20}@[a-z]{2,5}\.(com|org)",
        r"(\d{4})-(0[1-9]|1[0-2])",
        r"(ab|cd)*x{2,4}?",
        r"[^a-z\s]{5}",
        r"é+ü?",
    ]
    constraints = [Constraint.regex(pattern) for pattern in patterns for _ in range(4)]
    for constraint, completion in zip(constraints, answers(llm, constraints), strict=True):
        if completion.finish_reason is FinishReason.STOP:
            assert re.fullmatch(constraint.text, completion.text), (constraint.text, completion.text)
        assert accepts("llguidance", vocabulary, constraint, completion.token_ids)


def test_choices_are_among_those_given(llm: LLM) -> None:
    rng = random.Random(1)
    lists = [
        ["".join(rng.choices('ab"\\\n é{', k=rng.randint(1, 9))) for _ in range(rng.randint(1, 9))] for _ in range(20)
    ]
    completions = answers(llm, [Constraint.choice(choices) for choices in lists])
    for choices, completion in zip(lists, completions, strict=True):
        assert completion.text in choices
        assert completion.finish_reason is FinishReason.STOP


def test_grammars_are_followed(llm: LLM, vocabulary: Vocabulary) -> None:
    arithmetic = 'root ::= term (" + " term){0,3}\nterm ::= [1-9] [0-9]? | "(" root ")"'
    constraint = Constraint.grammar(arithmetic)
    for completion in answers(llm, [constraint] * 8):
        assert accepts("llguidance", vocabulary, constraint, completion.token_ids), completion.text
        if completion.finish_reason is FinishReason.STOP:
            assert re.fullmatch(r"[0-9+() ]+", completion.text)
            assert isinstance(eval(completion.text), int)


def test_other_parameters_are_obeyed(llm: LLM) -> None:
    """Penalties, top_k, a stop token and the number of tokens, each within what the grammar allows."""
    digits = Constraint.regex(r"[0-9]{40}")
    plain = SamplingParams(temperature=0.0, max_tokens=64, structured_outputs=digits)
    [once] = llm.generate(["1 1 1 1"], plain, use_tqdm=False)
    penalised = SamplingParams(temperature=0.0, max_tokens=64, structured_outputs=digits, frequency_penalty=2.0)
    [varied] = llm.generate(["1 1 1 1"], penalised, use_tqdm=False)
    assert re.fullmatch(digits.text, once.text)
    assert re.fullmatch(digits.text, varied.text)
    assert max(Counter(varied.token_ids).values()) < max(Counter(once.token_ids).values())
    [short] = llm.generate(["1"], SamplingParams(max_tokens=3, seed=1, structured_outputs=digits), use_tqdm=False)
    assert (short.finish_reason, len(short.token_ids)) == (FinishReason.LENGTH, 3)
    stop = varied.token_ids[4]
    stopping = SamplingParams(
        temperature=0.0, max_tokens=64, structured_outputs=digits, frequency_penalty=2.0, stop_token_ids=(stop,)
    )
    [stopped] = llm.generate(["1 1 1 1"], stopping, use_tqdm=False)
    assert stopped.token_ids == varied.token_ids[: varied.token_ids.index(stop) + 1]


@pytest.mark.parametrize("ending", [{}, {"ignore_eos": True}, {"min_tokens": 50}])
def test_a_finished_grammar_ends_the_answer(llm: LLM, ending: dict[str, object]) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=64, structured_outputs=Constraint.choice(["Paris"]), **ending)  # type: ignore[arg-type]
    [completion] = llm.generate(["The capital of France is "], params, use_tqdm=False)
    assert (completion.text, completion.finish_reason) == ("Paris", FinishReason.STOP)


def test_choices_of_one_step_differ_in_having_a_grammar(llm: LLM) -> None:
    """Requests with and without one share a batch; those without answer as they do alone."""
    free = SamplingParams(temperature=0.0, max_tokens=12)
    bound = SamplingParams(temperature=0.0, max_tokens=12, structured_outputs=Constraint.regex("[0-9]+"))
    prompts = ["The capital of France is", "One plus one is"]
    alone = [each.token_ids for each in llm.generate(prompts, free, use_tqdm=False)]
    mixed = llm.generate([*prompts, *prompts], [free, free, bound, bound], use_tqdm=False)
    assert [each.token_ids for each in mixed[:2]] == alone
    assert all(re.fullmatch("[0-9]+", each.text) for each in mixed[2:])

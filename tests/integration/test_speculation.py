"""Drafts change no token, whether they are right or not."""

from __future__ import annotations

import gc
import random
import re
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from common.engine.contract.step import NoToken, Outcome, accepted
from common.engine.llm import LLM, Completion
from common.engine.speculation import suffix
from common.engine.speculation.history import History
from common.engine.worker import model_runner
from common.errors import ConfigError
from common.types import Constraint, FinishReason, Logprobs, SampledToken, SamplingParams
from tests.integration import speculation_rig as rig
from tests.integration.cluster import running_cluster
from tests.pods import wait_for
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
FEW = rig.GUESSES  # tokens, so that the answers of a model with random weights repeat
FEW_PARAMS = {
    "greedy": {"temperature": 0.0},
    "drawn": {},
    "logprobs": {"num_logprobs": 3},
    "stop": {"stop_token_ids": (6,), "min_tokens": 5},
    "bad words": {"bad_word_token_ids": ((5, 6), (7, 7, 7))},
    "penalised": {"frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.1},
    "off": {"speculative": False},
} | {f"{number} tokens": {"max_tokens": number} for number in range(1, 8)}  # ends within drafts
METHODS = {
    "right": "tests.integration.speculation_rig:right",
    "wrong": "tests.integration.speculation_rig:wrong",
    "half": "tests.integration.speculation_rig:half",
    "ngram": "ngram:min=1,depth=4",
    "suffix": "suffix:depth=4,memory=1MiB",
}


class Verified:
    """Counts drafts."""

    def __init__(self) -> None:
        self.num_drafts = 0
        self.num_right = 0

    def accepted(self, drafts: Sequence[int], samples: Sequence[SampledToken | NoToken]) -> Outcome:
        outcome = accepted(drafts, samples)
        self.num_drafts += len(drafts)
        self.num_right += len(outcome) - 1 if drafts and isinstance(outcome, list) else 0
        return outcome


def make_llm(name: str, **options: object) -> LLM:
    return LLM(tiny_model_dir(name), **rig.SETTINGS | options)


@pytest.fixture(params=["right", "wrong", "half"])
def accuracy(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=METHODS)
def method(request: pytest.FixtureRequest) -> str:
    return METHODS[request.param]


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> Verified:
    verified = Verified()
    monkeypatch.setattr(model_runner, "accepted", verified.accepted)
    return verified


@pytest.fixture(autouse=True)
def _all_drafts_are_verified(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever steps take."""
    rig.ask_and_verify_always(monkeypatch)
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
    assert sum(each.num_verified_drafts for each in completions) == stats.drafts.num_verified
    assert sum(each.num_accepted_drafts for each in completions) == stats.drafts.num_accepted
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


@pytest.fixture(scope="module")
def repetitive() -> Repetitive:
    """Each kind of request three times: twice with the same seed, and once with another, as choices have."""
    params = [
        SamplingParams(**{"temperature": 1.0, "max_tokens": 30, "allowed_token_ids": FEW, "seed": seed} | own)
        for own in FEW_PARAMS.values()
        for seed in (3, 3, 4)
    ]
    prompt = [*prompt_of(6), 5, 6, 7] * 2
    with make_llm("llama") as llm:
        return Repetitive(prompt, params, llm.generate([prompt] * len(params), params, use_tqdm=False))


class Repetitive(NamedTuple):
    prompt: list[int]
    params: list[SamplingParams]
    answers: list[Completion]  # without drafts


def test_answers_that_repeat_are_the_same(repetitive: Repetitive, method: str, verified: Verified) -> None:
    prompt, params, answers = repetitive
    rig.ANSWERS[:] = [prompt + answer.token_ids for answer in answers]
    prompts = [prompt] * len(params)
    with make_llm("llama", speculative=method) as llm:
        found = [*llm.generate(prompts, params, use_tqdm=False), *llm.generate(prompts, params, use_tqdm=False)]
        report = llm.check_integrity()
    kinds = [(kind, number) for kind in FEW_PARAMS for number in range(3)] * 2
    for kind, expected, answer in zip(kinds, answers * 2, found, strict=True):
        assert (kind, answer.token_ids, answer.finish_reason) == (kind, expected.token_ids, expected.finish_reason)
        assert expected.logprobs == answer.logprobs or _are_close(expected.logprobs, answer.logprobs), kind
    assert {answer.finish_reason for answer in found} == {FinishReason.STOP, FinishReason.LENGTH}
    assert (report.violations, report.num_blocks_in_use) == ([], 0)
    assert verified.num_drafts > 100
    assert verified.num_right > 50 or method == METHODS["wrong"]


def test_a_request_may_turn_it_off(repetitive: Repetitive, method: str, verified: Verified) -> None:
    prompt, _, _ = repetitive
    off = SamplingParams(temperature=0.0, max_tokens=20, allowed_token_ids=FEW, speculative=False)
    with make_llm("llama", speculative=method) as llm:
        for _ in range(2):  # nothing is learnt either
            llm.generate([prompt], off, use_tqdm=False)
    assert verified.num_drafts == 0


def test_answers_without_a_seed_are_distributed_as_without_drafts(
    monkeypatch: pytest.MonkeyPatch, verified: Verified
) -> None:
    """By a chi-square test of two samples, for all answers of three tokens. Their seeds are drawn, here from generators
    of the test."""
    num_rounds, prompts = 16, [prompt_of(6)] * 64  # at once, as steps with prompts verify no drafts
    params = SamplingParams(temperature=2.0, max_tokens=3, allowed_token_ids=FEW)
    counts: list[Counter[tuple[int, ...]]] = []
    for number, method in enumerate([None, "tests.integration.speculation_rig:guessing"]):
        monkeypatch.setattr("secrets.randbelow", random.Random(number).randrange)
        with make_llm("llama", speculative=method, max_num_batched_tokens=512) as llm:
            rounds = [llm.generate(prompts, params, use_tqdm=False) for _ in range(num_rounds)]
        counts.append(Counter(tuple(answer.token_ids) for answers in rounds for answer in answers))
    plain, found = counts
    assert verified.num_right > 100
    assert len(plain | found) == len(FEW) ** 3
    statistic = sum((plain[each] - found[each]) ** 2 / (plain[each] + found[each]) for each in plain | found)
    assert statistic < 54.1  # of 26 degrees of freedom, in one of 1000 cases more


@pytest.mark.parametrize("name", ["raising", "answering_garbage", "forgetting_badly"])
def test_a_proposer_that_fails_costs_no_answer(
    repetitive: Repetitive, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    prompt, params, answers = repetitive
    with make_llm("llama", speculative=f"tests.integration.speculation_rig:{name}") as llm:
        found = [*llm.generate([prompt] * len(params), params, use_tqdm=False)]
        llm.generate([prompt] * 20, params[0], use_tqdm=False)
        assert llm.check_integrity().violations == []
    assert [answer.token_ids for answer in found] == [answer.token_ids for answer in answers]
    assert rig.NUM_CALLS[name] == 10  # it was switched off
    assert "nothing is proposed any more" in caplog.text


def test_a_factory_that_raises_ends_the_start_before_the_model_is_loaded() -> None:
    with pytest.raises(ConfigError, match=r"^speculative: tests\.integration\.speculation_rig:unwilling has failed"):
        LLM("/there/is/no/model", speculative="tests.integration.speculation_rig:unwilling")


def test_a_factory_that_makes_something_else_ends_the_start() -> None:
    with pytest.raises(ConfigError, match=r"speculation_rig:aimless has made no proposer: NoneType has no propose, "):
        LLM("/there/is/no/model", speculative="tests.integration.speculation_rig:aimless")


def test_outputs_in_memory_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    histories: list[weakref.ref[History]] = []

    def create(memory: int) -> History:
        history = History(memory)
        histories.append(weakref.ref(history))
        return history

    monkeypatch.setattr(suffix, "History", create)
    with make_llm("llama", speculative="suffix:memory=1MiB") as llm:
        llm.generate([prompt_of(9)], PARAMS["greedy"], use_tqdm=False)
        llm.check_integrity()
        history = histories[0]()
        assert history is not None
        assert history.num_tokens == 9 + MAX_TOKENS
        del history
    gc.collect()
    assert [each() for each in histories] == [None]


def test_a_reset_of_the_prefix_cache_forgets_outputs(verified: Verified) -> None:
    """No token of the model follows another twice, so that what is proposed was an answer before."""
    with make_llm("llama", speculative="suffix") as llm:
        num_right = []
        for has_reset in (False, False, True, False):
            if has_reset:
                llm.reset_prefix_cache()
            before = verified.num_right
            llm.generate([prompt_of(9)], PARAMS["greedy"], use_tqdm=False)
            num_right.append(verified.num_right - before)
    assert num_right[0] == num_right[2] == 0
    assert num_right[1] == num_right[3] > MAX_TOKENS // 2


async def test_drafts_after_a_handoff_are_of_the_same_tenant(tmp_path: Path, verified: Verified) -> None:
    """No token of the model follows another twice, so that what is proposed was an answer before."""
    prompt = prompt_of(9)
    expected = reference_generate(tiny_model_dir("llama"), prompt, MAX_TOKENS)
    num_drafts, num_right = [], []
    async with running_cluster(tmp_path, "llama", speculative="suffix") as cluster:
        for salt, is_on in [("a", True), ("a", True), ("b", True), ("a", False)]:
            before = verified.num_drafts, verified.num_right
            answer = await cluster.generate(prompt, cache_salt=salt, max_tokens=MAX_TOKENS, speculative=is_on)
            assert list(answer.choices[0].token_ids) == expected
            num_drafts.append(verified.num_drafts - before[0])
            num_right.append(verified.num_right - before[1])
        assert cluster.recomputed() == 0
    assert num_right[1] > MAX_TOKENS // 2
    assert [num_drafts[at] for at in (0, 2, 3)] == [0, 0, 0]


async def test_eight_streams_have_the_same_texts_and_their_acceptance_is_shown(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, "llama", speculative="ngram:min=1,depth=4") as cluster:
        plain = await rig.eight_streams(cluster.router, speculative=False)
        found = await rig.eight_streams(cluster.router)
        totals = cluster.decode[0].context.stats.latest.drafts
        view = cluster.router.cluster.decode_pods[0]
        await wait_for(lambda: view.stats is not None and view.stats.drafts.num_verified == totals.num_verified)
        pods = {pod.role: pod for pod in cluster.router.service.cluster_view().pods}
    assert found.texts == plain.texts
    assert (plain.num_accepted, plain.num_rejected) == (0, 0)
    assert (found.num_accepted, found.num_rejected) == (totals.num_accepted, totals.num_verified - totals.num_accepted)
    assert found.num_accepted > 10  # how many there are depends on which streams share steps
    assert (pods["prefill"].proposer, pods["decode"].proposer) == (None, "ngram")
    load = pods["decode"].load
    assert load is not None
    assert (load.num_verified_drafts, load.num_accepted_drafts) == (totals.num_verified, totals.num_accepted)
    assert load.num_draft_verifications == totals.num_verifications


def test_a_small_cache_preempts_and_changes_nothing(method: str) -> None:
    """Each of the four needs seven of the 15 blocks."""
    prompts = [prompt_of(length) for length in (9, 10, 11, 12)]
    expected = [reference_generate(tiny_model_dir("llama"), prompt, MAX_TOKENS) for prompt in prompts]
    rig.ANSWERS[:] = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]
    settings = {"num_blocks": 16, "max_model_len": 28, "enable_prefix_caching": False}
    with make_llm("llama", speculative=method, **settings) as llm:
        completions = llm.generate(prompts, PARAMS["greedy"], use_tqdm=False)
        report = llm.check_integrity()
    assert [completion.token_ids for completion in completions] == expected
    assert report.violations == []


def _are_close(one: list[Logprobs] | None, other: list[Logprobs] | None) -> bool:
    assert one is not None
    assert other is not None
    return all(
        a.sampled == pytest.approx(b.sampled, abs=1e-5) and [t for t, _ in a.top] == [t for t, _ in b.top]
        for a, b in zip(one, other, strict=True)
    )


def test_constrained_output_is_the_same(method: str, verified: Verified) -> None:
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
    with LLM(num_threads=1, speculative=method) as llm:
        llm.generate(prompts, params, use_tqdm=False)
        found = llm.generate(prompts, params, use_tqdm=False)  # of which `suffix` knows the answers
        report, stats = llm.check_integrity(), llm._client.stats()
    assert [(each.token_ids, each.finish_reason) for each in found] == [
        (each.token_ids, each.finish_reason) for each in plain
    ]
    assert (report.violations, stats.num_failed_recordings) == ([], 0)
    assert re.fullmatch(pattern, found[0].text) or found[0].finish_reason is FinishReason.LENGTH
    assert verified.num_right or method == METHODS["wrong"]

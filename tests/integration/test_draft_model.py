"""A draft model changes no token, and its KV is what it would be if it had computed every token in its turn.

Where the draft model is the model itself, every draft is right. Where it is another, each of its drafts is the token
that it generates alone after the same tokens.
"""

from __future__ import annotations

import gc
import re
import shutil
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import tokenizers

from common.demo_model import demo_model_path
from common.engine.contract.masks import MaskSource
from common.engine.contract.step import NOTHING_ASKED, Asked, RunningStep, SchedulerOutput
from common.engine.llm import LLM, Completion
from common.engine.messages import DraftFigures
from common.engine.speculation.base import Context
from common.engine.speculation.guard import MAX_FAILURES
from common.engine.worker import worker
from common.engine.worker.draft_model import DraftModel
from common.engine.worker.worker import Worker
from common.errors import ConfigError
from common.types import SamplingParams
from tests.integration import handoff_rig
from tests.integration import speculation_rig as rig
from tests.integration.handoff_rig import Handoffs, create_engine
from tests.integration.ranks_rig import assert_same, generate, open_llm
from tests.tiny_models import TINY_MODELS, prompt_of, random_model, reference_generate, tiny_config, tiny_model_dir

MAX_TOKENS = 14
LENGTHS = (1, 4, 5, 11, 30)
FEW = (5, 6, 200)  # tokens, so that another model's drafts are often right
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
PARAMS = {
    "greedy": {"temperature": 0.0},
    "drawn": {"temperature": 1.0},
    "limited": {"temperature": 0.9, "top_p": 0.9, "top_k": 20, "min_p": 0.01},
    "penalised": {"temperature": 0.7, "repetition_penalty": 1.4, "presence_penalty": 0.3, "frequency_penalty": 0.2},
    "ruled": {"temperature": 0.8, "logit_bias": {5: 3.0}, "min_tokens": 6, "stop_token_ids": tuple(range(128))},
    "logprobs": {"temperature": 0.5, "num_logprobs": 3},
}
LLAMA, OTHER = tiny_model_dir("llama"), tiny_model_dir("llama", seed=1)


def make_llm(name: str = "llama", draft: Path | None = None, depth: int = 4, **options: object) -> LLM:
    settings = dict(rig.SETTINGS)
    if draft is not None:
        settings["speculative"] = f"draft:model={draft},depth={depth}"
    return LLM(tiny_model_dir(name), **settings | options)


def answer(
    llm: LLM, prompts: Sequence[list[int]], params: SamplingParams | Sequence[SamplingParams]
) -> list[list[int]]:
    answers = llm.generate(prompts, params, use_tqdm=False)
    report = llm.check_integrity()
    assert (report.violations, report.num_blocks_in_use) == ([], 0)
    return [each.token_ids for each in answers]


def figures_of(llm: LLM) -> DraftFigures:
    stats = llm._client.stats()
    assert (stats.num_failed_recordings, stats.drafts.failures) == (0, {})
    return stats.drafts


@pytest.fixture(autouse=True)
def _all_drafts_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever steps take."""
    rig.ask_and_verify_always(monkeypatch)


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[list[int], list[int]]]]:
    """Tokens and what was proposed after them. In the end, all of it is what OTHER alone says."""
    seen: list[tuple[list[int], list[int]]] = []
    propose = DraftModel.propose

    def watched(self: DraftModel, requests: Sequence[Context]) -> list[list[int]]:
        found = propose(self, requests)
        seen.extend((each.token_ids.tolist(), drafts) for each, drafts in zip(requests, found, strict=True) if drafts)
        return found

    monkeypatch.setattr(DraftModel, "propose", watched)
    yield seen
    assert seen
    for token_ids, proposed in seen:
        assert proposed == reference_generate(OTHER, token_ids, len(proposed))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in ("llama", "gemma2", "gpt2") else pytest.mark.matrix)
        for name in TINY_MODELS
    ],
)
def test_the_models_own_drafts_are_all_right(name: str) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    expected = [reference_generate(tiny_model_dir(name), prompt, MAX_TOKENS) for prompt in prompts]
    with make_llm(name, tiny_model_dir(name)) as llm:
        for _ in range(2):  # the second time from the prefix cache
            assert answer(llm, prompts, GREEDY) == expected
        figures, stats = figures_of(llm), llm._client.stats()
    assert figures.num_verified == figures.num_accepted > 2 * 5 * (MAX_TOKENS - 6)
    assert figures.num_caught_up < sum(LENGTHS) + 2 * 8, "what was there was not computed again"
    assert stats.prefix_cache_hits


@pytest.mark.parametrize("kind", PARAMS)
def test_the_models_own_drafts_are_right_however_tokens_are_drawn(kind: str) -> None:
    prompts = [prompt_of(length) for length in LENGTHS]
    params = [
        SamplingParams(**{"seed": seed, "max_tokens": MAX_TOKENS, **PARAMS[kind]}) for seed in range(len(prompts))
    ]
    with make_llm() as llm:
        plain = answer(llm, prompts, params)
    with make_llm(draft=LLAMA) as llm:
        assert answer(llm, prompts, params) == plain
        figures = figures_of(llm)
    assert figures.num_verified == figures.num_accepted > 0


def test_recorded_passes_give_the_models_own_drafts() -> None:
    """The tiny models' heads are of a size that is not recorded on CPUs."""
    prompts = ["The capital of France is", "Once upon a time there was a king who had"]
    with LLM(num_threads=1, num_blocks=64) as llm:
        plain = [each.token_ids for each in llm.generate(prompts, GREEDY, use_tqdm=False)]
    with LLM(num_threads=1, num_blocks=64, speculative=f"draft:model={demo_model_path()}") as llm:
        assert [each.token_ids for each in llm.generate(prompts, GREEDY, use_tqdm=False)] == plain
        figures = figures_of(llm)
    assert figures.num_verified == figures.num_accepted > 8


def test_drafts_of_another_model_change_no_token() -> None:
    """Some are right and some are not, also in the same run of drafts."""
    prompts = [prompt_of(9)] * 3 + [prompt_of(length) for length in LENGTHS]  # of the first, most is computed once
    params = [
        SamplingParams(
            **{"seed": seed, "max_tokens": 30, "allowed_token_ids": FEW, "speculative": seed != 5, **PARAMS[kind]}
        )
        for seed, kind in enumerate((*PARAMS, "greedy", "drawn"))
    ]
    with make_llm() as llm:
        plain = answer(llm, prompts, params)
    with make_llm(draft=OTHER, depth=7) as llm:
        for _ in range(2):
            assert answer(llm, prompts, params) == plain
        figures = figures_of(llm)
    assert 0.1 < figures.num_accepted / figures.num_verified < 0.7
    assert figures.accepted_by_position[2] > 0


def test_drafts_after_prefix_hits_and_where_blocks_were_others(drafts: list[tuple[list[int], list[int]]]) -> None:
    """23 blocks: what one turn leaves in the prefix cache, the next partly uses and partly overwrites."""
    first, second = prompt_of(13, seed=1), prompt_of(17, seed=2)
    turns = [[first, second], [first + second, second, second], [prompt_of(19, seed=3)], [first, first + second]]
    with make_llm(draft=OTHER, num_blocks=24, max_model_len=60) as llm:
        for prompts in turns:
            expected = [reference_generate(LLAMA, prompt, MAX_TOKENS) for prompt in prompts]
            assert answer(llm, prompts, GREEDY) == expected
        figures, stats = figures_of(llm), llm._client.stats()
    assert stats.prefix_cache_hits > 0
    assert figures.num_caught_up < sum(len(prompt) for turn in turns for prompt in turn)
    assert len(drafts) > 40


def test_a_prompt_of_whole_blocks_that_comes_again(drafts: list[tuple[list[int], list[int]]]) -> None:
    """What precedes its last token may be computed in blocks that others had, while its own next one is not there."""
    prompt = prompt_of(16)  # four blocks
    with make_llm(draft=OTHER) as llm:
        expected = reference_generate(LLAMA, prompt, MAX_TOKENS)
        for _ in range(6):
            assert answer(llm, [prompt] * 3, GREEDY) == [expected] * 3
        assert llm._client.stats().drafts.failures == {}
    assert len(drafts) > 10


def test_drafts_after_preemption(drafts: list[tuple[list[int], list[int]]]) -> None:
    """Each of the four needs seven of the 15 blocks."""
    prompts = [prompt_of(length) for length in (9, 10, 11, 12)]
    settings = {"num_blocks": 16, "max_model_len": 28, "enable_prefix_caching": False}
    with make_llm(draft=OTHER, **settings) as llm:
        expected = [reference_generate(LLAMA, prompt, MAX_TOKENS) for prompt in prompts]
        assert answer(llm, prompts, GREEDY) == expected
        assert llm._client.stats().num_preemptions > 0
        assert figures_of(llm).num_caught_up > sum(map(len, prompts)), "after a preemption all is computed again"
    assert len(drafts) > 20


def test_drafts_after_a_failure(drafts: list[tuple[list[int], list[int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    """What was computed before counts no longer."""
    num_calls = 0
    draft = DraftModel._draft

    def failing(self: DraftModel, *arguments: object) -> object:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise RuntimeError("broken")
        return draft(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(DraftModel, "_draft", failing)
    with make_llm(draft=OTHER) as llm:
        assert answer(llm, [prompt_of(9)], GREEDY) == [reference_generate(LLAMA, prompt_of(9), MAX_TOKENS)]
        figures = llm._client.stats().drafts
    assert figures.failures == {"raised": 1}
    assert figures.num_caught_up > 2 * 9
    assert len(drafts) > 6


def test_one_that_fails_too_often_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Asked] = []
    submit = Worker.submit

    def watched(self: Worker, step: SchedulerOutput, masks: MaskSource) -> RunningStep:
        asked.append(step.asked)
        return submit(self, step, masks)

    def failing(self: DraftModel, *_: object) -> object:
        raise RuntimeError("broken")

    monkeypatch.setattr(Worker, "submit", watched)
    monkeypatch.setattr(DraftModel, "_draft", failing)
    with make_llm(draft=OTHER) as llm:
        for _ in range(4):
            assert answer(llm, [prompt_of(9)], GREEDY) == [reference_generate(LLAMA, prompt_of(9), MAX_TOKENS)]
        assert llm._client.stats().drafts.failures == {"raised": MAX_FAILURES}
    assert set(asked[MAX_FAILURES + 5 :]) == {NOTHING_ASKED}


@pytest.mark.parametrize("draft", [LLAMA, OTHER], ids=["own", "another"])
def test_after_a_handoff_the_prompt_is_computed_again(tmp_path: Path, draft: Path) -> None:
    """The producer has no draft model, and the pods hand over to each other all the same."""
    prompts = [prompt_of(length) for length in (*LENGTHS, 3 * handoff_rig.CHUNK + 5)]
    consumer = create_engine(LLAMA, tmp_path / "kv", speculative=f"draft:model={draft},depth=4")
    handoffs = Handoffs(create_engine(LLAMA, tmp_path / "kv"), consumer)
    for params in (GREEDY, SamplingParams(temperature=1.0, seed=3, max_tokens=MAX_TOKENS)):
        decoded = handoffs.run(prompts, params)
        with create_engine(LLAMA, None) as colocated:
            expected = handoff_rig.generate(colocated, prompts, params)
        assert [request.token_ids for request in decoded] == expected
        assert all(each.received is not None and not each.received.recompute_reason for each in decoded)
    stats = consumer.stats()
    handoffs.check_integrity()
    handoffs.close()
    assert stats.num_prompt_tokens == 0
    assert stats.drafts.num_caught_up >= sum(map(len, prompts)) - 4 * len(prompts)
    num_right, num_verified = stats.drafts.num_accepted, stats.drafts.num_verified
    assert num_right == num_verified > 0 if draft == LLAMA else num_right < num_verified / 2


def test_drafts_after_a_handoff(drafts: list[tuple[list[int], list[int]]], tmp_path: Path) -> None:
    consumer = create_engine(LLAMA, tmp_path / "kv", speculative=f"draft:model={OTHER},depth=3")
    handoffs = Handoffs(create_engine(LLAMA, tmp_path / "kv"), consumer)
    handoffs.run([prompt_of(length) for length in (1, 16, 37)], GREEDY)
    handoffs.close()
    assert len(drafts) > 20


def test_beyond_the_draft_models_limit_nothing_is_proposed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    short = tmp_path / "short"
    random_model(tiny_config("LlamaConfig", max_position_embeddings=24)).save_pretrained(short)
    prompts = [prompt_of(length) for length in (15, 23, 24, 30)]
    with make_llm(draft=short) as llm:
        expected = [reference_generate(LLAMA, prompt, MAX_TOKENS) for prompt in prompts]
        assert answer(llm, prompts, GREEDY) == expected
        figures = figures_of(llm)
    assert 0 < figures.num_verified == figures.num_accepted <= 24 - 15
    assert caplog.text.count("the draft model's limit is 24 tokens") == 1


def test_its_kv_counts_as_memory() -> None:
    own = 3 * 2 * 2 * 4 * 12 * 4  # bytes per block, of one as of the other
    with make_llm(draft=LLAMA, num_blocks=None, kv_cache_memory=64 * own) as llm:
        assert (llm.spec.bytes_per_block, llm.spec.draft_bytes_per_block) == (own, own)
        assert llm.spec.num_blocks == 32
        assert llm.spec.bytes_per_whole_block == own


def test_it_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[weakref.ref[DraftModel]] = []

    class Watched(DraftModel):
        def __init__(self, *arguments: object) -> None:
            super().__init__(*arguments)  # type: ignore[arg-type]
            models.append(weakref.ref(self))

    monkeypatch.setattr(worker, "DraftModel", Watched)
    with make_llm(draft=LLAMA) as llm:
        answer(llm, [prompt_of(9)], GREEDY)
        assert models[0]() is not None
    gc.collect()
    assert [each() for each in models] == [None]


@pytest.fixture
def unloadable(tmp_path: Path) -> Path:
    """A model whose weights nobody may read."""
    directory = tmp_path / "model"
    directory.mkdir()
    shutil.copy(LLAMA / "config.json", directory)
    return directory


def with_tokenizer(directory: Path, tokens: Sequence[str]) -> Path:
    if not directory.exists():
        shutil.copytree(LLAMA, directory)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary)).save(str(directory / "tokenizer.json"))
    return directory


def test_what_cannot_draft_is_refused_before_the_model_is_loaded(unloadable: Path, tmp_path: Path) -> None:
    larger, empty, broken = (tmp_path / name for name in ("larger", "empty", "broken"))
    random_model(tiny_config("LlamaConfig", vocab_size=300)).save_pretrained(larger)
    empty.mkdir()
    shutil.copytree(LLAMA, broken)
    (broken / "model.safetensors").write_bytes(b"no weights")
    with_tokenizer(unloadable, ["a", "b", "c"])
    swapped = with_tokenizer(tmp_path / "swapped", ["a", "c", "b"])
    for draft, problem in {
        larger: "has a vocabulary of 300 tokens, and .* one of 256",
        empty: "has no config.json",
        tmp_path / "nowhere": "does not exist",
        broken: "cannot be loaded",
        swapped: "has another vocabulary than .*: token 1, 'b', differs",
    }.items():
        with pytest.raises(ConfigError, match=f"^--speculative: draft:model: .*{problem}") as caught:
            LLM(unloadable, speculative=f"draft:model={draft}")
        assert "\n" not in caught.value.message
        assert caught.value.param == "speculative"
    with pytest.raises(ConfigError, match=f"^{re.escape(str(unloadable))} has no safetensors weights"):
        LLM(unloadable, speculative=f"draft:model={with_tokenizer(tmp_path / 'same', ['a', 'b', 'c'])}")


@pytest.fixture(scope="module")
def alone() -> dict[str, Completion]:
    with open_llm() as llm:
        return generate(llm)


@pytest.mark.matrix
@pytest.mark.cell(feature="a draft model", degrees="{degrees}")
@pytest.mark.parametrize("degrees", ["2", "1x2"])
def test_several_ranks_have_one(degrees: str, alone: dict[str, Completion]) -> None:
    num_ranks, num_stages = (2, 1) if degrees == "2" else (1, 2)
    speculative = f"draft:model={demo_model_path()}"
    parallel = {"tensor_parallel_size": num_ranks, "pipeline_parallel_size": num_stages}
    with open_llm(speculative=speculative, **parallel) as llm:
        assert_same(generate(llm), alone)
        figures = llm._client.stats().drafts
    assert figures.num_accepted > 0.5 * figures.num_verified > 30, "drafts know no grammar, but all else"

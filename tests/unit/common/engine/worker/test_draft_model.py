"""How a draft model catches up with what it has not computed."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from common.engine.config import ModelConfig
from common.engine.contract.step import Asked, NewRequest, SchedulerOutput
from common.engine.model.loader import load_model
from common.engine.speculation.base import Context
from common.engine.worker.draft_model import DraftModel
from common.engine.worker.model_runner import ModelRunner
from common.engine.worker.worker import allocate_kv_cache
from common.types import RequestId, SamplingParams, root_hash
from tests.tiny_models import prompt_of, reference_generate, tiny_model_dir

BLOCK_SIZE = 4
NUM_BLOCKS = 64
GREEDY = SamplingParams(temperature=0.0)
TOKEN_S = 1e-3
A, B = RequestId("a"), RequestId("b")


class Clock:
    """Each pass over the model takes TOKEN_S for each token, and nothing else takes time."""

    def __init__(self, runner: ModelRunner) -> None:
        self.now = 0.0
        submit = runner.submit

        def submitted(scheduled: dict[RequestId, int], *others: object) -> object:
            self.now += TOKEN_S * sum(scheduled.values())
            return submit(scheduled, *others)  # type: ignore[arg-type]

        runner.submit = submitted  # type: ignore[method-assign, assignment]

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def model() -> DraftModel:
    loaded = load_model(ModelConfig(model=str(tiny_model_dir("llama")), num_threads=1))
    kv_cache = allocate_kv_cache(loaded.kv_spec, NUM_BLOCKS, BLOCK_SIZE, loaded.device)
    runner = ModelRunner(loaded, kv_cache, block_size=BLOCK_SIZE, max_num_seqs=8, max_model_len=200)
    draft_model = DraftModel(runner, NUM_BLOCKS, BLOCK_SIZE, 200, 64, Clock(runner))
    for _ in range(100):  # what was measured at the start was another clock's
        draft_model._times.observe(TOKEN_S, 1)
        draft_model._times.observe(40 * TOKEN_S, 40)
    return draft_model


@pytest.fixture
def step(model: DraftModel) -> Callable[..., tuple[dict[RequestId, list[int]], int]]:
    """Returns what is proposed, and how many tokens were computed before that."""

    contexts: dict[RequestId, Context] = {}

    def step(
        *new: NewRequest,
        num_drafts: int = 0,
        num_tokens: int = 1,
        dropped: tuple[RequestId, ...] = (),
        tokens: dict[RequestId, list[int]] | None = None,
    ) -> tuple[dict[RequestId, list[int]], int]:
        asked = Asked(num_drafts, TOKEN_S * num_tokens)
        model.begin_step(SchedulerOutput(list(new), dropped_request_ids=list(dropped), asked=asked))
        for each in dropped:
            del contexts[each]
        for each in new:
            contexts[each.request_id] = Context(
                each.request_id, np.array(each.token_ids), each.sampling, len(each.token_ids)
            )
        for each, token_ids in (tokens or {}).items():
            contexts[each] = contexts[each]._replace(token_ids=np.array(token_ids))
        found = model.propose(list(contexts.values()))
        drafting = model.take_drafting()
        assert model.check() == []
        proposed = {each: drafts for each, drafts in zip(contexts, found, strict=True) if drafts}
        return proposed, 0 if drafting is None else drafting.num_caught_up

    return step


def request(request_id: RequestId, token_ids: list[int], first_block: int, **sampling: object) -> NewRequest:
    params = SamplingParams(**{"temperature": 0.0, **sampling})  # type: ignore[arg-type]
    blocks = list(range(first_block, first_block + len(token_ids) // BLOCK_SIZE + 2))
    return NewRequest(request_id, token_ids, len(token_ids), params, [blocks], 0, root=root_hash())


def test_a_long_prompt_is_computed_a_few_tokens_a_step(model: DraftModel, step: Callable[..., tuple]) -> None:
    prompt = prompt_of(38)
    caught_up = [step(request(A, prompt, 1), num_drafts=3, num_tokens=11)[1]]
    while True:
        proposed, number = step(num_drafts=3, num_tokens=11)
        if not number:
            break
        caught_up.append(number)
    assert caught_up == [8, 8, 8, 8, 5], "whole blocks that fit, and no last token, which drafts begin with"
    assert proposed == {A: reference_generate(tiny_model_dir("llama"), prompt, 3)}


def test_drafts_come_in_the_step_in_which_nothing_lacks_any_more(step: Callable[..., tuple]) -> None:
    prompt = prompt_of(9)
    expected = reference_generate(tiny_model_dir("llama"), prompt, 2)
    assert step(request(A, prompt, 1), num_drafts=2, num_tokens=50) == ({A: expected}, 8)
    assert step(request(B, prompt[:3], 9), num_drafts=1)[0][B], "so few tokens are no catching up"


def test_requests_take_turns(step: Callable[..., tuple]) -> None:
    long, short = prompt_of(60), prompt_of(17)
    first, _ = step(request(A, long, 1), request(B, short, 20), num_tokens=3, num_drafts=1)
    proposed = [first, *(step(num_tokens=3, num_drafts=1)[0] for _ in range(3))]
    assert list(map(list, proposed)) == [[], [], [], [B]], "what lacks least is the first"


def test_no_request_is_passed_over_for_ever(step: Callable[..., tuple]) -> None:
    prompt = prompt_of(22)
    proposed = {}
    step(request(A, prompt, 1), num_tokens=3)
    for number in range(40):
        others = RequestId(f"other {number}"), RequestId(f"other {number - 1}")
        new = request(others[0], prompt_of(9, seed=number), 20)
        proposed, _ = step(new, num_tokens=3, num_drafts=1, dropped=others[1:] if number else ())
        if A in proposed:
            break
    assert A in proposed
    assert number > 6, "others came first"


def test_what_several_requests_share_is_computed_once(model: DraftModel, step: Callable[..., tuple]) -> None:
    prompt = prompt_of(16)
    one = request(A, [*prompt, 7, 8, 9], 1)
    other = NewRequest(B, [*prompt, 9, 8, 7], 19, GREEDY, [[1, 2, 3, 4, 30, 31]], 0, root=root_hash())
    assert step(one, other, num_tokens=50)[1] == 18
    proposed, number = step(num_tokens=50, num_drafts=2)
    assert number == 0, "the last tokens of the other are no more than a pass for drafts computes"
    assert proposed == {
        each: reference_generate(tiny_model_dir("llama"), [*prompt, *end], 2)
        for each, end in ((A, (7, 8, 9)), (B, (9, 8, 7)))
    }


@pytest.mark.parametrize("is_same", [True, False])
def test_a_block_counts_for_the_same_tokens_only(step: Callable[..., tuple], is_same: bool) -> None:
    prompt = prompt_of(21)
    step(request(A, prompt, 1), num_tokens=50)
    later = prompt if is_same else [prompt[0] + 1, *prompt[1:]]  # equal blocks, but after another token
    proposed, number = step(request(B, later, 1), dropped=(A,), num_tokens=50, num_drafts=3)
    assert number == (0 if is_same else 20)
    assert proposed == {B: reference_generate(tiny_model_dir("llama"), later, 3)}


def test_a_block_that_was_partly_written_over_does_not_count(step: Callable[..., tuple]) -> None:
    """Here the second block, which then comes back to the same tokens."""
    prompt = prompt_of(14)
    step(request(A, prompt, 1), num_tokens=50)
    step(request(B, prompt_of(7, seed=1), 1), dropped=(A,), num_tokens=50)
    again = NewRequest(A, prompt, 14, GREEDY, [[20, 2, 21, 22, 23]], 0, root=root_hash())
    caught_up = [step(again, dropped=(B,), num_tokens=3)[1]]
    while number := step(num_tokens=3)[1]:
        caught_up.append(number)
    assert caught_up == [4, 4, 4], "and the last one with drafts"
    assert step(num_drafts=2)[0] == {A: reference_generate(tiny_model_dir("llama"), prompt, 2)}


@pytest.mark.parametrize(
    ("num_right", "num_wrong"), [(right, wrong) for right in range(4) for wrong in (0, 1, 3) if right + wrong]
)
def test_what_it_took_for_tokens_and_was_not_right_is_computed_again(
    step: Callable[..., tuple], num_right: int, num_wrong: int
) -> None:
    """Several tokens come at once, also wrong ones, as it is not asked after each step."""
    prompt = prompt_of(11)
    drafts = step(request(A, prompt, 1), num_drafts=4, num_tokens=50)[0][A]
    token_ids = prompt + drafts[:num_right] + [token_id + 1 for token_id in drafts[num_right:][:num_wrong]]
    expected = reference_generate(tiny_model_dir("llama"), token_ids, 1)
    assert step(num_drafts=1, tokens={A: token_ids}) == ({A: expected}, 0)


def test_nothing_is_proposed_beyond_blocks_and_the_end(step: Callable[..., tuple]) -> None:
    prompt = prompt_of(11)
    few_blocks = NewRequest(A, prompt, 11, GREEDY, [[1, 2, 3]], 0)
    few_tokens = request(B, prompt, 10, max_tokens=3)
    proposed, _ = step(few_blocks, few_tokens, num_drafts=4, num_tokens=50)
    expected = reference_generate(tiny_model_dir("llama"), prompt, 2)
    assert proposed == {A: expected, B: expected}, "one draft has a place, and the next needs none"


def test_a_key_of_other_tokens_is_a_violation(model: DraftModel, step: Callable[..., tuple]) -> None:
    step(request(A, prompt_of(9), 1), num_tokens=50)
    model._keys[1], model._keys[2] = model._keys[2], model._keys[1]
    assert len(model.check()) == 2
    model._requests.clear()
    assert model.check() == ["the draft model knows ['a'], not []"]

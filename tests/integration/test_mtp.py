"""A model's own multi-token head changes no token, and proposes what `transformers` does that computes all at once."""

from __future__ import annotations

import pytest

from common.engine.llm import LLM
from common.errors import ConfigError
from common.types import SamplingParams
from tests.integration import speculation_rig as rig
from tests.integration.test_draft_model import GREEDY, LENGTHS, MAX_TOKENS, answer, figures_of
from tests.integration.test_eagle3 import Seen, seen  # noqa: F401  a fixture
from tests.mtp_models import mtp_model_dir, reference_mtp_drafts
from tests.tiny_models import prompt_of, reference_generate, tiny_model_dir


def make_llm(**options: object) -> LLM:
    return LLM(mtp_model_dir(), **rig.SETTINGS | options)


@pytest.fixture(autouse=True)
def _all_drafts_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever steps take."""
    rig.ask_and_verify_always(monkeypatch)


def test_drafts_are_those_of_the_reference(seen: Seen) -> None:  # noqa: F811
    prompts = [prompt_of(length) for length in (*LENGTHS, 90)]
    expected = [reference_generate(tiny_model_dir("deepseek_v3"), prompt, MAX_TOKENS) for prompt in prompts]
    with make_llm(speculative="mtp:depth=3") as llm:
        for _ in range(2):  # the second time from the prefix cache
            assert answer(llm, prompts, GREEDY) == expected
        assert figures_of(llm).num_verified > 50
    assert len(seen.drafts) > 100
    for token_ids, proposed, start in seen.drafts:
        assert proposed == reference_mtp_drafts(token_ids, len(proposed), start)


def test_drafts_that_are_right_change_no_token() -> None:
    params = SamplingParams(temperature=1.0, seed=3, max_tokens=40, allowed_token_ids=(5, 6))
    prompts = [prompt_of(length) for length in LENGTHS]
    with make_llm() as llm:
        plain = answer(llm, prompts, params)
    with make_llm(speculative="mtp") as llm:
        assert answer(llm, prompts, params) == plain
        assert figures_of(llm).num_accepted > 20


def test_a_model_without_is_refused() -> None:
    for name, problem in {
        "llama": "has no multi-token heads \\(num_nextn_predict_layers\\)",
        "deepseek_v3": "lacks the weights of layer 3, such as enorm.weight",
    }.items():
        with pytest.raises(ConfigError, match=f"^--speculative: mtp: .* {problem}"):
            LLM(tiny_model_dir(name), speculative="mtp")

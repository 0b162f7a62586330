"""Drafts change no token on a GPU, where steps that verify are CUDA graphs and others begin before tokens are known."""

from __future__ import annotations

import pytest

from common.engine.devices.gpu.decode_graphs import DecodeGraphs
from common.engine.llm import LLM
from common.types import SamplingParams
from tests.eagle3_heads import tiny_head_dir
from tests.integration import speculation_rig as rig
from tests.integration.test_draft_model import FEW, LENGTHS, PARAMS, answer, figures_of
from tests.integration.test_eagle3 import Seen, seen  # noqa: F401  a fixture
from tests.mtp_models import mtp_model_dir
from tests.tiny_models import prompt_of, reference_generate, tiny_model_dir

pytestmark = pytest.mark.gpu

LLAMA = tiny_model_dir("llama")
PROPOSERS = {
    "ngram": (LLAMA, "ngram:min=1,depth=4"),
    "suffix": (LLAMA, "suffix:depth=4"),
    "draft": (LLAMA, f"draft:model={tiny_model_dir('llama', seed=1)}"),
    "eagle3": (LLAMA, f"eagle3:model={tiny_head_dir(LLAMA)}"),
    "mtp": (mtp_model_dir(), "mtp:depth=3"),
}


@pytest.fixture(autouse=True)
def _all_drafts_are_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever steps take."""
    rig.ask_and_verify_always(monkeypatch)


@pytest.mark.parametrize("name", PROPOSERS)
def test_drafts_change_no_token(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, speculative = PROPOSERS[name]
    sizes = []
    run = DecodeGraphs.run
    monkeypatch.setattr(DecodeGraphs, "run", lambda self, inputs: sizes.append(len(inputs.tokens)) or run(self, inputs))
    prompts = [prompt_of(length) for length in LENGTHS]
    params = [
        SamplingParams(**{"seed": 3, "max_tokens": 40, "allowed_token_ids": FEW, **each}) for each in PARAMS.values()
    ][: len(prompts)]
    limits = {"block_size": 16, "num_blocks": 128, "max_num_batched_tokens": 64, "device": "cuda", "dtype": "float32"}
    with LLM(model, max_num_seqs=8, **limits) as llm:
        plain = answer(llm, prompts, params)
    with LLM(model, max_num_seqs=8, **limits, speculative=speculative) as llm:
        for _ in range(2):  # the second time from the prefix cache
            assert answer(llm, prompts, params) == plain
        figures = figures_of(llm)
        assert llm.check_integrity().violations == []
    assert figures.num_verified > figures.num_accepted > 20
    assert figures.num_unseen == 0
    assert name == "mtp" or max(sizes) > 8, "more than one for each request"


def test_drafts_of_a_head_are_those_of_the_reference(seen: Seen) -> None:  # noqa: F811
    prompts = [prompt_of(length) for length in (*LENGTHS, 90)]
    head = tiny_head_dir(LLAMA)
    greedy = SamplingParams(temperature=0.0, max_tokens=14)
    with LLM(LLAMA, num_blocks=128, device="cuda", dtype="float32", speculative=f"eagle3:model={head}") as llm:
        assert answer(llm, prompts, greedy) == [reference_generate(LLAMA, prompt, 14) for prompt in prompts]
    seen.compare(head)

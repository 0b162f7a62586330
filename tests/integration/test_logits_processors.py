"""Logits processors by entry point, as an operator installs them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from common.engine.llm import LLM
from common.errors import BatonError, ConfigError, InvalidRequestError
from common.types import SamplingParams
from tests.tiny_models import prompt_of, reference_generate, tiny_model_dir

PROMPT = prompt_of(9)
SOURCE = """
class Only:
    def __init__(self, *, vocab_size, device):
        assert vocab_size == 256

    def applies_to(self, params):
        return bool(params.vllm_xargs)

    def process(self, logits, rows):
        for scores, row in zip(logits, rows, strict=True):
            position = len(row.token_ids) - row.num_prompt_tokens
            token_id = row.params.vllm_xargs["first"] + position  # raises for some requests
            best = scores[token_id].clone()
            scores.fill_(float("-inf"))
            scores[token_id] = best
"""


@pytest.fixture
def llm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "only_processor.py").write_text(SOURCE)
    facts = tmp_path / "only_processor-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: only-processor\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[baton.logits_processors]\nonly = only_processor:Only\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def start(**options: object) -> LLM:
        return LLM(tiny_model_dir("llama"), block_size=4, num_blocks=64, num_threads=1, **options)

    return start


def test_a_processor_decides_for_the_requests_that_it_applies_to(llm):
    params = [
        SamplingParams(temperature=0.0, max_tokens=4),
        SamplingParams(temperature=0.0, max_tokens=4, vllm_xargs={"first": 20}),
        SamplingParams(max_tokens=4, seed=1, vllm_xargs={"first": 30}, bad_word_token_ids=((29,),)),
    ]
    with llm(logits_processors=["only"]) as loaded:
        plain, *forced = loaded.generate([PROMPT] * 3, params, use_tqdm=False)
        assert plain.token_ids == reference_generate(tiny_model_dir("llama"), PROMPT, 4)
        assert [each.token_ids for each in forced] == [[20, 21, 22, 23], [30, 31, 32, 33]]
        with pytest.raises(BatonError, match="no finite logit"):  # it raises, and the request ends
            loaded.generate([PROMPT], SamplingParams(vllm_xargs={"other": 1}), use_tqdm=False)
        masked = SamplingParams(vllm_xargs={"first": 20}, bad_word_token_ids=((20,),))
        with pytest.raises(BatonError, match="leave no token"):
            loaded.generate([PROMPT], masked, use_tqdm=False)
        assert loaded.generate([PROMPT], params[0], use_tqdm=False)[0].token_ids == plain.token_ids


@pytest.mark.matrix
def test_ranks_decide_alike(llm, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)  # of the ranks' processes
    params = SamplingParams(temperature=0.7, seed=4, max_tokens=4, vllm_xargs={"first": 20})
    with llm(logits_processors=["only"], tensor_parallel_size=2) as loaded:
        [answer] = loaded.generate([PROMPT], params, use_tqdm=False)
    assert answer.token_ids == [20, 21, 22, 23]


def test_none_is_loaded_unless_it_is_named(llm):
    with llm() as plain, pytest.raises(InvalidRequestError, match="no logits processors"):
        plain.generate([PROMPT], SamplingParams(vllm_xargs={"first": 20}), use_tqdm=False)
    with pytest.raises(ConfigError, match="'other' is not installed; installed: only"):
        llm(logits_processors=["other"])

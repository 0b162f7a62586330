"""A proposer comes from outside the package, in one short file."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.engine.llm import LLM
from common.errors import ConfigError
from common.types import SamplingParams
from tests.extensions import proposer
from tests.tiny_models import prompt_of, reference_generate, tiny_model_dir

MAX_LINES = 90


def test_the_output_is_the_references() -> None:
    prompt = prompt_of(9) * 3
    with LLM(
        tiny_model_dir("llama"), block_size=4, num_blocks=64, speculative="tests.extensions.proposer:create"
    ) as llm:
        (completion,) = llm.generate([prompt], SamplingParams(temperature=0.0, max_tokens=24), use_tqdm=False)
        assert llm.check_integrity().violations == []
    assert completion.token_ids == reference_generate(tiny_model_dir("llama"), prompt, 24)
    assert proposer.PromptLookup.num_proposed


def test_one_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="speculative"):
        LLM(tiny_model_dir("llama"), speculative="tests.extensions.proposer:creat")


def test_it_is_short() -> None:
    assert len(Path(proposer.__file__).read_text(encoding="utf-8").splitlines()) < MAX_LINES

"""A device comes from outside the package, in one short file."""

from __future__ import annotations

from pathlib import Path

import pytest

from common.engine.llm import LLM
from common.errors import ConfigError
from common.types import SamplingParams
from tests.extensions import device
from tests.tiny_models import prompt_of, reference_generate, tiny_model_dir

MAX_LINES = 90
PLACE = "tests.extensions.device:ExampleDevice"
PROMPTS = [prompt_of(9), prompt_of(30)]


@pytest.mark.parametrize(("model", "kernels"), [("llama", "fused"), ("qwen3", "fused"), ("gemma2", "torch")])
def test_the_output_is_the_references(model: str, kernels: str) -> None:
    with LLM(tiny_model_dir(model), block_size=4, num_blocks=64, device=PLACE) as llm:
        assert (llm.spec.device, llm.spec.kernels, llm.spec.kernels_failed) == ("example", kernels, False)
        completions = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
    expected = [reference_generate(tiny_model_dir(model), prompt, 12) for prompt in PROMPTS]
    assert [completion.token_ids for completion in completions] == expected


def test_its_kernels_are_checked_like_the_projects_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "_turned", lambda heads, rotary: heads)
    with LLM(tiny_model_dir("llama"), block_size=4, num_blocks=64, device=PLACE) as llm:
        assert (llm.spec.kernels, llm.spec.kernels_failed) == ("torch", True)


@pytest.mark.parametrize("name", ["tpu", "tests.extensions.device:Nothing"])
def test_one_that_does_not_exist_is_named(name: str) -> None:
    with pytest.raises(ConfigError, match=f"device: .*{name}") as caught:
        LLM(tiny_model_dir("llama"), device=name)
    assert caught.value.param == "device"


def test_it_is_short() -> None:
    assert len(Path(device.__file__).read_text(encoding="utf-8").splitlines()) < MAX_LINES

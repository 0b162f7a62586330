"""A quantised format comes from outside the package, in one short file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from common.engine.llm import LLM
from common.errors import ConfigError
from common.types import SamplingParams
from tests.extensions import quantization
from tests.extensions.quantization import Int4Linear
from tests.tiny_models import prompt_of, reference_generate, tiny_model_dir

MAX_LINES = 90
PLACE = "tests.extensions.quantization:Int4Linear"
PROMPTS = [prompt_of(9), prompt_of(30)]


@pytest.fixture(params=["llama", "gemma2"])
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def rounded(model: str, tmp_path: Path) -> Path:
    """The model with rounded weights, which are float32."""
    loaded = AutoModelForCausalLM.from_pretrained(tiny_model_dir(model))
    with torch.no_grad():
        for module in loaded.modules():
            if type(module) is nn.Linear:
                module.weight = nn.Parameter(Int4Linear.of(module).rounded())
    loaded.config.tie_word_embeddings = False
    loaded.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("device", ["cpu", "tests.extensions.device:ExampleDevice"])
def test_the_output_is_that_of_the_rounded_weights(model: str, rounded: Path, device: str) -> None:
    with LLM(tiny_model_dir(model), block_size=4, num_blocks=64, quantization=PLACE, device=device) as llm:
        assert not llm.spec.kernels_failed
        completions = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=12), use_tqdm=False)
    expected = [reference_generate(rounded, prompt, 12) for prompt in PROMPTS]
    assert [completion.token_ids for completion in completions] == expected
    assert expected != [reference_generate(tiny_model_dir(model), prompt, 12) for prompt in PROMPTS]


def test_it_promises_nothing_of_batches() -> None:
    with pytest.raises(ConfigError, match=r"--batch-invariant: .*Int4Linear"):
        LLM(tiny_model_dir("llama"), quantization=PLACE, device="cpu", batch_invariant=True)


def test_one_that_does_not_exist_is_named() -> None:
    with pytest.raises(ConfigError, match="quantization: 'fp3' is none of int8, int8-dynamic") as caught:
        LLM(tiny_model_dir("llama"), quantization="fp3")
    assert caught.value.param == "quantization"


def test_it_is_short() -> None:
    assert len(Path(quantization.__file__).read_text(encoding="utf-8").splitlines()) < MAX_LINES

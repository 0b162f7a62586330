"""An engine with int8 weights generates what transformers does in float32 with the same weights, rounded and scaled."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from common.engine.client.inproc import InprocClient
from common.engine.config import EngineConfig, KernelChoice, ModelConfig
from common.engine.llm import LLM
from common.types import SamplingParams
from tests.architectures.models import model_dir
from tests.integration.handoff_rig import Handoffs, create_engine, generate
from tests.tiny_models import (
    TINY_MODELS,
    prompt_of,
    random_model,
    reference_generate,
    tiny_config,
    tiny_model_dir,
)

LENGTHS = (1, 3, 5, 11, 37, 90)
MAX_TOKENS = 6
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)


@pytest.fixture(scope="module", params=TINY_MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def expected(name: str, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    directory = tmp_path_factory.mktemp(name)
    save_rounded(tiny_model_dir(name), directory)
    return [reference_generate(directory, prompt_of(length), MAX_TOKENS) for length in LENGTHS]


def save_rounded(source: Path, directory: Path, *, kept: str = "none") -> None:
    """The model with the weights of its linear layers, but those of this name, rounded to 255 steps of each output."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and not name.endswith(kept):
            weight = module.weight.detach()
            step = weight.abs().max(dim=1, keepdim=True).values / 127
            module.weight = nn.Parameter((weight / step).round() * step)
    model.config.tie_word_embeddings = False  # embeddings are not rounded
    model.save_pretrained(directory)


@pytest.mark.parametrize("seed", range(3))
def test_activations_that_are_rounded_otherwise_cost_no_kernels(seed: int, tmp_path: Path) -> None:
    """A difference in the last bit, by the order of a sum, makes one of some activations another step of 255, and the
    next layer makes more of it: kernels that compute the same are not told by the last bits."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    random_model(tiny_config("LlamaConfig", **shape), seed=seed).save_pretrained(tmp_path)
    with LLM(tmp_path, quantization="int8-dynamic", dtype="float32", num_blocks=16) as llm:
        assert llm.spec.kernels == "fused"


@pytest.mark.parametrize("cpu_kernels", ["auto", pytest.param("reference", marks=pytest.mark.matrix)])
def test_tokens_are_those_of_the_rounded_weights(
    name: str, expected: list[list[int]], cpu_kernels: KernelChoice
) -> None:
    options = {"num_blocks": 128, "max_num_batched_tokens": 64, "num_threads": 1}
    prompts = [prompt_of(length) for length in LENGTHS]
    with LLM(tiny_model_dir(name), quantization="int8", cpu_kernels=cpu_kernels, **options) as llm:
        alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0].token_ids for prompt in prompts]
        llm.reset_prefix_cache()
        together = [each.token_ids for each in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert alone == together == expected


@pytest.mark.parametrize("model_type", ["mamba", "falcon_mamba", "jamba"])
def test_layers_whose_weights_the_models_own_code_reads_are_not_rounded(model_type: str, tmp_path: Path) -> None:
    save_rounded(model_dir(model_type), tmp_path, kept="dt_proj")
    prompts = [prompt_of(length) for length in LENGTHS]
    with LLM(model_dir(model_type), quantization="int8", num_blocks=128, max_num_batched_tokens=64) as llm:
        found = [each.token_ids for each in llm.generate(prompts, GREEDY, use_tqdm=False)]
    assert found == [reference_generate(tmp_path, prompt, MAX_TOKENS) for prompt in prompts]


def test_handed_over_equals_colocated(tmp_path: Path) -> None:
    model, prompts = tiny_model_dir("qwen3"), [prompt_of(length) for length in (20, 50, 100)]
    engines = [create_engine(model, tmp_path, quantization="int8") for _ in range(2)]
    handoffs = Handoffs(*engines)
    try:
        decoded = handoffs.run(prompts, GREEDY)
        assert all(each.received is not None and not each.received.recompute_reason for each in decoded)
        assert [each.token_ids for each in decoded] == generate(engines[1], prompts, GREEDY)
    finally:
        handoffs.close()


def test_blocks_of_other_weights_are_not_taken(tmp_path: Path) -> None:
    """Engines that differ in quantisation share a store, and neither finds what the other saved."""
    model, prompt = tiny_model_dir("qwen3"), prompt_of(100)
    fingerprints = []
    for quantization in ("int8", None, "int8"):
        with InprocClient(EngineConfig(model=ModelConfig(model=str(model), quantization=quantization))) as client:
            fingerprints.append(client.spec.fingerprint)
    assert fingerprints[0] == fingerprints[2] != fingerprints[1]
    handoffs = Handoffs(create_engine(model, tmp_path, quantization="int8"), create_engine(model, tmp_path))
    try:
        (decoded,) = handoffs.run([prompt], GREEDY)
        assert decoded.received is not None
        assert decoded.received.num_tokens == 0
    finally:
        handoffs.close()

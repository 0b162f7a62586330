"""Quantised checkpoints generate what transformers does in float32 with the numbers that their weights stand for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from common.engine.client.inproc import InprocClient
from common.engine.config import EngineConfig, KernelChoice, ModelConfig
from common.engine.llm import LLM
from common.engine.model.loader import load_model
from common.errors import ConfigError
from common.types import SamplingParams
from tests.dequantized import save_dequantized
from tests.integration.handoff_rig import Handoffs, create_engine, generate
from tests.tiny_models import prompt_of, reference_generate, tiny_model_dir
from tools.quantize_checkpoint import FORMATS, quantize_checkpoint

PROMPTS = [prompt_of(length) for length in (1, 3, 11, 37, 90)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
GROUP = 16


@pytest.fixture(scope="module", params=FORMATS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(
    scope="module", params=["llama", *(pytest.param(each, marks=pytest.mark.matrix) for each in ("mixtral", "gemma2"))]
)
def quantized(name: str, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(name)
    quantize_checkpoint(tiny_model_dir(request.param), directory, name, GROUP)
    return directory


@pytest.fixture(scope="module")
def expected(quantized: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    dequantized = save_dequantized(quantized, tmp_path_factory.mktemp("dequantized"))
    return [reference_generate(dequantized, prompt, GREEDY.max_tokens or 0) for prompt in PROMPTS]


@pytest.mark.parametrize("cpu_kernels", ["auto", pytest.param("reference", marks=pytest.mark.matrix)])
def test_tokens_are_those_of_the_dequantised_weights(
    quantized: Path, expected: list[list[int]], cpu_kernels: KernelChoice
) -> None:
    options = {"num_blocks": 128, "max_num_batched_tokens": 64, "num_threads": 1}
    with LLM(quantized, device="cpu", cpu_kernels=cpu_kernels, **options) as llm:
        assert not llm.spec.kernels_failed
        alone = [llm.generate([prompt], GREEDY, use_tqdm=False)[0].token_ids for prompt in PROMPTS]
        llm.reset_prefix_cache()
        together = [each.token_ids for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert alone == together == expected


def test_handed_over_equals_colocated(tmp_path: Path) -> None:
    quantize_checkpoint(tiny_model_dir("qwen3"), tmp_path / "model", "awq", GROUP)
    engines = [create_engine(tmp_path / "model", tmp_path / "kv") for _ in range(2)]
    handoffs = Handoffs(*engines)
    try:
        decoded = handoffs.run(PROMPTS[2:], GREEDY)
        assert all(each.received is not None and not each.received.recompute_reason for each in decoded)
        assert [each.token_ids for each in decoded] == generate(engines[1], PROMPTS[2:], GREEDY)
    finally:
        handoffs.close()


def test_engines_of_other_formats_are_told_apart(tmp_path: Path) -> None:
    fingerprints = []
    for name in ("awq", "gptq", "gptq-zeros", None):
        directory = tiny_model_dir("llama")
        if name is not None:
            directory = tmp_path / name
            quantize_checkpoint(tiny_model_dir("llama"), directory, name, GROUP)
        with InprocClient(EngineConfig(model=ModelConfig(model=str(directory), device="cpu"))) as client:
            fingerprints.append(client.spec.fingerprint)
    assert len(set(fingerprints)) == len(fingerprints)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_layers_of_a_known_model_are_fused(tmp_path: Path, dtype: str) -> None:
    quantize_checkpoint(tiny_model_dir("llama"), tmp_path, "gptq-act-order", GROUP)
    loaded = load_model(ModelConfig(model=str(tmp_path), device="cpu", dtype=dtype))  # type: ignore[arg-type]
    assert loaded.kernels == "fused"


def test_layers_that_are_left_as_they_are_need_no_mention(tmp_path: Path) -> None:
    """What is quantised is seen from the tensors: some layers of a mixture, others plain, fit side by side."""
    quantize_checkpoint(tiny_model_dir("llama"), tmp_path / "quantized", "awq", GROUP)
    path = tmp_path / "quantized" / "model.safetensors"
    plain = load_file(tiny_model_dir("llama") / "model.safetensors")
    layer = "model.layers.1.self_attn.q_proj"
    tensors = {name: tensor for name, tensor in load_file(path).items() if not name.startswith(layer)}
    save_file(tensors | {f"{layer}.weight": plain[f"{layer}.weight"]}, path)
    dequantized = save_dequantized(tmp_path / "quantized", tmp_path / "dequantized")
    with LLM(tmp_path / "quantized", device="cpu", num_blocks=64, num_threads=1) as llm:
        assert not llm.spec.kernels_failed
        found = llm.generate(PROMPTS[:3], GREEDY, use_tqdm=False)
    assert [each.token_ids for each in found] == [reference_generate(dequantized, each, 6) for each in PROMPTS[:3]]


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("compressed-w4a16", {"format": "nvfp4-pack-quantized"}, "is in the form 'nvfp4-pack-quantized'"),
        (
            "compressed-w4a16",
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "is in the form 'sparse-24-bitmask'",
        ),
        (
            "compressed-w4a16",
            {"config_groups": {"a": {"weights": {"num_bits": 2}}}},
            "has weights of 2 bits and type int",
        ),
        ("fp8-block", {"fmt": "e5m2"}, "has numbers of kind 'e5m2'"),
        ("fp8-block", {"weight_block_size": [32, 32]}, r"its scales are \[\d+, \d+\], for blocks of \[32, 32\]"),
        ("awq", {"version": "gemv"}, "is in the form 'gemv'"),
        ("gptq", {"bits": 3}, "has weights of 3 bits"),
        ("gptq", {"bits": "4"}, "bits in config.json is not int"),
        ("gptq", {"checkpoint_format": "marlin"}, "is in the form 'marlin'"),
        ("gptq", {"dynamic": {"+:.*down.*": {"bits": 8}}}, "has weights of other bits for"),
        ("gptq", {"quant_method": "fp3"}, "by 'fp3', which is none of gptq, awq, fp8, compressed-tensors"),
        ("gptq", {"bits": 8}, r"model.layers.\d.\w+.\w+.weight: .*its qweight is"),
    ],
)
def test_what_is_refused_is_one_line(tmp_path: Path, name: str, changes: dict[str, object], problem: str) -> None:
    quantize_checkpoint(tiny_model_dir("llama"), tmp_path, name, GROUP)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=problem) as caught:
        load_model(ModelConfig(model=str(tmp_path), device="cpu"))
    assert "\n" not in caught.value.message
    assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("model", "kernels"), [("llama", "fused"), pytest.param("gemma2", "attention", marks=pytest.mark.matrix)]
)
def test_triton_kernels_take_the_layers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, kernels: str
) -> None:
    """In Triton's interpreter; at the start they are compared with torch."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    quantize_checkpoint(tiny_model_dir(model), tmp_path, "awq", GROUP)
    loaded = load_model(ModelConfig(model=str(tmp_path), dtype="float32"))
    assert (loaded.kernels, loaded.kernels_failed) == (kernels, False)


@pytest.mark.matrix
def test_stages_have_their_layers(tmp_path: Path) -> None:
    quantize_checkpoint(tiny_model_dir("llama"), tmp_path / "quantized", "awq", GROUP)
    dequantized = save_dequantized(tmp_path / "quantized", tmp_path / "dequantized")
    options = {"num_blocks": 64, "num_threads": 1, "dtype": "float32"}
    with LLM(tmp_path / "quantized", device="cpu", pipeline_parallel_size=2, **options) as llm:
        found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [each.token_ids for each in found] == [reference_generate(dequantized, each, 6) for each in PROMPTS]

"""Checkpoints whose shapes are easily taken for others, and parts of them that nothing reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.engine.config import ModelConfig
from common.engine.model.fingerprint import fingerprint_model
from common.engine.model.loader import load_model
from common.engine.quantization.checkpoints.compressed_tensors import CompressedTensors
from common.engine.quantization.checkpoints.fp8 import FP8
from common.engine.quantization.checkpoints.gptq import GPTQ
from common.errors import ConfigError, ModelLoadError
from tests.tiny_models import tiny_model_dir
from tools.gguf_writer import write_gguf

BLOCK = 16


@pytest.mark.parametrize("num_inputs", [64, BLOCK * BLOCK])  # with which there are as many scales as outputs
def test_scales_of_blocks_are_known_by_their_shape(num_inputs: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(48, num_inputs, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.rand(48 // BLOCK, num_inputs // BLOCK, generator=generator) + 0.5
    layer = FP8({"weight_block_size": [BLOCK, BLOCK]}).linear(
        {"weight": weight, "weight_scale_inv": scale}, weight.shape, torch.float32
    )
    expected = weight.float() * scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    torch.testing.assert_close(layer.dequantized(), expected)


def test_words_that_inputs_do_not_fill_are_refused() -> None:
    words = torch.zeros(13, 32, dtype=torch.int32)
    with pytest.raises(ModelLoadError, match="98 inputs"):
        GPTQ({"bits": 4}).linear({"qweight": words}, torch.Size([32, 98]), torch.float32)


def test_transforms_are_refused() -> None:
    with pytest.raises(ConfigError, match="transform_config"):
        CompressedTensors({"transform_config": {"config_groups": {"R1": {}}}})


def changed(directory: Path, changes: dict[str, torch.Tensor], **settings: object) -> Path:
    """A tiny model with other tensors and settings."""
    source = tiny_model_dir("llama")
    directory.mkdir()
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | settings))
    save_file(load_file(source / "model.safetensors") | changes, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("tensor", ["model.layers.1.input_layernorm.weight", "model.layers.2.mlp.up_proj.weight"])
def test_a_gguf_file_with_one_tensor_changed_is_another_model(tensor: str, tmp_path: Path) -> None:
    own = load_file(tiny_model_dir("llama") / "model.safetensors")[tensor]
    found = set()
    for number, changes in enumerate([{}, {tensor: own + 1}]):
        source = changed(tmp_path / str(number), changes)
        write_gguf(source, tmp_path / f"{number}.gguf", "Q8_0")
        path = (tmp_path / f"{number}.gguf").rename(tmp_path / "model.gguf")
        found.add(fingerprint_model([path], {}, dtype="float32", kv_dtype="float32"))
    assert len(found) == 2


def test_a_quantization_config_that_is_no_object_is_named(tmp_path: Path) -> None:
    directory = changed(tmp_path / "model", {}, quantization_config="awq")
    with pytest.raises(ConfigError, match=r"^--model: quantization_config in config.json is not an object: 'awq'$"):
        load_model(ModelConfig(model=str(directory)))


@pytest.mark.parametrize(
    ("tensor", "settings"),
    [
        ("model.layers.0.mlp.act.scales", {"quant_method": "awq", "bits": 4, "group_size": 16}),
        ("model.layers.0.mlp.down_proj.weight", {"quant_method": "fp8"}),
    ],
)
def test_what_nothing_reads_is_refused(tensor: str, settings: dict[str, object], tmp_path: Path) -> None:
    """Scales of activations, and numbers of 8 bits without a scale."""
    numbers = torch.zeros(48, 96).to(torch.float8_e4m3fn) if tensor.endswith("weight") else torch.ones(96)
    directory = changed(tmp_path / "model", {tensor: numbers}, quantization_config=settings)
    with pytest.raises(ConfigError, match=tensor):
        load_model(ModelConfig(model=str(directory)))

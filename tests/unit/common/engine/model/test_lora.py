"""Adapters in PEFT's format: what is read, what is refused."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from common.engine.devices.adapters import AdapterBatch
from common.engine.devices.torch.adapters import TorchLayerAdapters
from common.engine.model.lora import LoraAdapter, Target, read_lora
from common.errors import InvalidRequestError

LAYER = TorchLayerAdapters(AdapterBatch(1, torch.device("cpu")), 6, [4])
TARGETS = {f"model.layers.{layer}.q_proj": Target(LAYER, 0, 1, 6, 4) for layer in (0, 1)}
PREFIX = "base_model.model.model.layers.0.q_proj"


def tensors(rank: int = 2, prefix: str = PREFIX) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"{prefix}.lora_A.weight": torch.randn(rank, 6, generator=generator),
        f"{prefix}.lora_B.weight": torch.randn(4, rank, generator=generator),
    }


def write(directory: Path, weights: Mapping[str, torch.Tensor], **config: object) -> Path:
    directory.mkdir(exist_ok=True)
    save_file(dict(weights), directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 4, **config}))
    return directory


def read(directory: Path) -> LoraAdapter:
    return read_lora(directory, TARGETS, max_rank=8, dtype=torch.float32)


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 1}}, 0.5),
        ({"alpha_pattern": {"k_proj": 1}}, 2.0),
        ({"alpha_pattern": {"^model.layers.0.q_proj": 1}}, 0.5),
        ({"alpha_pattern": {"^q_proj": 1}}, 2.0),
        ({"alpha_pattern": {r"layers\.0\.q_proj": 1}}, 0.5),
    ],
)
def test_scale(config: dict[str, object], scale: float, tmp_path: Path) -> None:
    weights = tensors()
    (pair,) = read(write(tmp_path / "a", weights, **config)).pairs.values()
    torch.testing.assert_close(pair.b, weights[f"{PREFIX}.lora_B.weight"] * scale)
    torch.testing.assert_close(pair.a, weights[f"{PREFIX}.lora_A.weight"])


def test_the_digest_is_of_what_is_computed(tmp_path: Path) -> None:
    first = read(write(tmp_path / "a", tensors(), base_model_name_or_path="one")).facts
    assert read(write(tmp_path / "b", tensors(), base_model_name_or_path="another")).facts.digest == first.digest
    assert (first.rank, first.num_bytes, first.base_model) == (2, 4 * 20, "one")
    other = {name: tensor.clone() for name, tensor in tensors().items()}
    other[f"{PREFIX}.lora_B.weight"][3, 1] += 1e-3
    others = [
        write(tmp_path / "c", tensors(), lora_alpha=5),
        write(tmp_path / "d", other),
        write(tmp_path / "e", {name: tensor.half() for name, tensor in tensors().items()}),
        write(tmp_path / "f", tensors(prefix=PREFIX.replace("0", "1"))),
    ]
    digests = {read(each).facts.digest for each in others}
    assert len(digests | {first.digest}) == 5


@pytest.mark.parametrize(
    ("weights", "config", "problem"),
    [
        (tensors(prefix="base_model.model.model.layers.7.q_proj"), {}, "no layer 'model.layers.7.q_proj'"),
        (tensors(prefix="base_model.model.lm_head"), {}, "no layer 'lm_head'"),
        (tensors(rank=9), {}, "rank 9 .* above max_lora_rank 8"),
        (tensors() | {f"{PREFIX}.lora_A.weight": torch.zeros(2, 5)}, {}, "6 inputs and 4 outputs.*another model"),
        (tensors() | {f"{PREFIX}.lora_B.weight": torch.zeros(5, 2)}, {}, "another model"),
        (tensors() | {f"{PREFIX}.lora_B.weight": torch.full((4, 2), torch.nan)}, {}, "not finite"),
        (tensors() | {f"{PREFIX}.lora_B.weight": torch.zeros(4, 2, dtype=torch.int8)}, {}, "int8"),
        ({f"{PREFIX}.lora_A.weight": torch.zeros(2, 6)}, {}, "one matrix of two"),
        (tensors() | {f"{PREFIX}.lora_magnitude_vector": torch.zeros(4)}, {}, "lora_magnitude_vector"),
        ({}, {}, "empty"),
        (tensors(), {"peft_type": "IA3"}, "peft_type is 'IA3'"),
        (tensors(), {"use_dora": True}, "use_dora is True"),
        (tensors(), {"bias": "all"}, "bias is 'all'"),
        (tensors(), {"modules_to_save": ["lm_head"]}, "modules_to_save"),
        (tensors(), {"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        (tensors(), {"lora_alpha": "x"}, "lora_alpha is 'x'"),
        (tensors(), {"alpha_pattern": {"(a+)+$": 1}}, "alpha_pattern"),
    ],
)
def test_what_cannot_be_used_is_named(
    weights: dict[str, torch.Tensor], config: dict[str, object], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidRequestError, match=problem) as raised:
        read(write(tmp_path / "a", weights, **config))
    assert raised.value.param == "lora_path"


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({}, "no adapter_config.json"),
        ({"adapter_config.json": b"{"}, "cannot be read"),
        ({"adapter_config.json": b"[" * 100_000}, "cannot be read"),
        ({"adapter_config.json": b"[]"}, "not a JSON object"),
        ({"adapter_config.json": b"{}"}, "no adapter_model.safetensors"),
        ({"adapter_config.json": b"{}", "adapter_model.bin": b""}, "adapter_model.bin is not read"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b"\x80\x04pickle"}, "not a safetensors file"),
    ],
)
def test_files_that_are_no_adapter(files: dict[str, bytes], problem: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidRequestError, match=problem):
        read(tmp_path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "adapter_config.json")
    with pytest.raises(InvalidRequestError, match=r"no adapter_config\.json"):
        read(tmp_path)

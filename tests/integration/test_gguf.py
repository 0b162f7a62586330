"""GGUF files generate what transformers does in float32 with the numbers that their weights stand for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedConfig
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from common.engine.config import ModelConfig
from common.engine.llm import LLM
from common.engine.model.loader import load_model
from common.engine.quantization.checkpoints.gguf import GGUFFile
from common.errors import ConfigError
from common.types import SamplingParams
from tests.tiny_models import prompt_of, random_model, reference_generate, tiny_config
from tools.gguf_writer import TYPES, write_gguf
from tools.quantize_checkpoint import quantize_checkpoint

PROMPTS = [prompt_of(length) for length in (1, 3, 37, 90)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


def config_of(name: str) -> PreTrainedConfig:
    return tiny_config(name, hidden_size=256, intermediate_size=256, num_hidden_layers=2, head_dim=64)


@pytest.fixture(scope="module", params=["LlamaConfig", pytest.param("Qwen3Config", marks=pytest.mark.matrix)])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    random_model(config_of(request.param)).save_pretrained(directory)
    return directory


def in_gguf(source: Path, directory: Path, name: str) -> Path:
    quantize_checkpoint(source, directory, f"gguf-{name.lower()}")
    return directory


def dequantized(quantized: Path, directory: Path) -> Path:
    """The same with weights in float32, each computed by llama.cpp's loops."""
    directory.mkdir()
    shutil.copy(quantized / "config.json", directory)
    file = GGUFFile(next(quantized.glob("*.gguf")))
    tensors = {}
    for name in sorted(file.keys()):
        layer, _, kind = name.rpartition(".")
        if kind in LOOPS:
            size, loop = LOOPS[kind]
            raw = file.get_tensor(name).numpy()
            blocks = [[loop(row[k : k + size].tobytes()) for k in range(0, len(row), size)] for row in raw]
            tensors[f"{layer}.weight"] = torch.tensor(np.array(blocks, np.float32)).flatten(1)
        else:
            tensors[name] = file.get_tensor(name)
    save_file(tensors, directory / "model.safetensors")
    return directory


def half(raw: bytes) -> np.float32:
    return np.float32(np.frombuffer(raw, np.float16)[0])


def q8_0(raw: bytes) -> list[np.float32]:
    return [half(raw[:2]) * np.float32(code) for code in np.frombuffer(raw[2:], np.int8)]


def q4_0(raw: bytes) -> list[np.float32]:
    codes = [byte & 15 for byte in raw[2:]] + [byte >> 4 for byte in raw[2:]]
    return [half(raw[:2]) * np.float32(code - 8) for code in codes]


def q4_k(raw: bytes) -> list[np.float32]:
    scale, minimum, packed, codes = half(raw[:2]), half(raw[2:4]), raw[4:16], raw[16:]
    found = []
    for j in range(8):
        if j < 4:
            factor, lowest = packed[j] & 63, packed[j + 4] & 63
        else:
            factor = packed[j + 4] & 15 | packed[j - 4] >> 6 << 4
            lowest = packed[j + 4] >> 4 | packed[j] >> 6 << 4
        for i in range(32):
            code = codes[j // 2 * 32 + i] >> j % 2 * 4 & 15
            found.append(scale * np.float32(factor) * np.float32(code) - minimum * np.float32(lowest))
    return found


def q6_k(raw: bytes) -> list[np.float32]:
    low, high, factors = raw[:128], raw[128:192], np.frombuffer(raw[192:208], np.int8)
    found = [np.float32(0)] * 256
    for n in range(2):
        for i in range(32):
            for quarter in range(4):
                bits = low[64 * n + i + quarter % 2 * 32] >> quarter // 2 * 4 & 15
                code = (bits | (high[32 * n + i] >> 2 * quarter & 3) << 4) - 32
                factor = factors[8 * n + i // 16 + 2 * quarter]
                found[128 * n + 32 * quarter + i] = half(raw[208:]) * np.float32(factor) * np.float32(code)
    return found


LOOPS: dict[str, tuple[int, Callable[[bytes], list[np.float32]]]] = {
    "Q8_0": (34, q8_0),
    "Q4_0": (18, q4_0),
    "Q4_K": (144, q4_k),
    "Q6_K": (210, q6_k),
}


@pytest.mark.parametrize("name", TYPES)
def test_tokens_are_those_of_the_dequantised_weights(source: Path, tmp_path: Path, name: str) -> None:
    quantized = in_gguf(source, tmp_path / "quantized", name)
    expected = dequantized(quantized, tmp_path / "dequantized")
    with LLM(quantized, device="cpu", num_blocks=128, num_threads=1) as llm:
        assert not llm.spec.kernels_failed
        found = [each.token_ids for each in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
    assert found == [reference_generate(expected, prompt, 6) for prompt in PROMPTS]


def test_numbers_are_near_those_of_the_source(source: Path, tmp_path: Path) -> None:
    """Names and the order of rows are right."""
    quantized = in_gguf(source, tmp_path / "quantized", "Q8_0")
    found = load_file(dequantized(quantized, tmp_path / "dequantized") / "model.safetensors")
    plain = load_file(source / "model.safetensors")
    assert found.keys() == plain.keys()
    for name, tensor in plain.items():
        torch.testing.assert_close(found[name], tensor, atol=float(tensor.abs().max()) / 100, rtol=0)


def test_rows_of_heads_are_ordered_as_transformers_orders_them(tmp_path: Path) -> None:
    random_model(config_of("LlamaConfig")).save_pretrained(tmp_path)
    write_gguf(tmp_path, tmp_path / "model.gguf", "Q4_K")
    file = GGUFFile(tmp_path / "model.gguf")
    name = "model.layers.1.self_attn.k_proj.Q4_K"
    theirs = LlamaTensorProcessor()._reverse_permute_weights
    file._architecture = "none, so that rows are as they lie"
    lying = file.get_tensor(name)
    file._architecture = "llama"
    assert np.array_equal(file.get_tensor(name).numpy(), theirs(lying.numpy(), 4, 2))


@pytest.mark.parametrize(
    ("start", "raw", "problem"),
    [
        (0, b"GGML", "does not begin as a GGUF file does"),
        (4, b"\x09", "GGUF version 9 is none of"),
        (8, b"\xff" * 8, "ends within its header"),
        (60, b"gemma", "is of architecture gemma"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(tmp_path: Path, start: int, raw: bytes, problem: str) -> None:
    random_model(config_of("LlamaConfig")).save_pretrained(tmp_path / "source")
    directory = in_gguf(tmp_path / "source", tmp_path / "quantized", "Q8_0")
    path = directory / "model.gguf"
    content = bytearray(path.read_bytes())
    start = content.index(b"llama", 40) if raw == b"gemma" else start
    content[start : start + len(raw)] = raw
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=problem) as caught:
        load_model(ModelConfig(model=str(directory), device="cpu"))
    assert "\n" not in caught.value.message


def test_a_file_that_ends_early_is_refused(source: Path, tmp_path: Path) -> None:
    directory = in_gguf(source, tmp_path / "quantized", "Q8_0")
    path = directory / "model.gguf"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ConfigError, match="the file ends before"):
        load_model(ModelConfig(model=str(directory), device="cpu"))


def test_weights_are_not_rounded_twice(source: Path, tmp_path: Path) -> None:
    directory = in_gguf(source, tmp_path / "quantized", "Q8_0")
    with pytest.raises(ConfigError, match="--quantization: int8 is for float weights"):
        load_model(ModelConfig(model=str(directory), device="cpu", quantization="int8"))

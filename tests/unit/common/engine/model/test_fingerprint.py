import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.engine.model.fingerprint import CHUNK_BYTES, NUM_CHUNKS, fingerprint_model
from tests.tiny_models import tiny_model_dir

CONFIG = {"model_type": "llama", "rope_theta": 10000.0}
FLOAT32 = {"dtype": "float32", "kv_dtype": "float32"}


@pytest.fixture
def weights(tmp_path):
    return shutil.copy(tiny_model_dir("llama") / "model.safetensors", tmp_path / "model.safetensors")


def test_is_independent_of_path_and_cosmetics(weights):
    expected = fingerprint_model([tiny_model_dir("llama") / "model.safetensors"], CONFIG, **FLOAT32)
    cosmetics = {"_name_or_path": "/somewhere", "transformers_version": "9.9", "dtype": "float32"}
    assert fingerprint_model([weights], {**cosmetics, **CONFIG}, **FLOAT32) == expected
    assert len(expected) == 32


def test_depends_on_all_that_changes_kv(weights, tmp_path):
    variants = [
        {},
        {"config": {**CONFIG, "rope_theta": 20000.0}},
        {"dtype": "bfloat16"},
        {"kv_dtype": "bfloat16"},
        {"rounding": "16 lanes"},
        {"quantization": "int8"},
    ]
    fingerprints = {fingerprint_model([weights], **{"config": CONFIG, **FLOAT32, **variant}) for variant in variants}
    tensors = load_file(weights)
    for tensor in tensors.values():
        tensor += 0.01  # as fine-tuning does
    save_file(tensors, tmp_path / "tuned.safetensors")
    fingerprints.add(fingerprint_model([tmp_path / "tuned.safetensors"], CONFIG, **FLOAT32))
    assert len(fingerprints) == len(variants) + 1


def test_reads_little_of_a_large_file(tmp_path):
    large = tmp_path / "large.safetensors"
    with large.open("wb") as file:
        file.write((2).to_bytes(8, "little") + b"{}")
        file.truncate(1 << 30)
    read = 0
    real_open = type(large).open

    class Counting:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def read(self, size):
            nonlocal read
            read += size
            return self.file.read(size)

        def seek(self, offset):
            self.file.seek(offset)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(large), "open", lambda path, mode: Counting(real_open(path, mode)))
        fingerprint_model([large], CONFIG, **FLOAT32)
    assert 0 < read <= (NUM_CHUNKS + 2) * CHUNK_BYTES + 8


def test_depends_on_each_tensor(tmp_path):
    """Also on a small one in a file so large that the evenly spaced chunks miss it."""
    tensors = {f"{number:02}": torch.zeros(1 << 17) for number in range(20)}  # 10 MiB: a chunk every 40 KiB
    tensors |= {f"norm.{number}": torch.zeros(64) for number in range(20)}
    fingerprints = set()
    for name in [None, "norm.3", "norm.17", "05"]:
        changed = tensors if name is None else {**tensors, name: tensors[name] + 1}
        save_file(changed, tmp_path / "model.safetensors")
        fingerprints.add(fingerprint_model([tmp_path / "model.safetensors"], CONFIG, **FLOAT32))
    assert len(fingerprints) == 4


@pytest.mark.parametrize("header", [b"{", b"[1]", b'{"a": 1}', b'{"a": {"data_offsets": [5, "x"]}}', b'{"a": null}'])
def test_a_header_that_is_none_is_left_to_the_loader(header, tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    fingerprint_model([path], CONFIG, **FLOAT32)

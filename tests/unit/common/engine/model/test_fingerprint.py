import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from common.engine.devices.attention import KVSpec
from common.engine.model.fingerprint import CHUNK_BYTES, NUM_CHUNKS, fingerprint_model
from tests.tiny_models import tiny_model_dir

CONFIG = {"model_type": "llama", "rope_theta": 10000.0}
SPEC = KVSpec(3, 2, 12, 12, torch.float32)


@pytest.fixture
def weights(tmp_path):
    return shutil.copy(tiny_model_dir("llama") / "model.safetensors", tmp_path / "model.safetensors")


def test_is_independent_of_path_and_cosmetics(weights):
    expected = fingerprint_model([tiny_model_dir("llama") / "model.safetensors"], CONFIG, SPEC)
    cosmetics = {"_name_or_path": "/somewhere", "transformers_version": "9.9", "dtype": "float32"}
    assert fingerprint_model([weights], {**cosmetics, **CONFIG}, SPEC) == expected
    assert len(expected) == 32


def test_depends_on_all_that_changes_kv(weights, tmp_path):
    variants = [
        (CONFIG, SPEC),
        ({**CONFIG, "rope_theta": 20000.0}, SPEC),
        (CONFIG, KVSpec(3, 2, 12, 12, torch.bfloat16)),
        (CONFIG, KVSpec(3, 2, 12, 8, torch.float32)),
        (CONFIG, KVSpec(4, 2, 12, 12, torch.float32)),
        (CONFIG, KVSpec(3, 4, 12, 12, torch.float32)),
    ]
    fingerprints = {fingerprint_model([weights], *variant) for variant in variants}
    fingerprints.add(fingerprint_model([weights], CONFIG, SPEC, rounding="16 lanes"))
    fingerprints.add(fingerprint_model([weights], CONFIG, SPEC, quantization="int8"))
    tensors = load_file(weights)
    for tensor in tensors.values():
        tensor += 0.01  # as fine-tuning does
    save_file(tensors, tmp_path / "tuned.safetensors")
    fingerprints.add(fingerprint_model([tmp_path / "tuned.safetensors"], CONFIG, SPEC))
    assert len(fingerprints) == len(variants) + 3


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
        fingerprint_model([large], CONFIG, SPEC)
    assert 0 < read <= (NUM_CHUNKS + 2) * CHUNK_BYTES + 8

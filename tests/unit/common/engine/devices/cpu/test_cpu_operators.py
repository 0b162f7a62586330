import pytest
import torch

from common.engine.config import ModelConfig
from common.engine.devices.cpu.operators import CpuOperators
from common.engine.model.loader import load_model
from tests.tiny_models import tiny_model_dir


@pytest.mark.parametrize("num_tokens", [1, 512, 768, 769, 1280, 1281, 2048, 5000])
def test_steps_are_cut_into_parts_of_like_size(num_tokens):
    parts = CpuOperators().split(num_tokens)
    assert sum(parts) == num_tokens
    assert all(part == 512 for part in parts[:-1])
    assert len(parts) == 1 or 256 < parts[-1] <= 768


def test_a_step_in_parts_computes_the_same(monkeypatch):
    loaded = load_model(ModelConfig(model=str(tiny_model_dir("qwen3"))))
    assert loaded.decoder is not None
    token_ids = torch.arange(16)
    whole = loaded.decoder.probe(token_ids, loaded.kv_spec)
    monkeypatch.setattr(
        CpuOperators, "split", lambda self, num_tokens: [3, num_tokens - 3] if num_tokens > 4 else [num_tokens]
    )
    torch.testing.assert_close(loaded.decoder.probe(token_ids, loaded.kv_spec), whole, atol=1e-5, rtol=1e-5)

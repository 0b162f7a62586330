import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from common.engine.devices.cpu.fused_norm import FusedRMSNorm, fuse_norms


class OddRMSNorm(Qwen3RMSNorm):
    """Named like an RMS norm, but is none."""

    def forward(self, hidden_states):
        return super().forward(hidden_states) + 0.5


@pytest.mark.parametrize("norm_class", [Qwen3RMSNorm, Gemma2RMSNorm])
def test_computes_the_same(norm_class):
    torch.manual_seed(0)
    norm = norm_class(64, eps=1e-5)
    nn.init.normal_(norm.weight)
    model = nn.Sequential(norm)
    assert fuse_norms(model) == 1
    assert isinstance(model[0], FusedRMSNorm)
    for scale in (0.0, 1e-3, 1.0, 1e3):
        inputs = scale * torch.randn(1, 5, 2, 64)
        torch.testing.assert_close(model(inputs), norm(inputs), atol=1e-5, rtol=1e-5)


def test_what_is_no_rms_norm_stays():
    model = nn.Sequential(OddRMSNorm(8), nn.LayerNorm(8), Qwen3RMSNorm(8).bfloat16(), nn.Linear(8, 8))
    assert fuse_norms(model) == 0

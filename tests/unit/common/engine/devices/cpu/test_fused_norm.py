import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from common.engine.devices.cpu.fused_norm import CompiledRMSNorm, FusedRMSNorm, fuse_norms


class OddRMSNorm(Qwen3RMSNorm):
    """Named like an RMS norm, but is none."""

    def forward(self, hidden_states):
        return super().forward(hidden_states) + 0.5


@pytest.mark.parametrize("norm_class", [Qwen3RMSNorm, Gemma2RMSNorm])
@pytest.mark.parametrize(
    ("has_kernels", "dtype"), [(False, torch.float32), (True, torch.float32), (True, torch.bfloat16)]
)
def test_computes_the_same(norm_class, has_kernels, dtype):
    torch.manual_seed(0)
    norm = norm_class(64, eps=1e-5)
    nn.init.normal_(norm.weight)
    model = nn.Sequential(norm.to(dtype))
    assert fuse_norms(model, has_kernels=has_kernels) == 1
    assert isinstance(model[0], CompiledRMSNorm if has_kernels else FusedRMSNorm)
    assert model[0].weight.dtype == dtype, "as modelling code may ask"
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for scale in (0.0, 1e-3, 1.0, 1e3):
        for inputs in (torch.randn(1, 50, 2, 64), torch.randn(3, 128)[:, 64:], torch.randn(0, 64)):
            inputs = (scale * inputs).to(dtype)
            found = model(inputs)
            assert found.dtype == dtype
            torch.testing.assert_close(found, norm(inputs), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("has_kernels", [True, False])
def test_what_is_no_rms_norm_stays(has_kernels):
    model = nn.Sequential(OddRMSNorm(8), nn.LayerNorm(8), Qwen3RMSNorm(8).half(), nn.Linear(8, 8))
    assert fuse_norms(model, has_kernels=has_kernels) == 0


def test_without_kernels_only_float32_is_faster():
    assert fuse_norms(nn.Sequential(Qwen3RMSNorm(8).bfloat16()), has_kernels=False) == 0

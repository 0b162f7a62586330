"""Linear layers with weights in groups by the Triton kernel, in its interpreter and on a GPU where there is one."""

import pytest
import torch

from tests.unit.common.engine.quantization.test_grouped import KINDS, error, make_layer

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch, request):
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "sizes"), [(torch.float32, (96, 70, 16)), (torch.bfloat16, (80, 48, 16))])
def test_computes_the_same(kind, dtype, sizes, device, monkeypatch):
    from common.engine.devices.gpu import operators
    from common.engine.devices.gpu.operators import TritonGroupedLinear

    monkeypatch.setattr(operators, "_MAX_WIDENED", 20 * sizes[0])  # not all at once
    layer = make_layer(kind, *sizes, dtype=dtype, order=dtype == torch.float32).to(device)
    inputs = torch.randn(150, sizes[0], generator=torch.Generator().manual_seed(1)).to(device, dtype)
    expected, limit = layer(inputs), 1e-5 if dtype == torch.float32 else 0.01
    kernels, invariant = TritonGroupedLinear(layer), TritonGroupedLinear(layer, batch_invariant=True)
    whole = invariant(inputs)
    for num_rows in (0, 1, 37, 150):
        found = kernels(inputs[:num_rows])
        assert found.shape == (num_rows, sizes[1])
        assert num_rows == 0 or error(found, expected[:num_rows]) < limit
        assert torch.equal(invariant(inputs[:num_rows]), whole[:num_rows])
    assert error(kernels(inputs[:6].view(2, 3, -1)), expected[:6].view(2, 3, -1)) < limit

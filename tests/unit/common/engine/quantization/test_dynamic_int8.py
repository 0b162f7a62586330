"""Layers with int8 weights and activations: what they compute, and their CPU kernels."""

import pytest
import torch
from torch import nn

from common.engine.devices.cpu import quantized_linear
from common.engine.devices.cpu.kernels.dynamic_int8_linear import multiplies_int8
from common.engine.devices.cpu.quantized_linear import compiled
from common.engine.devices.cpu.streamed_dynamic_int8_linear import RoundedInputsLinear, StreamedDynamicInt8Linear
from common.engine.quantization.dynamic_int8 import DynamicInt8Linear

NEEDS_VNNI = pytest.mark.skipif(not multiplies_int8(), reason="the processor has no instructions for it")


def make_layer(in_features=96, out_features=70, dtype=torch.float32):
    torch.manual_seed(0)
    return DynamicInt8Linear.of(nn.Linear(in_features, out_features, dtype=dtype).requires_grad_(requires_grad=False))


def test_inputs_are_rounded_to_steps_of_their_token():
    layer = make_layer()
    inputs = torch.randn(5, 96) * torch.tensor([1e-3, 1.0, 1e3, 0.0, 7.0])[:, None]
    steps = inputs.abs().amax(1, keepdim=True) / 127
    rounded = (inputs / steps.clamp(min=1e-9)).round() * steps
    expected = nn.functional.linear(rounded, layer.integers * layer.scale[:, None], layer.bias)
    torch.testing.assert_close(layer(inputs), expected, atol=1e-3, rtol=1e-5)
    assert torch.equal(layer(inputs)[3], layer.bias)


@NEEDS_VNNI
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64, 48), (96, 70), (2048, 32)])
def test_kernels_compute_the_same_and_each_row_whatever_is_beside_it(sizes, dtype):
    layer = make_layer(*sizes, dtype)
    kernels, inputs = compiled(layer), torch.randn(1100, sizes[0]).to(dtype)
    assert isinstance(kernels, StreamedDynamicInt8Linear)
    inputs[3] = 0
    inputs[7] *= 1e4
    whole = kernels(inputs)
    torch.testing.assert_close(whole, layer(inputs), atol=1e-6, rtol=1e-5 if dtype == torch.float32 else 2**-7)
    for num_rows in (0, 1, 2, 5, 64, 65, 200):
        assert torch.equal(kernels(inputs[:num_rows]), whole[:num_rows])
    assert torch.equal(kernels(inputs[:6].view(2, 3, -1)), whole[:6].view(2, 3, -1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_processors_without_the_instructions_round_as_well(dtype, monkeypatch):
    monkeypatch.setattr(quantized_linear, "can_round", lambda layer: False)
    layer, inputs = make_layer(dtype=dtype), torch.randn(100, 96).to(dtype)
    kernels = compiled(layer)
    assert isinstance(kernels, RoundedInputsLinear)
    tolerance = 1e-4 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(kernels(inputs), layer(inputs), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("can_round", [pytest.param(True, marks=NEEDS_VNNI), False])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_that_is_not_finite_gives_nothing_finite_and_leaves_others_alone(dtype, value, can_round, monkeypatch):
    layer, inputs = make_layer(dtype=dtype), torch.randn(70, 96).to(dtype)
    if not can_round:
        monkeypatch.setattr(quantized_linear, "can_round", lambda _: False)
    kernels = compiled(layer)
    for num_rows in (4, 70):
        sound = kernels(inputs[:num_rows])
        spoilt = inputs[:num_rows].clone()
        spoilt[2, 50] = value
        for found in (kernels(spoilt), layer(spoilt)):
            assert not found[2].isfinite().any()
        found = kernels(spoilt)
        others = torch.arange(num_rows) != 2
        assert torch.equal(found[others], sound[others])

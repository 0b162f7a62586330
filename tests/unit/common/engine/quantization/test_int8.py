import pytest
import torch
from torch import nn

from common.engine.devices.cpu import quantized_linear, streamed_int8_linear
from common.engine.devices.cpu.quantized_linear import compiled
from common.engine.devices.cpu.streamed_int8_linear import StreamedInt8Linear
from common.engine.quantization.base import quantize_linears
from common.engine.quantization.int8 import Int8Linear
from common.errors import ConfigError, ModelLoadError


def make_layer(in_features=48, out_features=96, *, dtype=torch.float32, bias=True):
    torch.manual_seed(0)
    return nn.Linear(in_features, out_features, bias=bias, dtype=dtype).requires_grad_(requires_grad=False)


def test_weights_are_rounded_to_the_nearest_step_of_their_output():
    layer = make_layer()
    layer.weight[3] = 0
    layer.weight[5] *= 1000
    quantized = Int8Linear.of(layer)
    steps = layer.weight.abs().amax(dim=1, keepdim=True) / 127
    error = (quantized.integers * quantized.scale[:, None] - layer.weight).abs()
    assert bool((error <= steps * 0.501).all())
    assert quantized.integers.abs().amax() == 127
    assert not quantized.integers[3].any()


def test_parts_of_the_inputs_are_rounded_as_the_whole_is():
    layer = make_layer()
    whole = Int8Linear.of(layer)
    largest = layer.weight.abs().amax(dim=1)
    for part in (slice(0, 16), slice(16, 48)):
        own = make_layer(in_features=part.stop - part.start)
        own.weight.copy_(layer.weight[:, part])
        quantized = Int8Linear.of(own, lambda own_largest: torch.maximum(own_largest, largest))
        assert torch.equal(quantized.integers, whole.integers[:, part])
        assert torch.equal(quantized.scale, whole.scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computes_with_the_rounded_weight(dtype):
    layer = make_layer(dtype=dtype)
    quantized = Int8Linear.of(layer)
    inputs = torch.randn(2, 3, 48).to(dtype)
    weight = quantized.integers * quantized.scale[:, None]
    expected = nn.functional.linear(inputs.float(), weight, layer.bias.float())
    torch.testing.assert_close(quantized(inputs), expected.to(dtype))


def test_layers_join():
    layers = [make_layer(out_features=size, bias=size != 32) for size in (96, 32)]
    inputs = torch.randn(3, 48)
    whole = Int8Linear.joined([Int8Linear.of(layer) for layer in layers])
    expected = torch.cat([Int8Linear.of(layer)(inputs) for layer in layers], dim=1)
    torch.testing.assert_close(whole(inputs), expected)


@pytest.mark.parametrize("tiles", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(64, 128), (48, 96), (50, 70)])
def test_kernels_compute_the_same(dtype, sizes, tiles, monkeypatch):
    if not tiles:
        monkeypatch.setattr(streamed_int8_linear, "has_tiles", lambda: False)
    quantized = Int8Linear.of(make_layer(*sizes, dtype=dtype))
    streamed = StreamedInt8Linear(quantized)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    for rows in (0, 1, 5, 16, 40, 1000):
        inputs = torch.randn(rows, 2 * sizes[0]).to(dtype)[:, ::2]
        torch.testing.assert_close(streamed(inputs), quantized(inputs), atol=tolerance, rtol=tolerance)
    inputs = torch.randn(2, 3, sizes[0]).to(dtype)
    torch.testing.assert_close(streamed(inputs), quantized(inputs), atol=tolerance, rtol=tolerance)


def test_kernels_that_compute_something_else_are_found_out(monkeypatch):
    run = streamed_int8_linear._run

    def skip_the_last_block(call, inputs, out, num_blocks, num_weights):
        run(call, inputs, out.fill_(0.0), num_blocks - 1, num_weights)

    monkeypatch.setattr(streamed_int8_linear, "_run", skip_the_last_block)
    quantized_linear._check_kernels.cache_clear()
    with pytest.raises(ModelLoadError, match="differ from torch"):
        compiled(Int8Linear.of(make_layer()))


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ConfigError, match="no linear layers") as refusal:
        quantize_linears(nn.Sequential(nn.Embedding(3, 4)), Int8Linear)
    assert refusal.value.param == "quantization"


def test_the_share_of_weights_counts_what_is_multiplied():
    model = nn.Sequential(nn.Embedding(100, 48), make_layer(), nn.Bilinear(48, 2, 48, bias=False))
    assert quantize_linears(model, Int8Linear) == 0.5

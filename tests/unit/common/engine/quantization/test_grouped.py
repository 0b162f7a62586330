"""Layers with weights in groups: what they stand for, how they are cut and joined, and their CPU kernels."""

import pytest
import torch

from common.engine.devices.cpu import quantized_linear, streamed_grouped_linear
from common.engine.devices.cpu.kernels import grouped_linear
from common.engine.devices.cpu.quantized_linear import compiled, has_kernels
from common.engine.devices.cpu.streamed_grouped_linear import StreamedGroupedLinear
from common.engine.quantization.base import can_join
from common.engine.quantization.grouped import GroupedLinear, pack_words
from common.errors import ModelLoadError

MAX_ERROR = {torch.float32: 1e-5, torch.bfloat16: 0.006}
KINDS = (torch.int32, torch.int8, torch.float8_e4m3fn)


def make_layer(kind, in_features=96, out_features=70, group=16, *, dtype=torch.float32, shift=True, order=False):
    generator = torch.Generator().manual_seed(in_features + out_features)
    most = 8 if kind is torch.int32 else 120
    numbers = torch.randint(-most, most, (in_features, out_features), generator=generator)
    codes = pack_words(numbers) if kind is torch.int32 else numbers.float().to(kind)
    scale = torch.rand(in_features // group, out_features, generator=generator) / most
    added = torch.randn(scale.shape, generator=generator) / 2
    bias = torch.randn(out_features, generator=generator).to(dtype)
    indices = torch.randperm(in_features, generator=generator) if order else None
    return GroupedLinear(codes, scale, added if shift else None, bias, dtype, indices)


def inputs_of(layer, num_rows=100):
    inputs = torch.randn(num_rows, layer.in_features, generator=torch.Generator().manual_seed(1))
    return inputs.to(layer.weight.dtype)


def error(found, expected):
    assert found.shape == expected.shape
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def test_codes_of_4_bits_stand_for_integers():
    numbers = torch.arange(-8, 8)[:, None].repeat(1, 3)
    layer = GroupedLinear(pack_words(numbers), torch.tensor([[1.0, 2.0, 0.5]]), None, None, torch.float32)
    assert torch.equal(layer.dequantized(), numbers.T * torch.tensor([[1.0], [2.0], [0.5]]))


@pytest.mark.parametrize("kind", KINDS)
def test_computes_with_the_numbers_in_the_order_of_the_inputs(kind):
    layer = make_layer(kind, order=True)
    numbers = torch.empty(96, 70)
    numbers[layer.order] = layer.numbers() * layer.scale.repeat_interleave(16, 0) + layer.shift.repeat_interleave(16, 0)
    torch.testing.assert_close(layer.dequantized(), numbers.T)
    inputs = inputs_of(layer)
    torch.testing.assert_close(layer(inputs), inputs @ numbers + layer.bias)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_those_of_the_whole(kind):
    layer = make_layer(kind)
    part = layer.outputs(slice(10, 40), padding=2)
    assert torch.equal(part.dequantized()[:30], layer.dequantized()[10:40])
    assert not part.dequantized()[30:].any()
    for start, stop in ((0, 32), (24, 72)):
        part = layer.inputs(start, stop)
        assert torch.equal(part.dequantized(), layer.dequantized()[:, start:stop])
        assert part.in_features == stop - start
        assert part.weight.shape == (70, stop - start)


def test_where_codes_cannot_be_cut():
    with pytest.raises(ValueError, match="ordered by activation"):
        make_layer(torch.int32, order=True).inputs(0, 48)
    with pytest.raises(ValueError, match="8 inputs in a word"):
        make_layer(torch.int32).inputs(0, 36)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_join(kind):
    one, other = make_layer(kind, group=32), make_layer(kind, out_features=48, group=48, shift=False)
    assert can_join([one, other])
    inputs = inputs_of(one)
    torch.testing.assert_close(GroupedLinear.joined([one, other])(inputs), torch.cat([one(inputs), other(inputs)], 1))


def test_what_cannot_be_joined():
    layer = make_layer(torch.int32)
    assert can_join([make_layer(torch.int32, order=True), make_layer(torch.int32, order=True)])
    assert not can_join([layer, make_layer(torch.int32, order=True)])
    assert not can_join([layer, make_layer(torch.int8)])
    assert not can_join([layer, torch.nn.Linear(96, 70)])
    assert not can_join([torch.nn.Linear(96, 70), layer])


@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.matrix)])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_compute_the_same(kind, dtype, shift):
    for *sizes, order in ((96, 70, 16, False), (256, 192, 128, True)):
        layer = make_layer(kind, *sizes, dtype=dtype, shift=shift, order=order)
        inputs = inputs_of(layer, 450)
        expected, kernels = layer(inputs), StreamedGroupedLinear(layer)
        assert kernels(inputs[:0]).shape == (0, sizes[1])
        for num_rows in (1, 2, 3, 4, 5, 64, 65, 450):
            assert error(kernels(inputs[:num_rows]), expected[:num_rows]) < MAX_ERROR[dtype]
        assert error(kernels(inputs[:6].view(2, 3, -1)), expected[:6].view(2, 3, -1)) < MAX_ERROR[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_rows_may_be_independent_of_what_is_beside_them(kind, dtype):
    layer = make_layer(kind, dtype=dtype)
    inputs, kernels = inputs_of(layer, 500), StreamedGroupedLinear(layer, batch_invariant=True)
    whole = kernels(inputs)
    for num_rows in (1, 3, 4, 7, 100, 400):
        assert torch.equal(kernels(inputs[:num_rows]), whole[:num_rows])


@pytest.mark.parametrize("kind", KINDS)
def test_many_rows_go_to_other_instructions_for_bfloat16(kind, monkeypatch):
    monkeypatch.setattr(streamed_grouped_linear, "only_widens_bfloat16", lambda: False)
    layer = make_layer(kind, dtype=torch.bfloat16)
    inputs, kernels = inputs_of(layer, 65), StreamedGroupedLinear(layer)
    assert error(kernels(inputs), layer(inputs)) < MAX_ERROR[torch.bfloat16]


def test_processors_without_a_lookup_of_16_numbers_compute_the_same(monkeypatch):
    layer = make_layer(torch.int32)
    inputs, found = inputs_of(layer), []
    for looks_up in (grouped_linear._LOOKS_UP, False):
        monkeypatch.setattr(grouped_linear, "_LOOKS_UP", looks_up)
        grouped_linear.grouped_linear_kernel.cache_clear()
        found.append(StreamedGroupedLinear(layer)(inputs))
    grouped_linear.grouped_linear_kernel.cache_clear()
    assert torch.equal(*found)


def test_kernels_that_compute_something_else_are_found_out(monkeypatch):
    monkeypatch.setattr(GroupedLinear, "numbers", lambda layer: torch.ones(layer.in_features, layer.out_features))
    quantized_linear._check_kernels.cache_clear()
    with pytest.raises(ModelLoadError, match="differ from torch"):
        compiled(make_layer(torch.int8))
    quantized_linear._check_kernels.cache_clear()


def test_there_are_no_kernels_for_small_groups():
    assert not has_kernels(make_layer(torch.int32, group=8))
    assert has_kernels(make_layer(torch.int32, group=48))

"""Linear layers with int8 weights, against torch in double precision."""

import pytest
import torch

from common.engine.devices.cpu.kernels import linear, tiled_int8_linear
from common.engine.devices.cpu.kernels.compiled import Call
from common.engine.devices.cpu.kernels.language import ElementType, element_type_of
from common.engine.devices.cpu.kernels.linear import ROWS_PER_TASK, block_of, linear_kernel
from common.engine.devices.cpu.kernels.tiled_int8_linear import (
    BLOCK,
    can_tile_int8,
    few_int8_rows_kernel,
    many_int8_rows_kernel,
)
from common.engine.devices.cpu.kernels.tiles import MAX_TILE_ROWS, TILE, configuration, has_tiles, rest_configuration

IN_FEATURES, OUT_FEATURES, MAX_ROWS = 288, 192, 384
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


class Layer:
    def __init__(self, dtype, *, has_bias):
        torch.manual_seed(0)
        self.inputs = torch.randn(MAX_ROWS, IN_FEATURES).to(dtype)
        self.weight = torch.randint(-127, 128, (OUT_FEATURES, IN_FEATURES), dtype=torch.int8)
        self.scale = torch.rand(OUT_FEATURES) / 500
        self.bias = torch.randn(OUT_FEATURES) if has_bias else None

    @property
    def expected(self):
        weight = self.weight.double() * self.scale.double()[:, None]
        bias = None if self.bias is None else self.bias.double()
        return torch.nn.functional.linear(self.inputs.double(), weight, bias)

    def multiply(self, kernel, block, num_rows, num_parts=1, **configurations):
        inputs = self.inputs[:num_rows].clone()
        packed = self.weight.view(-1, block, IN_FEATURES).transpose(1, 2).contiguous()
        out = torch.full((num_rows, OUT_FEATURES), torch.nan, dtype=inputs.dtype)
        call = Call(
            kernel,
            inputs=inputs.data_ptr(),
            weight=packed.data_ptr(),
            scale=self.scale.data_ptr(),
            bias=0 if self.bias is None else self.bias.data_ptr(),
            out=out.data_ptr(),
            num_rows=num_rows,
            in_features=IN_FEATURES,
            out_features=OUT_FEATURES,
            **{name: tensor.data_ptr() for name, tensor in configurations.items()},
        )
        call.run(OUT_FEATURES // block * num_parts, 2)
        return out


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("block", [16, 48, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computes_the_same_and_each_row_whatever_is_beside_it(dtype, block, has_bias):
    layer = Layer(dtype, has_bias=has_bias)
    kernel = linear_kernel(element_type_of(dtype), block, has_bias=has_bias, weights=ElementType.INT8)
    whole = layer.multiply(kernel, block, MAX_ROWS, num_parts=MAX_ROWS // ROWS_PER_TASK)
    torch.testing.assert_close(whole.double(), layer.expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for num_rows in (1, 2, 3, 4, 7, 13, 90, 100):
        found = layer.multiply(kernel, block, num_rows, num_parts=-(-num_rows // ROWS_PER_TASK))
        assert torch.equal(found, whole[:num_rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrower_vectors_give_the_same(dtype, monkeypatch):
    layer = Layer(dtype, has_bias=True)
    found = []
    for lanes in (linear.MAX_LANES, linear.MAX_LANES // 2):
        monkeypatch.setattr(linear, "MAX_LANES", lanes)
        monkeypatch.setattr(linear, "_MAX_VECTORS", lanes * 3 // 2)
        kernel = linear_kernel.__wrapped__(element_type_of(dtype), 64, has_bias=True, weights=ElementType.INT8)
        found.append(layer.multiply(kernel, 64, 7))
    assert torch.equal(*found)


@pytest.mark.skipif(not has_tiles(), reason="the processor has no matrix instructions")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("piece", [32, 96])
def test_tiles_compute_the_same_and_each_row_whatever_is_beside_it(has_bias, piece):
    layer = Layer(torch.bfloat16, has_bias=has_bias)
    many = many_int8_rows_kernel(piece, has_bias=has_bias)

    def multiply(num_rows):
        shapes = {"whole": configuration(MAX_TILE_ROWS), "rest": rest_configuration(num_rows)}
        return layer.multiply(many, BLOCK, num_rows, **shapes)

    whole = multiply(MAX_ROWS)
    torch.testing.assert_close(whole.double(), layer.expected, atol=2**-7, rtol=2**-7)
    for num_rows in (1, 33, 48, 49, 64, 350):
        assert torch.equal(multiply(num_rows), whole[:num_rows])
    for num_rows in (1, 2, 15, 16, 17, 32):
        few = few_int8_rows_kernel(num_tiles=-(-num_rows // TILE), has_bias=has_bias)
        found = layer.multiply(few, BLOCK, num_rows, configuration=configuration(num_rows))
        assert torch.equal(found, whole[:num_rows])


def test_sizes():
    assert [block_of(size) for size in (128, 96, 32, 80)] == [64, 48, 32, 16]
    assert [tiled_int8_linear.piece_of(size) for size in (768, 2048, 96)] == [256, 256, 96]
    assert can_tile_int8(96, 64)
    assert not can_tile_int8(48, 64)
    assert not can_tile_int8(96, 48)

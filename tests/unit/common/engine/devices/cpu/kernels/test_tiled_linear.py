import pytest
import torch
from torch.nn import functional

from common.engine.devices.cpu.kernels import tiles
from common.engine.devices.cpu.kernels.compiled import Call
from common.engine.devices.cpu.kernels.tiled_linear import can_tile, tiled_gated_linear_kernel, tiled_linear_kernel
from common.engine.devices.cpu.kernels.tiles import MAX_TILE_ROWS, configuration, has_tiles, rest_configuration

IN_FEATURES, OUT_FEATURES = 96, 256


@pytest.mark.skipif(not has_tiles(), reason="the processor has no matrix instructions")
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("block", [32, 64])
def test_computes_the_same_and_each_row_whatever_is_beside_it(block, has_bias, gated):
    torch.manual_seed(0)
    inputs = torch.randn(3 * MAX_TILE_ROWS + 1, IN_FEATURES).bfloat16()
    weight = (torch.randn(OUT_FEATURES, IN_FEATURES) / 8).bfloat16()
    bias = torch.randn(OUT_FEATURES) if has_bias else None
    expected = functional.linear(inputs.double(), weight.double(), bias.double() if has_bias else None)
    if gated:
        gate, up = expected.chunk(2, dim=1)
        expected = functional.silu(gate) * up
    whole = multiply(inputs, weight, bias, block, gated=gated)
    torch.testing.assert_close(whole.double(), expected, atol=2**-7, rtol=2**-7)
    for num_rows in (1, 2, 15, 16, 17, 31, 32, 33, 48, 49, 64, len(inputs)):
        for rows_per_task in (MAX_TILE_ROWS, 2 * MAX_TILE_ROWS):
            found = multiply(inputs[:num_rows].clone(), weight, bias, block, gated=gated, rows_per_task=rows_per_task)
            assert torch.equal(found, whole[:num_rows])


def multiply(inputs, weight, bias, block, *, gated, rows_per_task=4 * MAX_TILE_ROWS):
    packed = weight.view(-1, block, IN_FEATURES // 2, 2).transpose(1, 2).contiguous()
    num_rows, out_features = len(inputs), OUT_FEATURES // 2 if gated else OUT_FEATURES
    out = torch.full((num_rows, out_features), torch.nan, dtype=torch.bfloat16)
    kernel_of = tiled_gated_linear_kernel if gated else tiled_linear_kernel
    call = Call(
        kernel_of(block, has_bias=bias is not None),
        inputs=inputs.data_ptr(),
        weight=packed.data_ptr(),
        out=out.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        whole=configuration(MAX_TILE_ROWS).data_ptr(),
        rest=rest_configuration(num_rows).data_ptr(),
        num_rows=num_rows,
        rows_per_task=rows_per_task,
        in_features=IN_FEATURES,
        out_features=OUT_FEATURES,
    )
    call.run(-(-num_rows // rows_per_task) * (out_features // block), 2)
    return out


def test_processors_without_the_instructions_are_not_asked_for_them(monkeypatch):
    monkeypatch.setattr(tiles, "features", dict)
    monkeypatch.setattr(tiles.ctypes, "CDLL", lambda name: pytest.fail("asked"))
    assert not has_tiles.__wrapped__()


@pytest.mark.parametrize(
    ("in_features", "out_features", "block", "can"),
    [(64, 128, 32, True), (48, 128, 32, False), (64, 100, 32, False), (64, 144, 48, False)],
)
def test_sizes(in_features, out_features, block, can):
    assert can_tile(in_features, out_features, block) == can

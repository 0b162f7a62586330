"""Linear layers, against torch in double precision."""

import pytest
import torch

from common.engine.devices.cpu.kernels import pairs
from common.engine.devices.cpu.kernels.compiled import Call
from common.engine.devices.cpu.kernels.language import element_type_of
from common.engine.devices.cpu.kernels.linear import ROWS_PER_TASK, can_stream, linear_kernel, pair_of

IN_FEATURES, OUT_FEATURES = 96, 192
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2**-7}


def multiply(inputs, weight, bias, block):
    element = element_type_of(weight.dtype)
    pair = pair_of(element)
    packed = weight.view(-1, block, IN_FEATURES // pair, pair).transpose(1, 2).contiguous()
    out = torch.full((len(inputs), OUT_FEATURES), torch.nan, dtype=weight.dtype)
    call = Call(
        linear_kernel(element, block, has_bias=bias is not None),
        inputs=inputs.data_ptr(),
        weight=packed.data_ptr(),
        out=out.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        num_rows=len(inputs),
        in_features=IN_FEATURES,
        out_features=OUT_FEATURES,
    )
    call.run(-(-len(inputs) // ROWS_PER_TASK) * (OUT_FEATURES // block), 2)
    return out


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("block", [16, 48, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_computes_the_same_and_each_row_whatever_is_beside_it(dtype, block, has_bias):
    torch.manual_seed(0)
    inputs = torch.randn(2 * ROWS_PER_TASK + 5, IN_FEATURES).to(dtype)
    weight = (torch.randn(OUT_FEATURES, IN_FEATURES) / 8).to(dtype)
    bias = torch.randn(OUT_FEATURES) if has_bias else None
    expected = torch.nn.functional.linear(inputs.double(), weight.double(), bias.double() if has_bias else None)
    whole = multiply(inputs, weight, bias, block)
    torch.testing.assert_close(whole.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    for num_rows in (1, 2, 3, 4, 7, 13, 63, ROWS_PER_TASK, ROWS_PER_TASK + 1):
        assert torch.equal(multiply(inputs[:num_rows].clone(), weight, bias, block), whole[:num_rows])


def test_pairs_without_an_instruction_for_them(monkeypatch):
    monkeypatch.setattr(pairs, "MULTIPLIES_PAIRS", False)
    linear_kernel.cache_clear()
    try:
        test_computes_the_same_and_each_row_whatever_is_beside_it(torch.bfloat16, 64, has_bias=True)
    finally:
        linear_kernel.cache_clear()


@pytest.mark.parametrize(
    ("dtype", "in_features", "out_features", "block", "can"),
    [
        (torch.float32, 48, 128, 64, True),
        (torch.float32, 40, 128, 64, False),
        (torch.bfloat16, 48, 128, 64, False),
        (torch.float32, 48, 100, 64, False),
        (torch.float32, 48, 100, 20, False),
    ],
)
def test_sizes(dtype, in_features, out_features, block, can):
    assert can_stream(element_type_of(dtype), in_features, out_features, block) == can

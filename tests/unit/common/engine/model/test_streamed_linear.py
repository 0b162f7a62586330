import pytest
import torch
from torch import nn

from common.engine.cpu_kernels.linear import MAX_ROWS
from common.engine.model import streamed_linear
from common.engine.model.packed_linear import PackedLinear
from common.engine.model.streamed_linear import StreamedLinear


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def linear(request):
    torch.manual_seed(0)
    layer = nn.Linear(256, 2048, dtype=request.param)
    packed = PackedLinear(layer).packed
    if streamed_linear.blocks_of(layer.weight.detach(), packed) is None:
        pytest.skip("oneDNN packs weights differently on this processor")
    return layer


@pytest.mark.parametrize("num_rows", [0, 1, 8, 16, 17, 32, 33, MAX_ROWS, MAX_ROWS + 1, 300])
@pytest.mark.parametrize("tiles", [True, False])
def test_computes_the_same(linear, num_rows, tiles, monkeypatch):
    if not tiles:
        monkeypatch.setattr(streamed_linear, "has_tiles", lambda: False)
        monkeypatch.setattr(streamed_linear, "_MAX_ROWS_BFLOAT16", MAX_ROWS)
    streamed = StreamedLinear(linear)
    inputs = torch.randn(num_rows, 512).to(linear.weight.dtype)[:, ::2]
    tolerance = 1e-5 if linear.weight.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(streamed(inputs), linear(inputs), atol=tolerance, rtol=tolerance)


def test_few_rows_do_not_go_through_onednn(linear, monkeypatch):
    streamed = StreamedLinear(linear)
    monkeypatch.setattr(PackedLinear, "__call__", lambda self, inputs: pytest.fail("went through oneDNN"))
    streamed(torch.randn(1, 256).to(linear.weight.dtype))


def test_a_layout_that_the_kernel_does_not_read_is_left_to_onednn(linear):
    weight = linear.weight.detach()
    packed = PackedLinear(linear).packed
    assert streamed_linear.blocks_of(weight, packed) is not None
    changed = weight.clone()
    changed[-1, -1] += 1  # what is packed is something else, in its last block
    assert streamed_linear.blocks_of(changed, packed) is None
    assert streamed_linear.blocks_of(weight, None) is None

import pytest
import torch
from torch import nn

from common.engine.devices.cpu import streamed_linear
from common.engine.devices.cpu.kernels.linear import ROWS_PER_TASK
from common.engine.devices.cpu.packed_linear import PackedLinear
from common.engine.devices.cpu.streamed_linear import CompiledLinear, StreamedLinear
from common.errors import ModelLoadError


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=str)
def linear(request):
    torch.manual_seed(0)
    layer = nn.Linear(256, 2048, dtype=request.param)
    if StreamedLinear(layer)._streamed is None:
        pytest.skip("oneDNN packs weights differently on this processor")
    return layer


@pytest.fixture
def no_bfloat16(monkeypatch):
    """The processor has no instructions for bfloat16."""
    monkeypatch.setattr(streamed_linear.pairs, "MULTIPLIES_PAIRS", False)
    monkeypatch.setattr(streamed_linear, "has_tiles", lambda: False)
    if not streamed_linear.is_x86():
        pytest.skip("weights in bfloat16 are packed here on x86 processors only")


@pytest.mark.usefixtures("no_bfloat16")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_outputs", [16, 48, 64, 2048])
@pytest.mark.parametrize("kind", [StreamedLinear, CompiledLinear])
def test_bfloat16_without_instructions_for_it_does_not_go_through_onednn(kind, num_outputs, bias, monkeypatch):
    torch.manual_seed(0)
    layer = nn.Linear(256, num_outputs, bias=bias, dtype=torch.bfloat16)
    assert kind is StreamedLinear or CompiledLinear.takes(layer)
    streamed = kind(layer)
    for name in ("__call__", "forward"):
        monkeypatch.setattr(PackedLinear, name, lambda self, inputs: pytest.fail("went through oneDNN"))
    inputs = torch.randn(2 * ROWS_PER_TASK + 5, 256).bfloat16()
    expected = layer.float()(inputs.float())
    for num_rows in (0, 1, 7, ROWS_PER_TASK, len(inputs)):
        found = streamed(inputs[:num_rows]).float()
        torch.testing.assert_close(found, expected[:num_rows], atol=2**-7, rtol=2**-7)


@pytest.mark.usefixtures("no_bfloat16")
def test_blocks_do_not_join_gate_and_up():
    layer = nn.Linear(256, 2 * 3 * 32, bias=False, dtype=torch.bfloat16)  # 64 divides what both have together
    inputs = torch.randn(3, 256).bfloat16()
    gate, up = layer(inputs).float().chunk(2, dim=1)
    found = StreamedLinear(layer, gated=True).gated(inputs)
    torch.testing.assert_close(found.float(), nn.functional.silu(gate) * up, atol=2**-6, rtol=2**-6)


@pytest.mark.usefixtures("no_bfloat16")
@pytest.mark.parametrize("kind", [StreamedLinear, CompiledLinear])
def test_numbers_of_another_type_are_not_taken_for_bfloat16(kind):
    with pytest.raises(TypeError, match="inputs are of"):
        kind(nn.Linear(256, 64, dtype=torch.bfloat16))(torch.randn(3, 256))


@pytest.mark.usefixtures("no_bfloat16")
@pytest.mark.parametrize("kind", [StreamedLinear, CompiledLinear])
def test_sizes_that_no_kernel_takes_stay_as_they_are(kind):
    layer = nn.Linear(40, 24, dtype=torch.bfloat16)
    inputs = torch.randn(3, 40).bfloat16()
    torch.testing.assert_close(kind(layer)(inputs), layer(inputs))


@pytest.mark.parametrize("num_rows", [0, 1, 8, 16, 17, 32, 33, ROWS_PER_TASK, ROWS_PER_TASK + 1, 300])
@pytest.mark.parametrize("tiles", [True, False])
def test_computes_the_same(linear, num_rows, tiles, monkeypatch):
    if not tiles:
        monkeypatch.setattr(streamed_linear, "has_tiles", lambda: False)
        monkeypatch.setattr(streamed_linear, "_MAX_ROWS_BFLOAT16", ROWS_PER_TASK)
    streamed = StreamedLinear(linear)
    inputs = torch.randn(num_rows, 512).to(linear.weight.dtype)[:, ::2]
    tolerance = 1e-5 if linear.weight.dtype == torch.float32 else 2**-7
    torch.testing.assert_close(streamed(inputs), linear(inputs), atol=tolerance, rtol=tolerance)


def tiled_layer(in_features, out_features, *, bias=True):
    torch.manual_seed(0)
    layer = nn.Linear(in_features, out_features, bias=bias, dtype=torch.bfloat16)
    blocks = streamed_linear.blocks_of(layer.weight.detach(), PackedLinear(layer).packed)
    if blocks is None or not streamed_linear._is_tiled(layer, blocks):
        pytest.skip("no matrix instructions, or oneDNN packs weights differently")
    return layer


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 8, 40, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gated_is_what_the_layer_and_silu_give(dtype, num_rows, bias):
    layer = nn.Linear(512, 2048, bias=bias, dtype=dtype)
    streamed = StreamedLinear(layer, gated=True)
    inputs = torch.randn(num_rows, 512).to(dtype)
    if (found := streamed.gated(inputs)) is None:
        assert streamed._streamed is None or not streamed._streamed.takes(inputs)
        pytest.skip("this processor has no kernel for so many rows")
    gate, up = layer(inputs).float().chunk(2, dim=1)
    tolerance = 1e-5 if dtype == torch.float32 else 2**-6
    torch.testing.assert_close(found.float(), nn.functional.silu(gate) * up, atol=tolerance, rtol=tolerance)
    assert StreamedLinear(layer).gated(inputs) is None


def test_rows_beyond_the_most_are_the_same_as_alone(monkeypatch):
    layer = tiled_layer(512, 2048)
    inputs = torch.randn(130, 512).bfloat16()
    whole = StreamedLinear(layer)(inputs)
    monkeypatch.setattr(streamed_linear, "_MAX_ROWS_TILED", 48)
    assert torch.equal(StreamedLinear(layer, batch_invariant=True)(inputs), whole)
    torch.testing.assert_close(StreamedLinear(layer)(inputs), whole, atol=2**-6, rtol=2**-6)  # oneDNN's


def test_blocks_that_no_cache_holds_are_left_to_onednn_beyond_one_pass(monkeypatch):
    layer = tiled_layer(512, 2048)
    monkeypatch.setattr(streamed_linear, "_MAX_CACHED", 1 << 10)
    streamed = StreamedLinear(layer)
    monkeypatch.setattr(streamed, "_packed", lambda inputs: pytest.fail("went through oneDNN"))
    streamed(torch.randn(32, 512).bfloat16())
    with pytest.raises(pytest.fail.Exception):
        streamed(torch.randn(33, 512).bfloat16())


def test_a_tiled_kernel_that_computes_something_else_is_refused(monkeypatch):
    layer = tiled_layer(512, 2048)
    streamed_linear._check_tiled.cache_clear()
    monkeypatch.setattr(streamed_linear, "_MAX_ERROR", 1e-6)
    with pytest.raises(ModelLoadError, match="differ from torch"):
        StreamedLinear(layer)


@pytest.mark.parametrize(
    ("num_rows", "num_blocks", "num_threads", "expected"),
    [(768, 12, 2, 768), (512, 16, 32, 64), (512, 16, 1000, 32), (20, 16, 64, 32), (100, 64, 16, 128)],
)
def test_rows_are_shared_out_where_blocks_are_too_few(num_rows, num_blocks, num_threads, expected):
    assert streamed_linear._rows_per_task(num_rows, num_blocks, num_threads) == expected


@pytest.mark.parametrize("kind", [StreamedLinear, CompiledLinear])
def test_few_rows_do_not_go_through_onednn(kind, linear, monkeypatch):
    streamed = kind(linear)
    for name in ("__call__", "forward"):
        monkeypatch.setattr(PackedLinear, name, lambda self, inputs: pytest.fail("went through oneDNN"))
    streamed(torch.randn(1, 256).to(linear.weight.dtype))


def test_a_layout_that_the_kernel_does_not_read_is_left_to_onednn(linear):
    weight = linear.weight.detach()
    packed = PackedLinear(linear).packed
    if streamed_linear.blocks_of(weight, packed) is None:
        pytest.skip("oneDNN packs weights differently on this processor")
    changed = weight.clone()
    changed[-1, -1] += 1  # what is packed is something else, in its last block
    assert streamed_linear.blocks_of(changed, packed) is None
    assert streamed_linear.blocks_of(weight, None) is None


@pytest.mark.parametrize("num_outputs", [8, 192, 2048], ids=["plain", "both", "packed"])
def test_a_layer_of_a_model_with_its_own_code(num_outputs):
    """Rows of any shape, few of them through our kernels."""
    torch.manual_seed(0)
    linear = nn.Linear(256, num_outputs)
    compiled = CompiledLinear(linear)
    for shape in [(256,), (1, 1, 256), (2, 3, 256), (1, 0, 256), (2, 37, 256)]:
        inputs = torch.randn(shape)
        torch.testing.assert_close(compiled(inputs), linear(inputs), atol=1e-5, rtol=1e-5)

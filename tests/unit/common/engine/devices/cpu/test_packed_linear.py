import pytest
import torch
from torch import nn

from common.engine.config import ModelConfig
from common.engine.devices.cpu import device as cpu_device
from common.engine.devices.cpu import packed_linear
from common.engine.devices.cpu.packed_linear import PackedLinear, missing_rows, pack_linears
from common.engine.model import kernel_choice
from common.engine.model.loader import load_model
from common.engine.quantization.absent_weight import AbsentWeight, WeightReadError
from common.errors import ModelLoadError
from tests.architectures.models import model_dir
from tests.tiny_models import tiny_model_dir


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("num_outputs", [8, 192, 2048], ids=["plain", "both", "packed"])
def test_computes_the_same(num_outputs, bias):
    torch.manual_seed(0)
    linear = nn.Linear(256, num_outputs, bias=bias)
    packed = PackedLinear(linear)
    for shape in [(256,), (1, 256), (1, 1, 256), (1, 8, 256), (2, 37, 256), (1, 0, 256), (2, 141, 256)]:
        inputs = torch.randn(shape)
        torch.testing.assert_close(packed(inputs), linear(inputs), atol=1e-5, rtol=1e-5)
    assert (packed.weight.shape, packed.weight.dtype) == (linear.weight.shape, torch.float32)
    assert packed.weight.is_meta == (num_outputs == 2048)  # the data of large weights is not kept twice


def test_prompts_of_any_length_have_few_numbers_of_rows():
    assert {num_rows + missing_rows(num_rows) for num_rows in range(129, 513)} == set(range(160, 513, 32))
    assert [missing_rows(num_rows) for num_rows in range(129)] == [0] * 129


def test_replaces_linears_of_types_that_the_processor_has(monkeypatch):
    monkeypatch.setattr(packed_linear, "_can_pack", lambda dtype: dtype == torch.float32)

    class Own(nn.Linear):
        pass

    model = nn.Sequential(
        nn.Linear(16, 16),
        Own(16, 16),
        nn.Linear(16, 16).bfloat16(),
        nn.Sequential(nn.Embedding(16, 16), nn.Linear(16, 16)),
    )
    assert pack_linears(model) == 2
    assert isinstance(model[0], PackedLinear)
    assert isinstance(model[3][1], PackedLinear)


@pytest.mark.parametrize("kernels", ["auto", "reference"])
def test_a_layer_whose_weight_the_models_own_code_reads_is_not_packed(monkeypatch, caplog, kernels):
    monkeypatch.setattr(packed_linear, "_MIN_WEIGHTS_FOR_ONE_TOKEN", 1)
    monkeypatch.setattr(packed_linear, "_MIN_WEIGHTS", 1)
    loaded = load_model(ModelConfig(model=str(model_dir("mamba")), cpu_kernels=kernels))
    mixer = loaded.model.backbone.layers[0].mixer
    assert isinstance(mixer.out_proj, PackedLinear)
    assert not mixer.dt_proj.weight.is_meta
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_checkpoint_whose_quantised_weights_the_models_own_code_reads_is_refused(monkeypatch):
    def read(source):
        raise WeightReadError("dt_proj")

    monkeypatch.setattr(kernel_choice, "_prepare", read)
    with pytest.raises(ModelLoadError, match=r"quantised weights of this model are not supported: .*'dt_proj'"):
        load_model(ModelConfig(model=str(tiny_model_dir("llama"))))


def test_to_compute_with_an_absent_weight_is_an_error():
    weight = AbsentWeight.of(torch.Size((4, 3)), torch.float32)
    weight.layer = "dt_proj"
    assert (weight.shape, weight.dtype, weight.numel()) == ((4, 3), torch.float32, 12)
    inputs = torch.ones(3, 2)
    assert inputs.to(weight.dtype) is inputs
    for compute in (
        lambda: weight @ inputs,
        lambda: weight.float()[:2] @ inputs,
        lambda: nn.functional.linear(inputs.T, weight=weight),
        lambda: inputs.T * weight.T[0, :3],
    ):
        with pytest.raises(WeightReadError, match="dt_proj"):
            compute()


def test_model_that_cannot_be_packed_is_loaded_as_it_is(monkeypatch):
    def pack_badly(model):
        model.model.layers[0].self_attn.q_proj = nn.Linear(7, 7)
        return 1

    monkeypatch.setattr(cpu_device, "pack_linears", pack_badly)
    loaded = load_model(ModelConfig(model=str(tiny_model_dir("llama")), cpu_kernels="reference"))
    assert loaded.model.model.layers[0].self_attn.q_proj.in_features == 48

    monkeypatch.setattr(kernel_choice, "probe_model", lambda model, stage: (_ for _ in ()).throw(ModelLoadError("no")))
    with pytest.raises(ModelLoadError):
        load_model(ModelConfig(model=str(tiny_model_dir("llama")), cpu_kernels="reference"))

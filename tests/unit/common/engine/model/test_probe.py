"""The probe refuses what the known arguments do not describe."""

from contextlib import nullcontext

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.engine.contract.kv_groups import Window
from common.engine.model.attention_hook import ATTENTION_NAME
from common.engine.model.probe import probe_model, quantize_kv
from common.engine.model.stages import whole_model
from common.engine.quantization.base import quantize_linears
from common.engine.quantization.dynamic_int8 import DynamicInt8Linear
from common.engine.quantization.int8 import Int8Linear
from common.errors import ModelLoadError
from tests.tiny_models import SLIDING_WINDOW, random_model, tiny_config, tiny_model_dir


@pytest.fixture
def model():
    return AutoModelForCausalLM.from_pretrained(tiny_model_dir("llama"), attn_implementation=ATTENTION_NAME).eval()


def wrap_attention(model, **extra):
    """Let the first layer pass more arguments to its attention."""
    attention = model.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: forward(*args, **{**kwargs, **extra})


def test_unknown_argument_is_refused(model):
    wrap_attention(model, position_bias=1.0)
    with pytest.raises(ModelLoadError, match="'position_bias'"):
        probe_model(model, whole_model(model))


def test_flags_are_not_arguments_that_matter(model):
    wrap_attention(model, output_router_logits=False, is_causal=True)
    assert probe_model(model, whole_model(model)).spec.num_layers == 3


def test_bidirectional_attention_is_refused(model):
    model.model.layers[1].self_attn.is_causal = False
    with pytest.raises(ModelLoadError, match="is not causal"):
        probe_model(model, whole_model(model))


def test_shapes_that_differ_per_layer_are_refused(model):
    attention = model.model.layers[1].self_attn
    attention.k_proj, attention.v_proj = attention.q_proj, attention.q_proj
    attention.num_key_value_groups = 1
    with pytest.raises(ModelLoadError, match="different shapes per layer"):
        probe_model(model, whole_model(model))


def bias_attention(model, is_biased):
    """Let the model's own attention compute something else."""
    attention = model.model.layers[2].self_attn
    forward = attention.forward

    def biased(*args, **kwargs):
        out, weights = forward(*args, **kwargs)
        return (out if model.config._attn_implementation == ATTENTION_NAME else out + is_biased()), weights

    attention.forward = biased


def test_other_results_than_its_own_attention_are_refused(model):
    bias_attention(model, lambda: True)
    with pytest.raises(ModelLoadError, match="paged attention differs from the model's own"):
        probe_model(model, whole_model(model))


def test_other_results_of_one_prompt_are_not_enough(model):
    """Such as those of a token for which two experts are as good."""
    seen = []
    model.model.embed_tokens.register_forward_pre_hook(lambda _module, inputs: seen.append(int(inputs[0].max())))
    bias_attention(model, lambda: seen[-1] < 12)
    probed = probe_model(model, whole_model(model))
    assert probed.inputs.tolist() == list(range(12, 24))


@pytest.mark.parametrize(("layer", "is_like_it"), [(Int8Linear, False), (DynamicInt8Linear, True)])
def test_rounded_inputs_let_differences_grow(model, layer, is_like_it):
    quantize_linears(model, layer)
    probed = probe_model(model, whole_model(model))
    noise = torch.randn(probed.outputs.shape, generator=torch.Generator().manual_seed(0)) * probed.outputs.std()
    with nullcontext() if is_like_it else pytest.raises(ModelLoadError, match="differs from"):
        probed.check("kernels", probed.outputs + 0.03 * noise)
    with pytest.raises(ModelLoadError, match="differs from"):
        probed.check("kernels", probed.outputs + 0.5 * noise)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_kv_may_differ_by_what_rounding_it_makes(model, dtype):
    stage = whole_model(model)
    probed = quantize_kv(model, stage, probe_model(model, stage), dtype)
    by_rounding = probed.outputs - probed.quantized_outputs
    probed.check_quantized("kernels", probed.quantized_outputs + 0.9 * by_rounding)
    with pytest.raises(ModelLoadError, match="kernels with quantised KV: paged attention differs"):
        probed.check_quantized("kernels", probed.quantized_outputs + 2 * by_rounding)


def test_a_model_that_takes_no_positions_is_refused():
    """Such as BART's decoder, whose positions would begin at 0 in each forward pass."""
    bart = random_model(tiny_config("BartConfig", d_model=48, decoder_layers=3, decoder_attention_heads=4))
    bart.set_attn_implementation(ATTENTION_NAME)
    with pytest.raises(ModelLoadError, match="BartForCausalLM takes no positions"):
        probe_model(bart, whole_model(bart))


def test_positions_that_each_pass_counts_anew_are_refused(model):
    rotary = model.model.rotary_emb
    forward = rotary.forward
    rotary.forward = lambda hidden, position_ids: forward(hidden, position_ids - position_ids[:, :1])
    with pytest.raises(ModelLoadError, match="paged attention differs from the model's own"):
        probe_model(model, whole_model(model))


def test_a_window_of_which_the_attention_is_not_told_is_refused():
    """As in Phi-3.5-MoE, whose masks have one."""
    phimoe = random_model(tiny_config("PhimoeConfig", sliding_window=64, num_local_experts=4))
    with pytest.raises(ModelLoadError, match="paged attention differs from the model's own"):
        probe_model(phimoe, whole_model(phimoe))


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gemma3", "gpt_oss"])
def test_windows_are_found(name):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir(name), attn_implementation=ATTENTION_NAME).eval()
    args = probe_model(model, whole_model(model)).attention_args
    assert Window(SLIDING_WINDOW) in {each.window for each in args} <= {None, Window(SLIDING_WINDOW)}
    assert model.config.sliding_window == SLIDING_WINDOW


def test_state_outside_the_kv_is_refused(model):
    """Such as that of a convolution over tokens."""
    mlp = model.model.layers[1].mlp
    forward = mlp.forward
    mlp.forward = lambda hidden: forward(hidden) + hidden.roll(1, dims=1)
    with pytest.raises(ModelLoadError, match="paged attention differs from the model's own"):
        probe_model(model, whole_model(model))

import gc
import weakref

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from common.engine.config import ModelConfig
from common.engine.devices.cpu import attention as cpu_attention
from common.engine.devices.cpu import operators as cpu_operators
from common.engine.devices.cpu.kernels.attention import Scores
from common.engine.devices.cpu.operators import CpuOperators
from common.engine.devices.ranks import OneRank
from common.engine.model.attention_hook import ATTENTION_NAME
from common.engine.model.fused_decoder import can_fuse, fuse_decoder
from common.engine.model.loader import load_model
from common.engine.model.parallel_layers import CollectedLinear
from common.engine.model.probe import probe_model
from common.engine.model.stages import whole_model
from tests.tiny_models import TINY_MODELS, tiny_model_dir

FUSED = {"llama", "qwen3", "mistral"}


@pytest.mark.parametrize("name", TINY_MODELS)
def test_models_of_the_llama_kind_are_fused(name):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir(name))
    assert can_fuse(model, CpuOperators(), whole_model(model)) == (name in FUSED)


def test_a_model_with_a_part_of_its_own_is_not_fused():
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir("llama"))
    model.model.layers[1].mlp.gate = nn.Linear(4, 4)
    assert not can_fuse(model, CpuOperators(), whole_model(model))
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir("llama"))
    model.model.layers[1].self_attn.scale = nn.Parameter(torch.ones(1))
    assert not can_fuse(model, CpuOperators(), whole_model(model))


def test_ranks_give_up_the_weights_of_what_they_put_together():
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir("llama"), attn_implementation=ATTENTION_NAME)
    layer = model.model.layers[1].mlp
    layer.down_proj = CollectedLinear(layer.down_proj, lambda outputs: outputs)
    part = weakref.ref(layer.down_proj)
    del layer
    operators = CpuOperators()
    whole = whole_model(model)
    assert can_fuse(model, operators, whole)
    decoder = fuse_decoder(model, probe_model(model, whole), operators, OneRank(), whole)
    gc.collect()
    assert part() is None
    assert decoder


def test_reference_kernels_leave_the_model_as_it_is():
    loaded = load_model(ModelConfig(model=str(tiny_model_dir("llama")), cpu_kernels="reference"))
    assert (loaded.decoder, loaded.kernels, loaded.kernels_failed) == (None, "torch", False)


def test_a_model_that_computes_something_else_runs_on_torch(monkeypatch, caplog):
    class Doubled(cpu_operators._Gated):
        def __call__(self, inputs):
            return super().__call__(inputs) * 2

    monkeypatch.setattr(cpu_operators, "_Gated", Doubled)
    loaded = load_model(ModelConfig(model=str(tiny_model_dir("llama"))))
    assert (loaded.decoder, loaded.kernels, loaded.kernels_failed) == (None, "torch", True)
    assert len(loaded.attention_modules) == 3  # loaded again, whole
    assert "torch's operators" in caplog.text


def test_attention_that_computes_something_else_runs_on_torch(monkeypatch, caplog):
    model = str(tiny_model_dir("gemma2"))
    assert load_model(ModelConfig(model=model)).kernels == "attention"
    monkeypatch.setattr(cpu_attention, "scores_of", lambda args: Scores(2 * args.scale))
    loaded = load_model(ModelConfig(model=model))
    assert (loaded.kernels, loaded.kernels_failed) == ("torch", True)
    assert "differs from torch's" in caplog.text


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_kernel_that_does_not_compile_is_not_used(name, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise RuntimeError("LLVM IR parsing error")

    monkeypatch.setattr(cpu_operators, "silu_mul_kernel", fail)
    monkeypatch.setattr(cpu_attention, "decode_kernel", fail)
    loaded = load_model(ModelConfig(model=str(tiny_model_dir(name))))
    assert (loaded.decoder, loaded.kernels, loaded.kernels_failed) == (None, "torch", True)
    assert "LLVM IR parsing error" in caplog.text


def test_bfloat16_is_close_to_float32():
    token_ids = torch.arange(12)
    logits = []
    for dtype in ("float32", "bfloat16"):
        loaded = load_model(ModelConfig(model=str(tiny_model_dir("qwen3")), dtype=dtype))
        assert loaded.decoder is not None
        logits.append(loaded.decoder.probe(token_ids, loaded.kv_spec))
    error = (logits[1] - logits[0]).norm() / logits[0].norm()
    assert error < 0.03

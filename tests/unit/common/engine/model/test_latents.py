"""What a model's own attention modules expand latents to, and what is used in their place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from common.engine.model.attention_hook import ATTENTION_NAME, expansion_of, set_own_heads
from common.engine.model.latents import Latents
from common.engine.model.parallel_layers import OwnHeads
from common.engine.model.probe import probe_model
from common.engine.model.stages import whole_model
from common.engine.quantization.base import quantize_linears
from common.engine.quantization.int8 import Int8Linear
from tests.tiny_models import tiny_model_dir

RANK, ROTARY_DIM, KEY_DIM, VALUE_DIM, NUM_HEADS = 16, 8, 16, 16, 4


@pytest.fixture
def model() -> Any:
    found = AutoModelForCausalLM.from_pretrained(tiny_model_dir("deepseek_v3"), attn_implementation=ATTENTION_NAME)
    return found.eval().requires_grad_(False)


def attentions_of(model: Any) -> list[Any]:
    return [layer.self_attn for layer in model.model.layers]


@pytest.mark.parametrize("is_quantised", [False, True])
def test_the_matrix_expands_as_the_module_does(model: Any, is_quantised: bool) -> None:
    if is_quantised:
        quantize_linears(model, Int8Linear)
    module = attentions_of(model)[1]
    latents, rotary = torch.randn(1, 1, 5, RANK), torch.randn(1, 1, 5, ROTARY_DIM)
    wanted = module.expand_kv(latents, rotary)
    assert len(Latents(model)) == 3
    expansion = expansion_of(module)
    assert expansion is not None
    assert (expansion.rank, expansion.key_dim, expansion.value_dim) == (RANK, KEY_DIM, VALUE_DIM)
    found = expansion.expand(torch.cat([latents, rotary], dim=3)[0, 0])
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other[0], atol=0.02 * float(other.abs().max()) if is_quantised else 1e-6)


def test_absorbed_queries_and_sums_of_latents_stand_for_keys_and_values(model: Any) -> None:
    Latents(model)
    expansion = expansion_of(attentions_of(model)[0])
    assert expansion is not None
    cached, query = torch.randn(6, RANK + ROTARY_DIM), torch.randn(1, 2, NUM_HEADS, KEY_DIM + ROTARY_DIM)
    weights = torch.randn(1, 2, NUM_HEADS, 6)
    keys, values = expansion.expand(cached)
    scores = torch.einsum("qhd,hkd->qhk", query[0], keys)
    assert torch.allclose(expansion.absorbed(query)[0] @ cached.T, scores, atol=1e-5)
    summed = torch.einsum("qhk,hkd->qhd", weights[0], values)
    assert torch.allclose(expansion.values_of(weights @ cached)[0], summed, atol=1e-5)


def test_a_rank_absorbs_its_own_heads(model: Any) -> None:
    whole = attentions_of(model)[0].kv_b_proj.weight.view(NUM_HEADS, KEY_DIM + VALUE_DIM, RANK)
    for module in attentions_of(model):
        set_own_heads(module, OwnHeads(1, 2, lambda own: own))
    Latents(model)
    expansion = expansion_of(attentions_of(model)[0])
    assert expansion is not None
    assert torch.equal(expansion.weight, whole[2:])


def test_the_layers_that_expand_are_dropped(model: Any) -> None:
    spec = probe_model(model, whole_model(model)).spec
    assert (spec.num_kv_heads, spec.head_dim, spec.value_head_dim) == (1, RANK + ROTARY_DIM, 0)
    assert {module.kv_b_proj for module in attentions_of(model)} == {None}


def test_what_is_no_linear_function_of_latents_is_cached_expanded(model: Any) -> None:
    module = attentions_of(model)[2]
    module.kv_b_proj = nn.Sequential(module.kv_b_proj, nn.Tanh())
    probed = probe_model(model, whole_model(model))
    assert (probed.spec.num_kv_heads, probed.spec.head_dim, probed.spec.value_head_dim) == (4, 24, 16)
    assert {args.expansion for args in probed.attention_args} == {None}


def test_modules_that_compute_something_else_of_latents_get_keys_and_values(model: Any) -> None:
    """As a norm of keys would."""
    own = type(attentions_of(model)[0]).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        expand = self.expand_kv
        self.expand_kv = lambda *given: tuple(each.abs() for each in expand(*given))
        try:
            return own(self, *args, **kwargs)
        finally:
            self.expand_kv = expand

    for module in attentions_of(model):
        module.forward = forward.__get__(module)
    assert probe_model(model, whole_model(model)).spec.value_head_dim == 16

"""How models are cut into the stages of a pipeline."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from common.engine.contract.kv_groups import KVGroupSpec
from common.engine.model.kv_groups import share_blocks
from common.engine.model.probe import probe_model
from common.engine.model.stages import cut_stage, share_layers
from common.errors import ConfigError
from tests.architectures.models import model_dir
from tests.tiny_models import random_model, reference_model, tiny_config, tiny_model_dir

CUT = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "mixtral", "qwen3_moe", "gpt_oss", "deepseek_v3")


@given(st.lists(st.integers(1, 50), min_size=1, max_size=9), st.integers(1, 9))
def test_no_cut_has_a_cheaper_most_expensive_stage(costs, num_stages):
    if num_stages > len(costs):
        with pytest.raises(ConfigError, match=f"{num_stages} stages cannot share {len(costs)} layers"):
            share_layers(costs, num_stages)
        return
    runs = share_layers(costs, num_stages)
    assert [layer for run in runs for layer in run] == list(range(len(costs)))
    assert min(map(len, runs)) > 0
    most = max(sum(costs[layer] for layer in run) for run in runs)
    assert most <= cheapest(tuple(costs), num_stages)


def cheapest(costs, num_stages):
    """The cost of the most expensive stage in the best of all cuts."""
    if num_stages == 1:
        return sum(costs)
    firsts = range(1, len(costs) - num_stages + 2)
    return min(max(sum(costs[:first]), cheapest(costs[first:], num_stages - 1)) for first in firsts)


def test_equal_costs_are_shared_out_evenly():
    assert list(map(len, share_layers([1] * 8, 4))) == [2, 2, 2, 2]
    assert sorted(map(len, share_layers([10, 1, 1, 1, 1], 3))) == [1, 2, 2]


def group_of(*layers):
    return KVGroupSpec(layers, 2, 16, 16, "float32")


def test_each_stage_has_as_many_layers_of_a_block_whatever_its_group():
    runs = [range(2), range(2, 6)]
    assert share_blocks([group_of(*range(6))], runs) == (2, 4)
    assert share_blocks([group_of(0, 2, 4), group_of(1, 3, 5)], runs) == (1, 2)
    with pytest.raises(ConfigError, match=r"the stages have \[2, 1\] layers of one KV group, and \[0, 3\] of another"):
        share_blocks([group_of(0, 1, 2), group_of(3, 4, 5)], runs)


def stages_of(directory, num_stages):
    """The model of each stage, and its stage."""
    whole = reference_model(directory).state_dict()
    for number in range(num_stages):
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        model.load_state_dict(whole)
        yield model.eval(), cut_stage(model, number, num_stages)


def passed_through(stages, inputs):
    positions = torch.arange(len(inputs))[None]
    with torch.inference_mode():
        for model, stage in stages:
            inputs = stage.forward(model, inputs, positions, 0)
    return inputs


@pytest.mark.parametrize("name", CUT)
@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_one_after_the_other_compute_what_the_model_does(name, num_stages):
    directory = tiny_model_dir(name)
    tokens = torch.arange(20)
    with torch.inference_mode():
        expected = reference_model(directory)(tokens[None]).logits[0]
    stages = list(stages_of(directory, num_stages))
    torch.testing.assert_close(passed_through(stages, tokens), expected)
    parameters = [{name for name, _ in model.named_parameters() if ".layers." in name} for model, _ in stages]
    for number, names in enumerate(parameters):
        assert not any(names & others for others in parameters[:number])


def test_stages_have_the_states_that_lie_beside_their_kv():
    directory, tokens = model_dir("qwen3_next", times=3), torch.arange(20)
    with torch.inference_mode():
        expected = reference_model(directory)(tokens[None]).logits[0]
    stages = list(stages_of(directory, 2))
    assert sorted((len(stage.layers), len(stage.kv_layers)) for _, stage in stages) == [(3, 1), (6, 2)]
    torch.testing.assert_close(passed_through(stages, tokens), expected)
    model = AutoModelForCausalLM.from_pretrained(directory)
    with pytest.raises(ConfigError, match="cannot each have KV and the states beside it; at most 3 can"):
        cut_stage(model, 0, 4)


@pytest.mark.parametrize("class_name", ["GraniteConfig", "CohereConfig"])
def test_what_a_model_does_to_its_embeddings_is_done_once(class_name, tmp_path):
    factors = {"embedding_multiplier": 3.0} if class_name == "GraniteConfig" else {}
    random_model(tiny_config(class_name, **factors)).save_pretrained(tmp_path)
    tokens = torch.arange(20)
    with torch.inference_mode():
        expected = reference_model(tmp_path)(tokens[None]).logits[0]
    torch.testing.assert_close(passed_through(stages_of(tmp_path, 2), tokens), expected)


@pytest.mark.parametrize("name", ["gpt2", "opt"])
def test_a_model_without_a_plan_is_refused(name):
    model = AutoModelForCausalLM.from_pretrained(tiny_model_dir(name))
    with pytest.raises(ConfigError, match="has no plan of how to cut it into stages") as raised:
        cut_stage(model, 0, 2)
    assert raised.value.param == "pipeline_parallel_size"


def test_a_model_whose_layers_get_more_than_hidden_states_is_refused(monkeypatch):
    model, stage = list(stages_of(tiny_model_dir("llama"), 2))[1]
    forward = model.model.rotary_emb.forward

    def depending(hidden, *args, **kwargs):
        return [each + hidden.sum() for each in forward(hidden, *args, **kwargs)]

    monkeypatch.setattr(model.model.rotary_emb, "forward", depending)
    with pytest.raises(ConfigError, match="depend on more than what the layer before computes"):
        probe_model(model, stage)

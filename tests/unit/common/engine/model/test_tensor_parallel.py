"""Ranks in processes of their own generate what transformers generates with the whole model."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from common.demo_model import demo_model_path
from common.engine.config import ModelConfig
from common.engine.model.loader import load_model
from common.engine.model.parallel_plan import Place, plan_of
from common.engine.model.rank_loader import outline_of
from common.errors import ConfigError
from tests.architectures.models import model_dir
from tests.dequantized import save_dequantized
from tests.tiny_models import (
    TINY_MODELS,
    prompt_of,
    random_model,
    reference_generate,
    reference_model,
    tiny_config,
    tiny_model_dir,
)
from tests.unit.common.engine.model.rank_process import RankProcesses
from tools.quantize_checkpoint import quantize_checkpoint

PLANNED = ("llama", "qwen3", "mistral", "gemma2", "gemma3", "mixtral", "qwen3_moe")
NOT_CUT_BY_HEADS = ("phi3", "deepseek_v3")  # by their plans
PROMPTS = [prompt_of(length) for length in (1, 5, 22)]
NUM_TOKENS = 8


@pytest.fixture(scope="module")
def processes():
    processes = RankProcesses(4)
    yield processes
    processes.close()


@pytest.fixture
def run(processes):
    def run(size, directory, **job):
        return processes.run(
            size, **{"model": str(directory), "prompts": PROMPTS, "num_tokens": NUM_TOKENS, "chunk": 5, **job}
        )

    return run


@pytest.fixture
def error_of(run):
    def error_of(size, directory, **job):
        answers = run(size, directory, **job)
        assert answers == [answers[0]] * size
        return answers[0]["error"], answers[0]["param"], answers[0]["message"]

    return error_of


def expected_of(directory):
    return [reference_generate(directory, prompt, NUM_TOKENS) for prompt in PROMPTS]


def saved(directory, config, **generation):
    model = random_model(config)
    model.generation_config = GenerationConfig(**generation)
    model.save_pretrained(directory)
    return directory


FUSED = ("llama", "qwen3", "mistral")
CASES = [
    *((2, model, {}, "fused" if model in FUSED else "attention") for model in PLANNED),
    (2, "llama", {"cpu_kernels": "reference"}, "torch"),
    (4, "llama", {}, "fused"),  # with four, each KV head is on two ranks
    *(
        pytest.param(size, model, {"cpu_kernels": "reference"}, "torch", marks=pytest.mark.matrix)
        for size in (2, 4)
        for model in PLANNED
        if (size, model) != (2, "llama")
    ),
]


@pytest.mark.cell(feature="{model}", degrees="{size}")
@pytest.mark.parametrize(("size", "model", "settings", "kernels"), CASES)
def test_ranks_generate_what_the_whole_model_generates(run, size, model, settings, kernels):
    directory = tiny_model_dir(model)
    whole = load_model(ModelConfig(model=str(directory), device="cpu", cpu_kernels="reference"))
    for answer in run(size, directory, settings=settings):
        assert answer["tokens"] == expected_of(directory)
        assert answer["kernels"] == kernels
        assert answer["layout"] == [size, 2]
        assert answer["bytes_per_block"] == whole.kv_spec.bytes_per_block(4) // 2  # at least one KV head each


OTHERS = {
    "apertus": ("ApertusConfig", {}),
    "cohere2": ("Cohere2Config", {"sliding_window": 12}),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16}),
    "exaone4": ("Exaone4Config", {"head_dim": 16, "sliding_window": 12}),
    "glm4": ("Glm4Config", {"head_dim": 16}),
    "granite": ("GraniteConfig", {}),
    "helium": ("HeliumConfig", {"head_dim": 12}),
    "nemotron": ("NemotronConfig", {}),
    "phi": ("PhiConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {"num_experts": 4, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    ),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16}),
    "smollm3": ("SmolLM3Config", {}),
    "starcoder2": ("Starcoder2Config", {"sliding_window": 12}),
}


@pytest.mark.cell(feature="{name}", degrees="2")
@pytest.mark.matrix
@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_on_two_ranks(run, tmp_path, name):
    config_class, settings = OTHERS[name]
    directory = saved(tmp_path, tiny_config(config_class, **settings))
    for answer in run(2, directory):
        assert answer.get("tokens") == expected_of(directory), answer.get("message")


@pytest.mark.cell(feature="states of {name}", degrees="{size}")
@pytest.mark.parametrize(
    ("size", "name"),
    [
        (2, "qwen3_next"),
        pytest.param(4, "qwen3_next", marks=pytest.mark.matrix),  # each KV head is on two ranks
        *(
            pytest.param(2, name, marks=pytest.mark.matrix)
            for name in (
                "granitemoehybrid",
                "jamba",
                "kimi_linear",
                "minimax",
                "olmo_hybrid",
                "qwen3_5_moe_text",
                "qwen3_5_text",
            )
        ),
    ],
)
def test_ranks_compute_whole_states(run, size, name):
    directory = model_dir(name)
    for answer in run(size, directory, block_size=16):
        assert answer.get("tokens") == expected_of(directory), answer.get("message")


def test_a_plan_that_cuts_a_state_is_refused():
    config = AutoConfig.from_pretrained(model_dir("qwen3_next"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model._tp_plan = {**model.tp_plan, "model.layers.*.linear_attn.out_proj": "rowwise"}
    with pytest.raises(ConfigError, match=r"cuts model\.layers\.0\.linear_attn\.out_proj, of a layer that keeps"):
        plan_of(model, 0, 2)


def test_a_plan_that_cuts_no_layer_is_refused():
    config = AutoConfig.from_pretrained(model_dir("nemotron_h"))  # whose experts are cut, but has none
    with pytest.raises(ConfigError, match="the plan of NemotronHForCausalLM cuts none of its layers"):
        outline_of(config, torch.float32, Place(0, 2))


def test_all_at_once_equals_chunks(run):
    directory = tiny_model_dir("llama")
    for answer in run(2, directory, chunk=1000):
        assert answer["tokens"] == expected_of(directory)


@pytest.mark.parametrize("settings", [{}, {"cpu_kernels": "reference"}])
def test_steps_without_logits(run, settings):
    directory = tiny_model_dir("llama")
    for answer in run(2, directory, prompts=PROMPTS[2:], settings=settings):
        assert answer["tokens"] == expected_of(directory)[2:]


def test_all_ranks_draw_the_same_tokens(run):
    sampling = {"temperature": 0.9, "top_p": 0.9, "seed": 5, "presence_penalty": 0.3}
    one, other = run(2, tiny_model_dir("qwen3"), sampling=sampling)
    alone, *_ = run(1, tiny_model_dir("qwen3"), sampling=sampling)
    assert one["tokens"] == other["tokens"] == alone["tokens"] != expected_of(tiny_model_dir("qwen3"))


@pytest.mark.parametrize("settings", [{}, {"cpu_kernels": "reference"}])
def test_a_vocabulary_that_ranks_cannot_share_evenly_and_biases_that_count_once(run, tmp_path, settings):
    config = tiny_config("LlamaConfig", vocab_size=255, attention_bias=True, mlp_bias=True)
    directory = saved(tmp_path, config)
    for size in (2, 4):
        for answer in run(size, directory, settings=settings):
            assert answer["tokens"] == expected_of(directory)


@pytest.mark.parametrize("settings", [{}, {"cpu_kernels": "reference"}])
def test_tied_output_layer_and_rotary_embeddings_that_depend_on_the_length(run, tmp_path, settings):
    rope = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
    config = tiny_config("Qwen2Config", tie_word_embeddings=True, rope_parameters=rope)
    directory = saved(tmp_path, config, eos_token_id=[7, 9])
    for answer in run(2, directory, settings=settings):
        assert answer["tokens"] == expected_of(directory)
        assert answer["eos"] == [7, 9]
        if settings:  # the output layer's weights are those of the embedding
            assert answer["num_bytes"] == 4 * sum(
                num for name, num in answer["num_weights"].items() if not name.startswith("lm_head")
            )


def test_outputs_that_are_gathered_and_inputs_that_are_split(run, tmp_path):
    directory = saved(tmp_path, tiny_config("GlmConfig", head_dim=16))
    for answer in run(2, directory):
        assert answer["tokens"] == expected_of(directory)


def test_batch_invariance_on_two_ranks(run):
    directory = demo_model_path()
    answers = run(2, directory, settings={"batch_invariant": True}, block_size=16)
    (alone,) = run(1, directory, settings={"batch_invariant": True}, block_size=16)
    assert answers[0]["tokens"] == answers[1]["tokens"] == alone["tokens"]
    assert answers[0]["fingerprint"] == answers[1]["fingerprint"] != alone["fingerprint"]


def test_batch_invariance_on_four_ranks_that_share_memory(run, error_of, tmp_path):
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = tiny_config("LlamaConfig", head_dim=64, num_hidden_layers=1, vocab_size=512, **sizes)
    job = {"settings": {"batch_invariant": True}, "sampling": {"temperature": 0.0, "num_logprobs": 1}}
    job |= {"directory": saved(tmp_path, config), "block_size": 16}
    together = run(4, **job)
    alone = [run(4, **job, prompts=[prompt], chunk=1000)[0] for prompt in PROMPTS]
    assert [answer["logprobs"] for answer in together] == [[each["logprobs"][0] for each in alone]] * 4
    error, param, message = error_of(4, **job, shares_memory=False)
    assert (error, param) == ("ConfigError", "batch_invariant")
    assert "4 that do not share memory" in message


def test_kernels_that_fail_on_one_rank_are_used_on_none(run):
    directory = tiny_model_dir("llama")
    answers = run(2, directory, broken=1)
    assert [answer["tokens"] for answer in answers] == [expected_of(directory)] * 2
    assert [answer["kernels"] for answer in answers] == ["torch"] * 2


@pytest.mark.parametrize("model", PLANNED)
def test_buffers_are_those_of_the_whole_model(run, model):
    whole = {name: buffer.tolist() for name, buffer in reference_model(tiny_model_dir(model)).named_buffers()}
    assert whole
    assert run(2, tiny_model_dir(model))[1]["buffers"] == whole


def test_a_rank_reads_only_its_part(run):
    directory = tiny_model_dir("llama")
    whole = {name: weight.numel() for name, weight in reference_model(directory).named_parameters()}
    for answer in run(4, directory, settings={"cpu_kernels": "reference"}):
        for name, num_weights in answer["num_weights"].items():
            share = 1 if "norm" in name else 2 if "k_proj" in name or "v_proj" in name else 4
            row_of_zeros = 48 if "embed" in name else 0
            name = name.replace("lm_head.head.", "lm_head.")  # see HeadInputs
            assert num_weights == whole[name] // share + row_of_zeros, name
        assert answer["num_bytes"] == 4 * sum(answer["num_weights"].values())


def test_the_fingerprint_is_that_of_the_whole_model(run):
    directory = tiny_model_dir("llama")
    fingerprints = {answer["fingerprint"] for size in (1, 2, 4) for answer in run(size, directory)}
    assert len(fingerprints) == 1


@pytest.mark.parametrize("model", ["gpt2", "opt", "gpt_oss"])
def test_a_model_without_a_plan_is_refused(error_of, model):
    error, param, message = error_of(2, tiny_model_dir(model))
    assert (error, param) == ("ConfigError", "tensor_parallel_size")
    assert "has no plan" in message


@pytest.mark.parametrize(("size", "model"), [*((2, model) for model in NOT_CUT_BY_HEADS), (4, "phi3")])
def test_attention_whose_plan_does_not_cut_it_by_heads(run, size, model):
    directory = tiny_model_dir(model)
    for answer in run(size, directory):
        assert answer["tokens"] == expected_of(directory)


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ("Olmo2Config", {}),
        (
            "DeepseekV2Config",
            {
                "kv_lora_rank": 16,
                "q_lora_rank": None,
                "qk_rope_head_dim": 8,
                "qk_nope_head_dim": 8,
                "v_head_dim": 16,
                "first_k_dense_replace": 3,
                "num_key_value_heads": 4,
            },
        ),
    ],
)
def test_norms_over_all_heads_and_latent_attention(run, tmp_path, config, settings):
    directory = saved(tmp_path, tiny_config(config, **settings))
    for answer in run(2, directory):
        assert answer["tokens"] == expected_of(directory)


def test_experts_multiplied_from_the_right_and_a_language_model_among_others(run, tmp_path):
    """As in the checkpoints of Llama 4."""
    directory = model_dir("llama4_text")
    shutil.copytree(directory, tmp_path, dirs_exist_ok=True)
    weights = {f"language_model.{name}": weight for name, weight in load_file(directory / "model.safetensors").items()}
    weights["vision_model.scale"] = weights["language_model.lm_head.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    for answer in run(2, tmp_path):
        assert answer["tokens"] == expected_of(directory)
        assert answer["layout"] == [2, 2]


def test_a_plan_that_is_not_supported_is_refused(error_of, tmp_path):
    directory = saved(tmp_path, tiny_config("GraniteSWAConfig"))
    error, param, message = error_of(2, directory)
    assert (error, param) == ("ConfigError", "tensor_parallel_size")
    assert "has style" in message


def test_experts_are_read_in_the_order_of_their_numbers(run, tmp_path):
    config = tiny_config("MixtralConfig", num_local_experts=12, num_experts_per_tok=2, intermediate_size=32)
    directory = saved(tmp_path, config)
    whole = {name: weight.numel() for name, weight in reference_model(directory).named_parameters()}
    for answer in run(2, directory):
        assert answer["tokens"] == expected_of(directory)
        for name, num_weights in answer["num_weights"].items():
            of_module = name.replace("experts.experts", "experts")  # experts with kernels have a module around theirs
            assert "experts" not in name or num_weights == whole[of_module] // 2


def test_a_missing_expert_is_refused(error_of, tmp_path):
    shutil.copytree(tiny_model_dir("mixtral"), tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    (last,) = [name for name in weights if "layers.2." in name and name.endswith("experts.3.w2.weight")]
    del weights[last]
    save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
    error, _, message = error_of(2, tmp_path)
    assert error == "ModelLoadError"
    assert "model.layers.2.mlp.experts.down_proj" in message


def test_every_model_is_cut_or_refused(run):
    for model in set(TINY_MODELS) - {*PLANNED, *NOT_CUT_BY_HEADS}:
        assert run(2, tiny_model_dir(model))[0]["error"] == "ConfigError"


@pytest.mark.parametrize(
    ("size", "overrides", "reason"),
    [
        (3, {}, "3 ranks cannot share 4 heads evenly"),
        (2, {"num_attention_heads": 6, "num_key_value_heads": 3}, "2 ranks cannot share 3 KV heads evenly"),
        (2, {"intermediate_size": 95}, "2 ranks cannot share the 95 outputs of model.layers.0.mlp.gate_proj evenly"),
    ],
)
def test_a_degree_that_does_not_divide_is_refused(error_of, tmp_path, size, overrides, reason):
    directory = saved(tmp_path, tiny_config("LlamaConfig", **overrides))
    assert error_of(size, directory) == (
        "ConfigError",
        "tensor_parallel_size",
        f"--tensor-parallel-size: {reason}",
    )


def test_weights_under_other_names_are_refused(error_of, tmp_path):
    shutil.copytree(tiny_model_dir("llama"), tmp_path, dirs_exist_ok=True)
    AutoModelForCausalLM.from_pretrained(tmp_path).model.save_pretrained(tmp_path)  # without the prefix "model."
    config = json.loads((tiny_model_dir("llama") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    error, param, message = error_of(2, tmp_path)
    assert (error, param) == ("ModelLoadError", "model")
    assert "model.embed_tokens.weight" in message


def test_weights_of_another_shape_are_refused(error_of, tmp_path):
    directory = saved(tmp_path, tiny_config("LlamaConfig"))
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "intermediate_size": 48}))
    error, _, message = error_of(2, directory)
    assert error == "ModelLoadError"
    assert "model.layers.0.mlp" in message
    assert "[96, 48]" in message


@pytest.mark.parametrize("model", ["llama", "phi3"])
def test_int8_weights_are_those_of_one_rank(run, model):
    job = {"directory": tiny_model_dir(model), "settings": {"quantization": "int8"}}
    (alone,) = run(1, **job)
    assert [answer["tokens"] for answer in run(2, **job)] == [alone["tokens"]] * 2


@pytest.mark.parametrize("model", ["llama", "mixtral", "phi3"])
@pytest.mark.parametrize(
    ("name", "size"),
    [("gptq-zeros", 2), *(pytest.param("gptq-8bit", size, marks=pytest.mark.matrix) for size in (2, 4))],
)
def test_quantised_checkpoints_are_cut(run, tmp_path, name, model, size):
    quantize_checkpoint(tiny_model_dir(model), tmp_path / "quantized", name, 24)
    expected = expected_of(save_dequantized(tmp_path / "quantized", tmp_path / "dequantized"))
    for answer in run(size, tmp_path / "quantized"):
        assert answer.get("tokens") == expected, answer.get("message")


def test_inputs_in_the_order_of_their_activations_are_not_cut(run, tmp_path):
    quantize_checkpoint(tiny_model_dir("llama"), tmp_path, "gptq-act-order", 16)
    message = "is not cut between inputs 0 and 24: inputs that are ordered by activation"
    answers = run(2, tmp_path)  # the one that refuses may be gone before the other has met it
    assert any(message in answer["message"] for answer in answers)


def test_a_rank_that_does_not_come_is_named(processes, tmp_path):
    job = {"model": str(tiny_model_dir("llama")), "prompts": PROMPTS, "num_tokens": 1, "join_timeout_s": 0.5}
    answers = processes.answers(processes.submit(range(2), 4, tmp_path, **job))
    assert [answer["error"] for answer in answers] == ["EngineDeadError"] * 2
    assert answers[0]["message"] == "rank 2 and rank 3 of 4 did not join within 0.5 s"

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    RecurrentGemmaConfig,
    RwkvConfig,
    T5Config,
    T5ForConditionalGeneration,
    XGLMConfig,
)
from transformers import utils as transformers_utils

from common.demo_model import demo_model_path
from common.engine.config import ModelConfig
from common.engine.devices.cpu import device as cpu_device
from common.engine.devices.cpu import quantized_linear
from common.engine.model import adapters
from common.engine.model.loader import load_model
from common.engine.quantization.int8 import Int8Linear
from common.errors import ConfigError, ModelLoadError
from tests.tiny_models import MAX_MODEL_LEN, TINY_MODELS, VOCAB_SIZE, tiny_model_dir


@pytest.fixture
def model_dir(tmp_path):
    return shutil.copytree(tiny_model_dir("llama"), tmp_path / "model")


def edit_config(model_dir, **changes):
    path = model_dir / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def refused(model_dir, **settings):
    """The error of loading, which must be one line that names the setting."""
    with pytest.raises(ModelLoadError) as caught:
        load_model(ModelConfig(model=str(model_dir), **settings))
    assert caught.value.param == "model"
    assert "\n" not in caught.value.message
    return caught.value.message


def save_tiny(config, directory):
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    return directory


@pytest.mark.parametrize("name", TINY_MODELS)
def test_what_models_cache(name):
    loaded = load_model(ModelConfig(model=str(tiny_model_dir(name)), cpu_kernels="reference"))
    spec = loaded.kv_spec
    config = loaded.model.config
    assert config.num_hidden_layers == len(loaded.attention_modules) == sum(len(g.layers) for g in loaded.kv_groups)
    assert spec.num_layers == max(len(group.layers) for group in loaded.kv_groups)
    assert (loaded.vocab_size, loaded.max_model_len) == (VOCAB_SIZE, MAX_MODEL_LEN)
    assert (loaded.dtype, spec.dtype) == (torch.float32, torch.float32)
    if name == "deepseek_v3":
        assert (spec.num_kv_heads, spec.head_dim, spec.value_head_dim) == (1, 16 + 8, 0)  # latents
    else:
        assert spec.num_kv_heads == (4 if name in {"opt", "gpt2"} else 2)
        assert spec.head_dim == spec.value_head_dim


def test_dtype_is_as_asked(model_dir):
    loaded = load_model(ModelConfig(model=str(model_dir), dtype="bfloat16"))
    assert (loaded.dtype, loaded.kv_spec.dtype) == (torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize(
    ("own", "multiplies", "expected"),
    [
        ("bfloat16", True, torch.bfloat16),
        ("bfloat16", False, torch.float32),
        ("float16", True, torch.float32),
        ("float32", True, torch.float32),
    ],
)
def test_auto_is_bfloat16_for_models_in_it_where_the_processor_multiplies_it(
    model_dir, monkeypatch, own, multiplies, expected
):
    edit_config(model_dir, dtype=own)
    monkeypatch.setattr(cpu_device, "MULTIPLIES_PAIRS", multiplies)
    loaded = load_model(ModelConfig(model=str(model_dir), device="cpu"))
    assert (loaded.dtype, loaded.kv_spec.dtype) == (expected, expected)


def test_auto_is_float32_where_batches_must_not_matter(tmp_path, monkeypatch):
    demo = shutil.copytree(demo_model_path(), tmp_path / "model")
    edit_config(demo, dtype="bfloat16")
    monkeypatch.setattr(cpu_device, "MULTIPLIES_PAIRS", True)
    assert load_model(ModelConfig(model=str(demo), device="cpu", batch_invariant=True)).dtype == torch.float32


def test_eos_of_generation_config_wins(model_dir):
    edit_config(model_dir, eos_token_id=2)
    assert load_model(ModelConfig(model=str(model_dir))).eos_token_ids == {2}
    (model_dir / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load_model(ModelConfig(model=str(model_dir))).eos_token_ids == {5, 6}


def test_length_stays_where_rotary_frequencies_do_not_change(tmp_path):
    model_dir = shutil.copytree(tiny_model_dir("phi3"), tmp_path / "model")
    factors = [1.0] * 6
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": factors, "long_factor": factors}
    edit_config(model_dir, rope_parameters=rope, original_max_position_embeddings=64)
    assert load_model(ModelConfig(model=str(model_dir))).max_model_len == 64


def test_loading_is_silent(model_dir, capfd):
    was_enabled = transformers_utils.logging.is_progress_bar_enabled()
    load_model(ModelConfig(model=str(model_dir)))
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")
    assert transformers_utils.logging.is_progress_bar_enabled() == was_enabled


def test_missing_directory(tmp_path):
    assert "does not exist" in refused(tmp_path / "nowhere")
    assert "does not exist" in refused(Path("~nobody/model"))
    assert "does not exist" in refused(tmp_path / ("0" * 4000))


def test_file_instead_of_directory(tmp_path):
    (tmp_path / "file").touch()
    assert "is not a directory" in refused(tmp_path / "file")


def test_a_config_that_contradicts_itself(model_dir):
    config = json.loads((model_dir / "config.json").read_text())
    config["layer_types"] = ["full_attention"] * (config["num_hidden_layers"] + 1)
    (model_dir / "config.json").write_text(json.dumps(config))
    assert "num_hidden_layers" in refused(model_dir)  # not only that some validator failed


def test_no_config(model_dir):
    (model_dir / "config.json").unlink()
    assert "has no config.json" in refused(model_dir)


@pytest.mark.parametrize("content", ["{", "[]", '{"model_type": "nonsense"}', "{}"])
def test_unparsable_config(model_dir, content):
    (model_dir / "config.json").write_text(content)
    refused(model_dir)


def test_no_weights(model_dir):
    (model_dir / "model.safetensors").unlink()
    assert "has no safetensors weights" in refused(model_dir)


def test_missing_shard(model_dir):
    (model_dir / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (model_dir / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00001-of-00002.safetensors" in refused(model_dir)
    (model_dir / "model.safetensors.index.json").write_text("{}")
    assert "model.safetensors.index.json cannot be read" in refused(model_dir)


def test_truncated_weights(model_dir):
    weights = model_dir / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "cannot be loaded" in refused(model_dir)


def test_weights_of_fewer_layers(model_dir):
    edit_config(model_dir, num_hidden_layers=4)
    assert "lacks" in refused(model_dir)


def test_encoder_decoder(tmp_path):
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    assert "encoder-decoder" in refused(tmp_path)


def test_no_attention(tmp_path):
    config = RwkvConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2)
    refused(save_tiny(config, tmp_path))


def test_a_state_in_the_code_of_the_model(tmp_path):
    config = RecurrentGemmaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=3,
                                  num_attention_heads=2, lru_width=32)  # fmt: skip
    assert "linear_attention" in refused(save_tiny(config, tmp_path))


def test_attention_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delitem(adapters._FAMILIES, "xglm")
    config = XGLMConfig(vocab_size=64, d_model=32, num_layers=1, attention_heads=2, ffn_dim=64)
    assert "does not use transformers' attention interface" in refused(save_tiny(config, tmp_path))


def test_remote_code_is_never_run(model_dir):
    edit_config(model_dir, model_type="mine", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.M"})
    (model_dir / "evil.py").write_text("raise SystemExit('ran remote code')")
    refused(model_dir)


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without CUDA")
def test_device_that_is_not_there(model_dir):
    with pytest.raises(ConfigError, match="cuda") as caught:
        load_model(ModelConfig(model=str(model_dir), device="cuda"))
    assert caught.value.param == "device"


def test_int8_is_for_cpus(model_dir, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ConfigError, match="no kernels for int8") as caught:
        load_model(ModelConfig(model=str(model_dir), quantization="int8"))
    assert caught.value.param == "quantization"


def test_checkpoints_that_are_quantised(model_dir):
    edit_config(model_dir, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ConfigError, match=r"the checkpoint's are quantised \(gptq\)") as caught:
        load_model(ModelConfig(model=str(model_dir), quantization="int8"))
    assert caught.value.param == "quantization"
    edit_config(model_dir, quantization_config={"quant_method": "hqq"})  # which is left to transformers
    assert "hqq" in refused(model_dir).lower()


def test_quantisation_of_few_weights_is_warned_of(tmp_path, caplog):
    load_model(ModelConfig(model=str(tiny_model_dir("qwen3_moe")), quantization="int8"))
    assert "covers only" in caplog.text
    caplog.clear()
    load_model(ModelConfig(model=str(tiny_model_dir("llama")), quantization="int8"))
    assert not caplog.text


def test_int8_kernels_that_fail_are_not_used(model_dir, monkeypatch, caplog):
    def fail(*args, **kwargs):
        raise RuntimeError("LLVM IR parsing error")

    monkeypatch.setattr(quantized_linear, "_check_kernels", fail)
    for name in ("llama", "gemma2"):
        loaded = load_model(ModelConfig(model=str(tiny_model_dir(name)), quantization="int8"))
        assert (loaded.decoder, loaded.kernels, loaded.kernels_failed) == (None, "torch", True)
        assert any(isinstance(module, Int8Linear) for module in loaded.model.modules())
        assert "LLVM IR parsing error" in caplog.text
        caplog.clear()


def test_float_weights_are_given_up(model_dir):
    loaded = load_model(ModelConfig(model=str(tiny_model_dir("gemma2")), quantization="int8"))
    kept = [weight for weight in loaded.model.parameters() if weight.device.type != "meta" and weight.dim() > 1]
    assert [tuple(weight.shape) for weight in kept] == [(VOCAB_SIZE, 48)]  # the embedding

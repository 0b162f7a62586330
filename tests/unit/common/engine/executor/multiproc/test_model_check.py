"""What the model's configuration decides is refused before there are ranks."""

import json
import shutil
from pathlib import Path

import pytest

from common.engine.config import EngineConfig, ModelConfig, ParallelConfig
from common.engine.executor.multiproc import executor as executor_module
from common.engine.executor.multiproc import model_check
from common.engine.executor.multiproc.executor import MultiprocExecutor
from common.engine.model.loader import check_ranks
from common.errors import ConfigError, EngineDeadError, ModelLoadError
from tests.tiny_models import tiny_model_dir

TENSOR, STAGES, EXPERTS = "tensor_parallel_size", "pipeline_parallel_size", "enable_expert_parallel"


def changed(architecture: str, directory: Path, **changes: object) -> Path:
    """A model's configuration, without weights."""
    own = json.loads((tiny_model_dir(architecture) / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(own | changes))
    return directory


@pytest.mark.parametrize(
    ("architecture", "changes", "settings", "param", "problem"),
    [
        ("llama", {}, {TENSOR: 3}, TENSOR, "3 ranks cannot share 4 heads evenly"),
        ("llama", {"num_key_value_heads": 3, "num_attention_heads": 6}, {TENSOR: 2}, TENSOR, "cannot share 3 KV heads"),
        ("llama", {"intermediate_size": 95}, {TENSOR: 2}, TENSOR, "cannot share the 95 outputs of model.layers.0.mlp"),
        ("mixtral", {"intermediate_size": 95}, {TENSOR: 2}, TENSOR, "cannot share the width of 95 of model.layers.0"),
        ("gpt2", {}, {TENSOR: 2}, TENSOR, "GPT2LMHeadModel has no plan"),
        ("llama", {"quantization_config": {"quant_method": "hqq"}}, {TENSOR: 2}, TENSOR, "checkpoints that are quant"),
        ("llama", {}, {STAGES: 4}, STAGES, "4 stages cannot share 3 layers"),
        ("gpt2", {}, {STAGES: 2}, STAGES, "GPT2LMHeadModel has no plan of how to cut it into stages"),
        ("llama", {}, {STAGES: 2, TENSOR: 3}, TENSOR, "3 ranks cannot share 4 heads evenly"),
        ("llama", {}, {TENSOR: 2, EXPERTS: True}, EXPERTS, "LlamaForCausalLM has no mixture of experts"),
        ("mixtral", {"num_local_experts": 3}, {TENSOR: 2, EXPERTS: True}, EXPERTS, "cannot share the 3 experts of"),
        ("mixtral", {}, {"data_parallel_size": 3, EXPERTS: True}, EXPERTS, "cannot share the 4 experts of"),
    ],
)
def test_what_is_refused(
    tmp_path: Path,
    architecture: str,
    changes: dict[str, object],
    settings: dict[str, object],
    param: str,
    problem: str,
) -> None:
    model = ModelConfig(model=str(changed(architecture, tmp_path, **changes)), device="cpu")
    with pytest.raises(ConfigError, match=f"^--{param.replace('_', '-')}: .*{problem}") as raised:
        check_ranks(model, ParallelConfig(**settings))
    assert raised.value.param == param


def test_more_ranks_than_gpus_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    model = ModelConfig(model=str(changed("llama", tmp_path)), device="cuda")
    with pytest.raises(ConfigError, match="--rank-devices: 3, but there are 2 GPUs"):
        check_ranks(model, ParallelConfig(tensor_parallel_size=4))


@pytest.mark.parametrize(
    ("architecture", "settings"),
    [
        ("llama", {TENSOR: 4}),
        ("llama", {TENSOR: 2, STAGES: 3}),
        ("phi3", {TENSOR: 2}),
        ("mixtral", {"data_parallel_size": 2, EXPERTS: True}),
        ("qwen3_moe", {TENSOR: 2, EXPERTS: True}),
    ],
)
def test_what_ranks_can_share_passes(tmp_path: Path, architecture: str, settings: dict[str, object]) -> None:
    model = ModelConfig(model=str(changed(architecture, tmp_path)), device="cpu")
    check_ranks(model, ParallelConfig(**settings))


def test_no_rank_is_started_for_a_model_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr(executor_module, "start_rank", lambda *arguments: started.append(arguments))
    model = ModelConfig(model=str(tiny_model_dir("llama")), device="cpu")
    executor = MultiprocExecutor(EngineConfig(model=model, parallel=ParallelConfig(tensor_parallel_size=3)))
    try:
        with pytest.raises(ConfigError, match=r"^--tensor-parallel-size: 3 ranks cannot share 4 heads evenly$"):
            executor.load_model()
    finally:
        executor.close()
    assert not started


def test_a_model_that_is_not_there_is_an_error_of_its_own_kind(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"has no config\.json") as raised:
        check_ranks(ModelConfig(model=str(tmp_path), device="cpu"), ParallelConfig(tensor_parallel_size=2))
    assert raised.value.param == "model"


def test_a_check_that_fails_or_hangs_ends_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_check.sys, "executable", shutil.which("false"))
    with pytest.raises(EngineDeadError, match="the check of the model ended with code 1"):
        model_check.check_model(EngineConfig())
    hanging = tmp_path / "hanging"
    hanging.write_text("#!/bin/sh\nexec sleep 100\n")
    hanging.chmod(0o700)
    monkeypatch.setattr(model_check.sys, "executable", str(hanging))
    monkeypatch.setattr(model_check, "_TIMEOUT_S", 0.1)
    with pytest.raises(EngineDeadError, match=r"has not ended within 0\.1 s"):
        model_check.check_model(EngineConfig())

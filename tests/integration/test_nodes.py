"""Models over several machines, which are processes of this one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from common.engine.client.inproc import InprocClient
from common.engine.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from common.engine.executor.multiproc.executor import MultiprocExecutor
from common.engine.messages import AddRequest
from common.errors import ModelLoadError
from common.types import RequestId, SamplingParams
from tests.tiny_models import prompt_of, reference_generate, tiny_model_dir
from tests.unit.common.engine.executor.multiproc.nodes_rig import node, on_nodes

MAX_TOKENS = 12


def config_of(model: Path, directory: Path, **sizes: int) -> EngineConfig:
    config = EngineConfig(
        model=ModelConfig(model=str(model), device="cpu"),
        cache=CacheConfig(block_size=4, num_blocks=64),
        parallel=ParallelConfig(**(sizes or {"tensor_parallel_size": 2})),
    )
    return on_nodes(config, directory)


@pytest.mark.cell(feature="llama on two machines")
@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.cell(degrees="2")),
        pytest.param({"pipeline_parallel_size": 2}, marks=[pytest.mark.slow, pytest.mark.cell(degrees="1x2")]),
    ],
)
def test_tokens_of_two_machines_are_those_of_transformers(tmp_path: Path, sizes: dict[str, int]) -> None:
    model = tiny_model_dir("llama")
    config = config_of(model, tmp_path, **sizes)
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    tokens: list[int] = []
    with node(config), InprocClient(config, MultiprocExecutor(config)) as client:
        client.add_request(AddRequest(request_id=RequestId("r"), prompt_token_ids=prompt_of(33), sampling=params))
        while client.has_unfinished:
            tokens += [token.token_id for output in client.step().outputs for token in output.tokens]
        client.check_integrity()
    assert tokens == reference_generate(model, prompt_of(33), MAX_TOKENS)


@pytest.mark.slow
def test_other_model_files_are_refused_before_weights_are_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path is the same; on the other machine it leads elsewhere."""
    one, two = tmp_path / "one", tmp_path / "two"
    shutil.copytree(tiny_model_dir("llama"), one)
    shutil.copytree(one, two)
    weights = load_file(two / "model.safetensors")
    name = next(iter(weights))
    weights[name] = weights[name] + 1
    save_file(weights, two / "model.safetensors", {"format": "pt"})
    config = config_of(Path("model"), tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "model").symlink_to(one)
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "model").symlink_to(two)
    monkeypatch.chdir(tmp_path / "there")
    with node(config):
        monkeypatch.chdir(tmp_path / "here")
        with pytest.raises(ModelLoadError, match="rank 1, on node 1, has other model files than rank 0"):
            InprocClient(config, MultiprocExecutor(config))

"""What ranks of a model take, without its weights."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from cli.main import main
from common.engine.devices.ranks import OneRank
from common.engine.model.parallel_plan import Place
from common.engine.model.rank_loader import load_rank, outline_of, weight_bytes
from common.engine.model.stage_links import OneStage
from common.errors import ConfigError
from planning.ranks import PROCESS_BYTES, rank_table
from tests.tiny_models import tiny_model_dir


class _FirstOfTwo(OneRank):
    size = 2


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mixtral"])
def test_weights_are_as_large_as_those_that_a_rank_loads(architecture: str) -> None:
    directory = tiny_model_dir(architecture)
    config = AutoConfig.from_pretrained(directory)
    files = sorted(directory.glob("*.safetensors"))
    loaded, _ = load_rank(directory, files, config, torch.float32, _FirstOfTwo(), None, OneStage())
    num_bytes, half = (
        weight_bytes(outline_of(config, dtype, Place(0, 2))) for dtype in (torch.float32, torch.bfloat16)
    )
    assert num_bytes == 2 * half == sum(each.nbytes for each in loaded.parameters())


def test_ranks_have_parts_of_weights_and_kv_but_one_kv_head_at_least() -> None:
    directory = tiny_model_dir("llama")
    config = AutoConfig.from_pretrained(directory)
    table = rank_table(str(directory), [1, 2, 4, 3], None)
    one, two, four = table.sizes
    head = 2 * config.num_hidden_layers * config.hidden_size // config.num_attention_heads * 4
    assert one.kv_per_token == table.handoff_per_token == config.num_key_value_heads * head
    assert (two.kv_per_token, four.kv_per_token) == (max(1, config.num_key_value_heads // 2) * head, head)
    assert one.weights > two.weights > four.weights
    heads = f"--tensor-parallel-size: 3 ranks cannot share {config.num_attention_heads} heads evenly"
    assert table.refused == {3: heads}
    with pytest.raises(ConfigError, match=heads):
        rank_table(str(directory), [3], None)
    assert table.fewest(PROCESS_BYTES + one.weights + one.kv_per_token) == one
    assert table.fewest(PROCESS_BYTES + one.weights - 1) == two
    assert table.fewest(PROCESS_BYTES) is None


def test_quantised_kv_has_a_scale_for_each_head() -> None:
    directory = tiny_model_dir("llama")
    config = AutoConfig.from_pretrained(directory)
    table = rank_table(str(directory), [1], None, kv_cache_dtype="int8")
    head_dim = config.hidden_size // config.num_attention_heads
    assert table.handoff_per_token == 2 * config.num_hidden_layers * config.num_key_value_heads * (head_dim + 2)
    with pytest.raises(ConfigError, match="--kv-cache-dtype: int8, but"):
        rank_table(str(tiny_model_dir("deepseek_v3")), [1], None, kv_cache_dtype="int8")


def test_every_rank_has_all_latents() -> None:
    directory = tiny_model_dir("deepseek_v3")
    config = AutoConfig.from_pretrained(directory)
    table = rank_table(str(directory), [1, 2], None)
    latents = config.num_hidden_layers * (config.kv_lora_rank + config.qk_rope_head_dim) * 4
    assert {each.kv_per_token for each in table.sizes} == {table.handoff_per_token} == {latents}


def test_stages_have_runs_of_layers_and_ranks_whole_experts() -> None:
    directory = str(tiny_model_dir("mixtral"))
    (plain,) = rank_table(directory, [2], None).sizes
    (staged,) = rank_table(directory, [2], None, pipeline_parallel_size=3).sizes
    (whole,) = rank_table(directory, [2], None, enable_expert_parallel=True).sizes
    assert [each.kv_per_token * 3 for each in staged.stages] == [plain.kv_per_token] * 3
    norm = 4 * AutoConfig.from_pretrained(directory).hidden_size  # the last one, which all stages have
    assert sum(each.weights for each in staged.stages) == plain.weights + 2 * norm
    assert staged.weights == max(each.weights for each in staged.stages) < plain.weights
    assert staged.num_tokens(staged.least + 10 * staged.kv_per_token) == 10
    assert whole.weights == plain.weights  # half of the experts, or half of each
    with pytest.raises(ConfigError, match="--enable-expert-parallel: not with --pipeline-parallel-size"):
        rank_table(directory, [2], None, enable_expert_parallel=True, pipeline_parallel_size=2)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "ranks", "--memory", "1GiB"]) == 0
    text = capsys.readouterr().out
    assert re.search(r"^ +2 .* 2,048 B +32,768 B", text, re.MULTILINE)
    assert "8  refused: --tensor-parallel-size: 8 ranks cannot share 4 heads evenly" in text
    assert "It takes 1 rank.\nA handoff moves 4,096 B for each token" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--memory", "much"], "--memory: not a size in bytes: 'much'"),
        (["--memory", "1GB", "--tensor-parallel-size", "0"], "--tensor-parallel-size: must be an integer from 1 to"),
        (["--memory", "1GB", "--tensor-parallel-size", "7"], "--tensor-parallel-size: 7 ranks cannot share 4 heads"),
        (["/nowhere", "--memory", "1GB"], "/nowhere: "),
        (["--memory", "80"], "--memory: 80 bytes hold neither weights nor a block of any rank"),
        (["--memory", "1GB", "--pipeline-parallel-size", "x"], "--pipeline-parallel-size: must be an integer"),
        (["--memory", "1GB", "--pipeline-parallel-size", "99"], "--pipeline-parallel-size: 99 stages cannot share"),
    ],
)
def test_what_is_refused(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "ranks", *argv]) == 2
    assert message in capsys.readouterr().err


def test_a_model_that_only_pools_has_no_head_for_text(tmp_path: Path) -> None:
    source = tiny_model_dir("llama")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["LlamaModel"]}))
    (whole,), (bare,) = (rank_table(str(directory), [1], None).sizes for directory in (source, tmp_path))
    assert whole.weights - bare.weights == 4 * config["vocab_size"] * config["hidden_size"]

"""The comparison's checkpoints and prompts, and pages where a side takes no part in a row."""

from __future__ import annotations

import json
import random
from contextlib import nullcontext
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from benchmarks.compare import offline
from benchmarks.compare.checkpoints import PRECISIONS, Checkpoint, Precision, checkpoint_of, write_counting
from benchmarks.compare.limits import Limits, work_of
from benchmarks.compare.offline import Row
from benchmarks.compare.peers import NAMES
from benchmarks.compare.report import offline_columns, offline_row, plot, speculation_columns, speculation_row
from benchmarks.compare.side import Generation
from benchmarks.compare.speculation import MEASURES
from benchmarks.harness.processes import ChildEndedError
from tests.tiny_models import tiny_model_dir

INT8 = PRECISIONS["int8"]


def test_the_int8_checkpoint_of_vllm_has_the_weights_of_the_model(tmp_path: Path) -> None:
    source = tiny_model_dir("qwen3")
    assert checkpoint_of("baton", source, INT8, tmp_path) == Checkpoint(source, INT8.dtype, "int8")
    directory, _, quantization = checkpoint_of("vllm", source, INT8, tmp_path)
    assert quantization is None
    weights, written = load_file(source / "model.safetensors"), load_file(directory / "model.safetensors")
    scales = {name.removesuffix("_scale"): written.pop(name) for name in list(written) if name.endswith("_scale")}
    assert written.keys() == weights.keys()
    assert {name.split(".")[-2] for name in scales} == {
        f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
    }
    for name, weight in weights.items():
        if name in scales:
            assert written[name].dtype == torch.int8
            assert ((written[name] * scales[name] - weight).abs() <= scales[name] * 0.501).all()
        else:
            assert torch.equal(written[name], weight)
    config = json.loads((directory / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert config["hidden_size"] == json.loads((source / "config.json").read_text())["hidden_size"]


def test_baton_and_llama_cpp_load_one_file_of_q4_k(tmp_path: Path) -> None:
    source, precision = tiny_model_dir("qwen3"), PRECISIONS["q4_k"]
    assert [side for side in NAMES if precision.suits(side)] == ["baton", "llamacpp"]
    directory, _, quantization = checkpoint_of("baton", source, precision, tmp_path)
    assert checkpoint_of("llamacpp", source, precision, tmp_path).directory == directory / "model.gguf"
    assert quantization is None
    assert not list(directory.glob("*.safetensors"))


def test_the_limit_of_int8_reads_a_byte_for_each_weight() -> None:
    source = tiny_model_dir("qwen3")
    bfloat16 = work_of(source, PRECISIONS["bfloat16"])
    int8 = work_of(source, Precision("int8", "bfloat16", "int8"))
    assert (2 * int8.weight_bytes, int8.kv_bytes) == (bfloat16.weight_bytes, bfloat16.kv_bytes)


def test_the_counting_model_goes_on_with_the_next_token(tmp_path: Path) -> None:
    write_counting(tiny_model_dir("qwen3"), tmp_path / "counting")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "counting", dtype=torch.bfloat16)
    prompt = torch.tensor([[7, 200, 3, 40]])
    assert model.generate(prompt, max_new_tokens=20, do_sample=False)[0, 4:].tolist() == [*range(41, 61)]


def test_prompts_for_speculation_have_most_of_the_answer() -> None:
    prompt = MEASURES[1].prompt(random.Random(0), 1000, 101)  # one of 8 is changed
    kept = sum(token == prompt[-1] + place for place, token in enumerate(prompt[:-1], 1))
    assert 75 <= kept < 100


def test_ratios_of_speculation_are_of_the_same_turn() -> None:
    figures = {
        "baton": [10.0, 20.0, 30.0],
        "baton_ngram": [30.0, 40.0, 60.0],
        "vllm": [1.0] * 3,
        "vllm_ngram": [2.0] * 3,
    }
    row = Row("demo", "float32", "batch 1", "tokens/s", True, figures, 1.0, dict.fromkeys(figures, True))
    cells = speculation_row(row)
    assert speculation_columns(list(figures)).count(" | ") == cells.count(" | ")
    assert "| 2 [2, 3] | 2 [2, 2] | 20 [15, 30] | yes |" in cells


def test_rows_without_a_side_leave_its_cells_empty() -> None:
    figures, same = {"baton": [2.0], "vllm": [1.0]}, {"baton": True, "vllm": False}
    int8 = Row("demo", "int8", "decode, batch 1", "ms", False, figures, 1.0, same)
    float32 = int8._replace(precision="float32", figures={**figures, "transformers": [4.0]})
    rows = [float32, int8]
    names = ["baton", "vllm", "transformers"]
    first, second = (offline_row(row, names) for row in rows)
    assert offline_columns(names).count(" | ") == first.count(" | ") == second.count(" | ")
    assert "| 0.50 | 2.00 | 50 % | not vLLM |" in first
    assert "| 0.50 |  | 50 % | not vLLM (by design) |" in second
    assert ElementTree.fromstring(plot(rows, names)).tag.endswith("svg")


def test_a_side_that_does_not_start_is_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Answering(nullcontext):
        def __init__(self, name: str, _checkpoint: Checkpoint, _log: Path) -> None:
            super().__init__(self)
            self.name = name
            if name == "openvino":
                raise ChildEndedError("ended with code 1")

        def generate(self, prompts: list[list[int]], num_tokens: int) -> Generation:
            return Generation([[1] * num_tokens for _ in prompts], 1.0, [1.0])

    monkeypatch.setattr(offline, "Side", Answering)
    monkeypatch.setattr(offline, "_REST_S", 0)
    work, limits = work_of(tiny_model_dir("qwen3"), INT8), Limits("bfloat16", 1.0, 1.0)
    checkpoints = dict.fromkeys(("baton", "openvino", "llamacpp"), Checkpoint(Path(), "bfloat16", None))
    (row,) = offline.measure_model("tiny", "int8", checkpoints, offline.MEASURES[:1], 1, work, limits, Path())
    assert list(row.figures) == ["baton", "llamacpp"]
    assert "openvino does not take part: ended with code 1" in capsys.readouterr().err

"""`baton up` with a quantised copy of the demo model gives the texts of the numbers that its weights stand for."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from common.demo_model import demo_model_path
from common.engine.llm import LLM
from common.types import SamplingParams
from tests.dequantized import save_dequantized
from tests.e2e.cluster import running_cluster
from tools.quantize_checkpoint import quantize_checkpoint

PROMPTS = ["Once upon a time", "The capital of France is", "a b c " * 40]
NUM_TOKENS = 24
DEADLINE_S = 120.0


@pytest.mark.slow
def test_texts_are_those_of_the_dequantised_weights(tmp_path: Path) -> None:
    quantized, dequantized = tmp_path / "quantized", tmp_path / "dequantized"
    quantize_checkpoint(Path(demo_model_path()), quantized, "awq", 32)
    save_dequantized(quantized, dequantized)
    (dequantized / "tokenizer.json").symlink_to(quantized / "tokenizer.json")
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM(dequantized, device="cpu", dtype="float32", num_blocks=256) as llm:
        expected = [each.text for each in llm.generate(PROMPTS, params, use_tqdm=False)]
    with running_cluster(str(quantized), "--dtype", "float32", "--remote-prefill", "prefer") as cluster:
        for prompt, text in zip(PROMPTS, expected, strict=True):
            body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True}
            answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=DEADLINE_S)
            assert answer.json()["choices"][0]["text"] == text
        cluster.check_integrity()

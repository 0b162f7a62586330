from pathlib import Path

import pytest

from benchmarks.int8.quality import Weights, held_out_texts, measure_quality, tokenize
from common.demo_model import demo_model_path


@pytest.mark.slow
def test_int8_costs_little_quality() -> None:
    model = Path(demo_model_path())
    texts = tokenize(model, held_out_texts(24), max_tokens=200)
    own, int8 = measure_quality(model, texts, [Weights("float32"), Weights("float32", "int8")])
    assert own.perplexity < 10
    assert (own.perplexity_ratio, own.same_best_token, own.same_continuation, own.max_difference) == (1, 1, 1, 0)
    assert int8.perplexity_ratio == pytest.approx(1, abs=0.01)
    assert int8.same_best_token > 0.99
    assert int8.same_continuation > 0.8
    assert 0 < int8.mean_difference < 0.05
    assert int8.max_difference < 0.5

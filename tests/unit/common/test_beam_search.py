"""Beam search finds what `transformers` finds."""

from __future__ import annotations

import pytest
import torch

from common.beam_search import BeamSearch
from tests.tiny_models import prompt_of, reference_logprobs, reference_model, tiny_model_dir

MODEL = tiny_model_dir("llama")
EOS = [7, 40, 90]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty"), [(True, 1.0), (False, 1.0), (False, -1.0), ("never", 2.5), ("never", 0.0)]
)
def test_results_are_those_of_generate(early_stopping, length_penalty):
    width = 4
    for seed in range(2):
        prompt = prompt_of(6, seed=seed)
        search = BeamSearch(width, 12, EOS, length_penalty=length_penalty, early_stopping=early_stopping)
        while not search.is_done:
            candidates = []
            for beam in search.beams:
                best = reference_logprobs(MODEL, [*prompt, *beam.token_ids])[-1].topk(search.num_candidates)
                candidates.append(list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
            search.advance(candidates)
        with torch.inference_mode():
            expected = reference_model(MODEL).generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, 6, dtype=torch.long), max_new_tokens=12,
                num_beams=width, num_return_sequences=width, length_penalty=length_penalty, do_sample=False,
                early_stopping=early_stopping, eos_token_id=EOS, pad_token_id=0,
                output_scores=True, return_dict_in_generate=True,
            )  # fmt: skip
        for row, score, result in zip(expected.sequences, expected.sequences_scores, search.results, strict=True):
            tokens = row[6:].tolist()
            assert list(result.token_ids) == tokens[: len(result.token_ids)]
            assert not any(tokens[len(result.token_ids) :])  # padding
            assert result.score == pytest.approx(float(score), rel=1e-4)

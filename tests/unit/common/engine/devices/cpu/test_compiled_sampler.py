import numpy as np
import pytest
import torch

from common.engine.config import ModelConfig
from common.engine.contract.step import NoToken
from common.engine.devices.cpu.kernels.sampling import PART
from common.engine.devices.cpu.sampler import CompiledSampler, checked_sampler
from common.engine.model.loader import load_model
from common.engine.sampling.draws import Draws, draw_params
from common.engine.sampling.noise import stream_key
from common.engine.sampling.processors import SamplingRow
from common.engine.sampling.sampler import Sampler
from common.types import SamplingParams
from tests.tiny_models import tiny_model_dir


def sampled(logits, chosen):
    """The tokens of both samplers."""
    keys = np.array([stream_key(params.seed, 0) for params in chosen])
    draws = Draws(keys, np.array([draw_params(params) for params in chosen], dtype=np.float32))
    compiled = CompiledSampler(logits.shape[1], logits.dtype).sample(logits, draws).tolist()
    rows = [SamplingRow(params, np.array([1], dtype=np.int64), 1) for params in chosen]
    tokens = Sampler().sample(logits.float().clone(), rows)
    return compiled, [-1 if token is NoToken.NON_FINITE else token.token_id for token in tokens]


def shapes(vocab):
    generator = torch.Generator().manual_seed(vocab)
    normal = torch.randn(vocab, generator=generator)
    masked = torch.where(torch.arange(vocab) % 7 == 0, normal, -torch.inf)
    return [10 * normal, 0.01 * normal, masked, torch.zeros(vocab), 100 * normal, normal.round(decimals=1)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 7, PART, 5003])
def test_tokens_are_those_of_the_sampler(vocab, dtype):
    found = shapes(vocab)
    logits = torch.stack([found[seed % len(found)] for seed in range(60)]).to(dtype)
    chosen = [SamplingParams(seed=seed, temperature=max(0.0, (seed - 8) / 20)) for seed in range(len(logits))]
    compiled, expected = sampled(logits, chosen)
    assert compiled == expected


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_token(temperature):
    good = torch.linspace(-1.0, 1.0, 40)
    rows = [good, good.clone(), torch.full((40,), -torch.inf), good.clone(), torch.full((40,), torch.nan)]
    rows[1][3], rows[3][30] = torch.nan, torch.inf
    compiled, expected = sampled(torch.stack(rows), [SamplingParams(seed=5, temperature=temperature)] * 5)
    assert compiled == expected
    assert [token >= 0 for token in compiled] == [True, False, False, False, False]


def test_part_of_wider_logits():
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(0))[:, :40]
    compiled, expected = sampled(logits, [SamplingParams(seed=seed) for seed in range(4)])
    assert compiled == expected


def test_more_rows_than_bounds_are_kept_for():
    logits = torch.stack([torch.arange(1 << 20) % 1000 * 0.01] * 6)
    compiled, expected = sampled(logits, [SamplingParams(seed=seed) for seed in range(6)])
    assert compiled == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [1, 259, 512, 5003, 32_000])
def test_the_check_at_start_passes(vocab, dtype):
    checked_sampler(vocab, dtype)


def test_kernels_that_choose_other_tokens_are_not_used(monkeypatch, caplog):
    monkeypatch.setattr(CompiledSampler, "sample", lambda _, logits, __: np.zeros(len(logits), dtype=np.int64))
    loaded = load_model(ModelConfig(model=str(tiny_model_dir("llama"))))
    assert (loaded.row_sampler, loaded.kernels, loaded.kernels_failed) == (None, "fused", True)
    assert "choose other tokens" in caplog.text

"""Sampling on the device takes the tokens that the sampler takes."""

import itertools

import numpy as np
import pytest
import torch

from common.engine.sampling.draws import Draws, draw_params
from common.engine.sampling.noise import mixed_seed, stream_key, stream_keys
from common.engine.sampling.sampler import Sampler, SamplingRow
from common.types import SamplingParams

VOCAB_SIZE = 5000  # more than one program takes
POSITION = 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch, request):
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def sampled(logits, params):
    """By kernels, and by the sampler."""
    from common.engine.sampling.device_sampler import sample_on_device

    seeds = np.array([mixed_seed(each.settled_seed) for each in params], dtype=np.uint64)
    keys = stream_keys(seeds, np.full(len(params), POSITION))
    draws = Draws(keys, np.array([draw_params(each) for each in params], dtype=np.float32))
    found = sample_on_device(logits, draws).tolist()
    rows = [SamplingRow(each, np.zeros(POSITION, dtype=np.int64), 0) for each in params]
    tokens = Sampler().sample(logits.float().clone(), rows)
    return found, [-1 if token is None else token.token_id for token in tokens]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])  # bfloat16: with many equal logits
def test_takes_the_tokens_of_the_sampler(device, dtype):
    torch.manual_seed(0)
    kinds = [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "min_p": 0.05},
        {"temperature": 2.0, "top_k": 1},
        {"temperature": 1.5, "top_k": 7},
        {"temperature": 1.0, "top_p": 0.3},
        {"temperature": 0.8, "top_p": 0.95, "top_k": 20, "min_p": 0.01},
        {"temperature": 1e-9, "top_p": 0.5},
    ]
    params = [SamplingParams(seed=seed, **kind) for seed, kind in itertools.product(range(3), kinds)]
    found, expected = sampled((3 * torch.randn(len(params), VOCAB_SIZE, device=device)).to(dtype), params)
    assert found == expected
    assert len(set(found)) > len(params) // 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in which the interpreter computes
def test_a_row_without_a_finite_best_has_no_token(device):
    logits = torch.zeros(4, VOCAB_SIZE, device=device)
    logits[0, 4500] = torch.nan
    logits[1, 17] = torch.inf
    logits[2] = -torch.inf
    logits[3, 4999] = 1.0
    for params in (SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_p=0.5, seed=1)):
        found, _ = sampled(logits[:, :VOCAB_SIZE], [params] * 4)
        assert found[:3] == [-1, -1, -1]
        assert found[3] >= 0


def test_keys_of_many_rows_are_those_of_each():
    seeds, positions = [0, 1, 2**64 - 1, 12345], [0, 5, 7, 2**20]
    mixed = np.array([mixed_seed(seed) for seed in seeds], dtype=np.uint64)
    assert stream_keys(mixed, np.array(positions)).tolist() == list(map(stream_key, seeds, positions))

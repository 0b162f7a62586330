"""Sampling on the device takes the tokens that the sampler takes."""

import itertools

import numpy as np
import pytest
import torch

from common.engine.contract.step import NewRequest, NoToken, SchedulerOutput
from common.engine.sampling.noise import mixed_seed, stream_key, stream_keys
from common.engine.sampling.sampler import Sampler
from common.engine.worker.request_table import RequestTable
from common.types import RequestId, SamplingParams

VOCAB_SIZE = 5000  # more than one program takes
POSITION = 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def interpreter(monkeypatch, request):
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def sampled(logits, params, prompt=(), outputs=None):
    """By kernels, and by the sampler; `outputs` of each row so far."""
    from common.engine.devices.gpu.sampler import sample_on_device

    outputs = [[0] * POSITION] * len(params) if outputs is None else outputs
    table = table_of(params, prompt, outputs)
    table_rows = table.rows_of([RequestId(f"r{i}") for i in range(len(params))])
    before = logits.clone()
    lengths = table.num_tokens[table_rows]
    found = sample_on_device(logits, table.draws(table_rows, lengths), table.penalties(table_rows, lengths)).tolist()
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    rows = [table.sampling_row(*each) for each in zip(table_rows.tolist(), lengths.tolist(), strict=True)]
    tokens = Sampler().sample(logits.float().clone(), rows)
    return found, [-1 if token is NoToken.NON_FINITE else token.token_id for token in tokens]


def table_of(params, prompt, outputs):
    table = RequestTable(len(params), 64, 4, vocab_size=VOCAB_SIZE, eos_token_ids=frozenset())
    for i, (sampling, output) in enumerate(zip(params, outputs, strict=True)):
        new = NewRequest(RequestId(f"r{i}"), [*prompt, *output], len(prompt), sampling, [[1]], 0)
        table.update(SchedulerOutput(new_requests=[new]))
    return table


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_so_far_count_as_for_the_sampler(device, dtype):
    torch.manual_seed(0)
    kinds = [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6, "frequency_penalty": 1.3},
        {"frequency_penalty": -0.9, "presence_penalty": 2.0},
        {"presence_penalty": -1.5},
        {},
    ]
    draws = [{"temperature": 0.0}, {"temperature": 0.7, "top_p": 0.9}, {"temperature": 1.0, "top_k": 5}]
    params = [SamplingParams(seed=7, **draw, **kind) for draw, kind in itertools.product(draws, kinds)]
    logits = (3 * torch.randn(1, VOCAB_SIZE, device=device)).to(dtype).expand(len(params), -1)
    likely = logits[0].float().argsort(descending=True)[:12].tolist()
    prompt, generated = likely[:6], [*likely[3:9], likely[4], likely[4], 4999]  # what penalties make a difference to
    found, expected = sampled(logits, params, prompt, [generated[: i % 10] for i in range(len(params))])
    assert found == expected
    without, _ = sampled(logits, [SamplingParams(seed=7, **draw) for draw in draws for _ in kinds], prompt)
    assert sum(map(int.__ne__, found, without)) > len(params) // 3


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in which the interpreter computes
def test_penalties_do_not_make_infinities_nor_hide_them(device):
    logits = torch.zeros(3, VOCAB_SIZE, device=device)
    logits[0, 5] = logits[1, 5] = torch.finfo(torch.float32).max
    logits[1, 6] = torch.inf
    logits[2] = -torch.inf
    params = SamplingParams(temperature=0.0, repetition_penalty=0.5)
    found, expected = sampled(logits, [params] * 3, (5, 6))
    assert found == expected == [5, -1, -1]


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

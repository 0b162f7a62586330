"""As `test_batch_invariance`, with the kernels for GPUs: in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional

from common.engine.client.inproc import InprocClient
from common.engine.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from common.engine.contract.kv_groups import Window
from common.engine.devices.attention import AttentionArgs, AttentionMetadata
from tests.integration.batch_invariance_rig import alone, run
from tests.tiny_models import tiny_model_dir

GPU = pytest.mark.gpu
DEVICES = ["cpu", pytest.param("cuda", marks=GPU)]


@pytest.fixture
def device(request, monkeypatch):
    if request.param == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        from triton.runtime.interpreter import InterpreterBuilder

        monkeypatch.setattr(InterpreterBuilder, "create_dot", _dot)
    return request.param


def _dot(_, a, b, d, *__):
    """The interpreter's product of tiles, whose rows numpy's BLAS rounds by their place in the tile on some processors,
    as no GPU does."""
    from triton.runtime.interpreter import TensorHandle

    left, right = (each.data.astype(d.data.dtype) for each in (a, b))
    return TensorHandle((left[:, :, None] * right[None]).sum(axis=1) + d.data, d.dtype.scalar)


def create(device, dtype, *, budget=2048, prefix_caching=False):
    model = ModelConfig(model=str(tiny_model_dir("qwen3")), device=device, dtype=dtype, batch_invariant=True)
    return InprocClient(
        EngineConfig(
            model=model,
            cache=CacheConfig(block_size=16, num_blocks=20, enable_prefix_caching=prefix_caching),
            scheduler=SchedulerConfig(max_num_batched_tokens=budget, target_itl_ms=None, max_num_seqs=8),
        )
    )


@pytest.mark.parametrize(
    ("device", "dtype"),  # the interpreter computes in float32 anyway, slowly
    [
        pytest.param("cpu", "float32", marks=pytest.mark.kernels),
        *(pytest.param("cuda", dtype, marks=GPU) for dtype in ("float32", "bfloat16")),
    ],
    indirect=["device"],
)
def test_whatever_the_schedule(device, dtype):
    source = random.Random(0)
    prompts = [[source.randrange(3, 100) for _ in range(length)] for length in (12, 1)]
    with create(device, dtype) as client:
        expected = alone(client, prompts)
    with create(device, dtype, budget=7, prefix_caching=True) as client:
        assert run(client, prompts, arrivals=[0, 3]) == expected


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize(("in_features", "out_features"), [(64, 96), (100, 70)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_a_linear_layer(device, dtype, in_features, out_features):
    from common.engine.devices.gpu.operators import BatchInvariantLinear

    torch.manual_seed(0)
    layer = nn.Linear(in_features, out_features, bias=out_features == 70).to(device=device, dtype=dtype)
    inputs = torch.randn(150, in_features, device=device, dtype=dtype)
    linear = BatchInvariantLinear(layer)
    whole = linear(inputs)
    bias = None if layer.bias is None else layer.bias.double()
    tolerance = 1e-5 if dtype == torch.float32 else 2**-7
    expected = functional.linear(inputs.double(), layer.weight.double(), bias)
    torch.testing.assert_close(whole.double(), expected, atol=tolerance, rtol=tolerance)
    for start, end in ((0, 0), (3, 4), (0, 64), (63, 150)):
        assert torch.equal(linear(inputs[start:end]), whole[start:end])


LENGTH, BLOCK_SIZE, KV_HEADS, HEADS, HEAD_DIM = 150, 16, 2, 6, 64
BLOCKS = -(-LENGTH // BLOCK_SIZE)
ARGS = {
    "plain": AttentionArgs(0.125),
    "window and sinks": AttentionArgs(0.2, window=Window(70), sinks=torch.linspace(-1, 2, HEADS)),
}


@pytest.mark.parametrize("device", DEVICES, indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.kernels)])
@pytest.mark.parametrize("args", ARGS)
def test_attention_in_chunks_and_as_decodes(device, dtype, args):
    from common.engine.devices.gpu.attention import BatchInvariantTritonAttention

    torch.manual_seed(0)
    args = ARGS[args] if ARGS[args].sinks is None else replace(ARGS[args], sinks=ARGS[args].sinks.to(device))
    cache = torch.zeros(BLOCKS + 1, 1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM, device=device, dtype=dtype)
    query, key, value = (
        torch.randn(LENGTH, heads, HEAD_DIM, device=device).to(dtype) for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    backend = BatchInvariantTritonAttention(cache)

    def attend(*spans):
        """Tokens from one to another of the sequence, several times side by side: decodes first."""
        positions = torch.cat([torch.arange(*span) for span in spans]).to(device)
        ends = [end for _, end in spans]
        batch = AttentionMetadata(
            num_decodes=sum(end - start == 1 for start, end in spans),
            query_start=[0, *torch.tensor([end - start for start, end in spans]).cumsum(0).tolist()],
            seq_lens=ends,
            seq_lens_tensor=torch.tensor(ends, device=device),
            block_tables=torch.arange(1, BLOCKS + 1, device=device).expand(len(spans), -1).contiguous(),
            slot_mapping=BLOCK_SIZE + positions,
        )
        backend.begin_step(batch)
        out = backend.attend(0, *(each[positions][None] for each in (query, key, value)), args)[0]
        return torch.split(out, [end - start for start, end in spans])

    (whole,) = attend((0, LENGTH))
    for spans in ([(7, 40)], [(LENGTH - 1, LENGTH)], [(99, 100), (40, 41), (128, 129), (100, LENGTH), (5, 70)]):
        for (start, end), out in zip(spans, attend(*spans), strict=True):
            assert torch.equal(out, whole[start:end])

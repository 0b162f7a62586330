"""Attention over latents by the Triton kernel: in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from common.engine.devices.attention import AttentionArgs, LatentExpansion
from common.engine.devices.torch.attention import chunks_of
from common.engine.devices.torch.latent_attention import TorchLatentAttention, expands
from tests.unit.common.engine.devices.gpu.kernels.test_kernels import (
    DTYPES,
    GPU,
    LAYER,
    TOLERANCE,
    cases,
    filled_cache,
    interpreter,  # noqa: F401  a fixture
)

KEY_DIM, VALUE_DIM = 6, 10
# dtype, numbers of latents and of rotary parts, block size, heads
QUICK = [(torch.float32, 20, 4, 16, 3), (torch.bfloat16, 64, 16, 48, 40)]
SHAPES = list(itertools.product(DTYPES, [(16, 8), (256, 32), (512, 64)], [16, 32], [4, 16, 40, 128]))


@pytest.mark.parametrize(("device", "dtype", "rank", "rotary_dim", "block_size", "num_heads"), cases(QUICK))
def test_latents(device, dtype, rank, rotary_dim, block_size, num_heads, monkeypatch):
    limit = "common.engine.devices.gpu.latent_attention._MAX_EXPANDED_BYTES"
    monkeypatch.setattr(limit, 1 << 15)  # so that a few heads are expanded at a time
    check(device, dtype, rank, rotary_dim, block_size, num_heads)


@pytest.mark.parametrize(("device", "dtype", "dims", "block_size", "num_heads"), cases(SHAPES, pytest.mark.kernels))
def test_latents_in_every_shape(device, dtype, dims, block_size, num_heads):
    check(device, dtype, *dims, block_size, num_heads)


def check(device, dtype, rank, rotary_dim, block_size, num_heads):
    """Against torch's operators in float64, from the same cache; what blocks hold beyond their sequences is NaN."""
    torch.manual_seed(0)
    cache, batch = filled_cache(device, dtype, rank + rotary_dim, block_size, 1, planes=1)
    args = attention_args(device, dtype, rank, num_heads)
    assert {expands(chunk, args.expansion) for chunk in chunks_of(batch)} == {True, False}
    num_tokens = len(batch.slot_mapping)
    query = torch.randn(1, num_tokens, num_heads, KEY_DIM + rotary_dim, device=device).to(dtype)
    cached = torch.randn(1, num_tokens, 1, rank + rotary_dim, device=device).to(dtype)
    backend = latent_attention(cache)
    backend.begin_step(batch)
    found = backend.attend(LAYER, query, cached, cached[..., :0], args)

    reference = TorchLatentAttention(cache.double().nan_to_num())
    reference.begin_step(batch)
    exact = attention_args(device, torch.float64, rank, num_heads, args.expansion.weight)
    expected = reference.attend(LAYER, query.double(), cached.double(), cached[..., :0].double(), exact)
    torch.testing.assert_close(found.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("device", ["cpu", GPU])
def test_a_place_without_a_sequence_is_not_written(device):
    """There are such in CUDA graphs of more decodes than a step has."""
    torch.manual_seed(0)
    cache, batch = filled_cache(device, torch.float32, 24, 16, 1, planes=1)
    slot = int(batch.slot_mapping[0])
    backend = latent_attention(cache)
    backend.begin_step(
        replace(
            batch,
            num_decodes=2,
            query_start=[0, 1, 2],
            seq_lens=batch.seq_lens[:2],
            seq_lens_tensor=torch.tensor([batch.seq_lens[0], 0], device=device),
            slot_mapping=torch.tensor([slot, -1], device=device),
        )
    )
    expected = cache.clone()
    cached = torch.randn(1, 2, 1, 24, device=device)
    args = attention_args(device, torch.float32, 16, 4)
    found = backend.attend(LAYER, torch.randn(1, 2, 4, KEY_DIM + 8, device=device), cached, cached[..., :0], args)
    assert found[0, 0].isfinite().all()
    assert not found[0, 1].any()
    expected[slot // 16, LAYER, 0, 0, slot % 16] = cached[0, 0, 0]
    torch.testing.assert_close(cache, expected, rtol=0, atol=0, equal_nan=True)


def latent_attention(kv_cache):
    from common.engine.devices.gpu.latent_attention import TritonLatentAttention

    return TritonLatentAttention(kv_cache)


def attention_args(device, dtype, rank, num_heads, weight=None):
    if weight is None:
        weight = torch.randn(num_heads, KEY_DIM + VALUE_DIM, rank, device=device) * rank**-0.5
    return AttentionArgs(0.2, expansion=LatentExpansion(weight.to(dtype), KEY_DIM))

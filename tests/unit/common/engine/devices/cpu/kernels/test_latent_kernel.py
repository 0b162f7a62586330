"""Decode attention over latents, over shapes of heads and blocks, against softmax written out."""

import itertools

import pytest
import torch

from common.engine.devices.cpu.kernels.compiled import Call
from common.engine.devices.cpu.kernels.language import element_type_of
from common.engine.devices.cpu.kernels.latent_attention import LatentShape, latent_decode_kernel
from tests.unit.common.engine.devices.cpu.kernels.test_decode_kernel import SCORES, softmax_attention

NUM_LAYERS, LAYER = 2, 1
LENGTHS = [57, 33, 16, 2, 1]
QUICK = [
    (torch.float32, 512, 64, 16, 16, SCORES[0]),
    (torch.bfloat16, 64, 32, 16, 40, SCORES[3]),
    (torch.float32, 16, 8, 4, 4, SCORES[1]),
    (torch.bfloat16, 32, 16, 48, 3, SCORES[2]),
]
ALL = list(
    itertools.product(
        [torch.float32, torch.bfloat16], [64, 256, 512], [16, 64], [4, 8, 16, 48], [4, 8, 24, 128], SCORES
    )
)


@pytest.mark.parametrize(("dtype", "rank", "rotary_dim", "block_size", "num_heads", "scores"), QUICK)
def test_equals_softmax(dtype, rank, rotary_dim, block_size, num_heads, scores):
    check(dtype, rank, rotary_dim, block_size, num_heads, scores)


@pytest.mark.kernels
@pytest.mark.parametrize(("dtype", "rank", "rotary_dim", "block_size", "num_heads", "scores"), ALL)
def test_equals_softmax_in_every_shape(dtype, rank, rotary_dim, block_size, num_heads, scores):
    check(dtype, rank, rotary_dim, block_size, num_heads, scores)


@pytest.mark.parametrize(("block_size", "num_heads", "dim"), [(2, 4, 64), (4, 3, 64), (16, 4, 62)])
def test_shapes_that_have_no_kernel(block_size, num_heads, dim):
    assert not LatentShape(element_type_of(torch.float32), 1, num_heads, block_size, dim - 16, 16).is_supported


def check(dtype, rank, rotary_dim, block_size, num_heads, scores):
    torch.manual_seed(0)
    counts = [-(-length // block_size) for length in LENGTHS]
    dim = rank + rotary_dim
    cache = torch.randn(sum(counts) + 1, NUM_LAYERS, 1, 1, block_size, dim).to(dtype)
    query = torch.randn(len(LENGTHS), num_heads, dim).mul(0.3).to(dtype)
    sinks = torch.randn(num_heads)
    blocks = torch.randperm(sum(counts)).add(1).split(counts)
    tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True)
    seq_lens = torch.tensor(LENGTHS)
    out = torch.empty(len(LENGTHS), num_heads, rank, dtype=dtype)
    shape = LatentShape(element_type_of(dtype), NUM_LAYERS, num_heads, block_size, rank, rotary_dim)
    assert shape.is_supported
    Call(
        latent_decode_kernel(shape, scores),
        cache=cache[0, LAYER].data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        block_tables=tables.data_ptr(),
        table_width=tables.shape[1],
        sinks=sinks.data_ptr(),
        query=query.data_ptr(),
        out=out.data_ptr(),
    ).run(len(LENGTHS) * num_heads // shape.group, 2)
    for i, (length, own_blocks) in enumerate(zip(LENGTHS, blocks, strict=True)):
        both = cache[own_blocks, LAYER].float().expand(-1, 2, -1, -1, -1)
        expected = softmax_attention(query[i].float(), both, length, sinks, scores)[:, :rank]
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype] * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(out[i].float(), expected, atol=tolerance, rtol=0)

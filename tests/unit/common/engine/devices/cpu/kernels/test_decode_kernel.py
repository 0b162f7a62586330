"""Decode attention over shapes of heads and blocks, against softmax written out."""

import itertools

import pytest
import torch

from common.engine.contract.kv_groups import Window
from common.engine.devices.cpu.kernels.attention import CacheShape, Scores, decode_kernel
from common.engine.devices.cpu.kernels.compiled import Call
from common.engine.devices.cpu.kernels.language import element_type_of

NUM_LAYERS, LAYER = 2, 1
LENGTHS = [57, 33, 16, 2, 1]
PLAIN = Scores(0.125)
SCORES = [
    PLAIN,
    Scores(0.2, window=Window(7)),
    Scores(0.1, softcap=5.0),
    Scores(0.3, window=Window(40), has_sinks=True),
    Scores(0.2, window=Window(20, is_chunked=True)),
]
QUICK = [
    (torch.float32, 64, 16, 2, 3, PLAIN),
    (torch.bfloat16, 128, 16, 1, 4, SCORES[3]),
    (torch.float32, 80, 48, 2, 1, SCORES[1]),
    (torch.bfloat16, 8, 1, 1, 8, SCORES[2]),
    (torch.float32, 6, 2, 1, 7, SCORES[3]),
    (torch.float32, 64, 16, 1, 2, SCORES[4]),
]
ALL = [
    *itertools.product([torch.float32, torch.bfloat16], [64, 128], [1, 4, 16, 48, 128], [2], [1, 3, 4, 16], SCORES),
    *itertools.product([torch.float32, torch.bfloat16], [2, 12, 32, 80, 96, 256], [16], [1], [1, 5, 8], SCORES),
]


@pytest.mark.parametrize(("dtype", "head_dim", "block_size", "num_kv_heads", "group", "scores"), QUICK)
def test_equals_softmax(dtype, head_dim, block_size, num_kv_heads, group, scores):
    check(dtype, head_dim, block_size, num_kv_heads, group, scores)


@pytest.mark.kernels
@pytest.mark.parametrize(("dtype", "head_dim", "block_size", "num_kv_heads", "group", "scores"), ALL)
def test_equals_softmax_in_every_shape(dtype, head_dim, block_size, num_kv_heads, group, scores):
    check(dtype, head_dim, block_size, num_kv_heads, group, scores)


def check(dtype, head_dim, block_size, num_kv_heads, group, scores):
    torch.manual_seed(0)
    counts = [-(-length // block_size) for length in LENGTHS]
    num_heads = num_kv_heads * group
    cache = torch.randn(sum(counts) + 1, NUM_LAYERS, 2, num_kv_heads, block_size, head_dim).to(dtype)
    query = torch.randn(len(LENGTHS), num_heads, head_dim).to(dtype)
    sinks = torch.randn(num_heads)
    blocks = torch.randperm(sum(counts)).add(1).split(counts)
    tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True)
    seq_lens = torch.tensor(LENGTHS)
    out = torch.empty_like(query)
    shape = CacheShape(element_type_of(dtype), NUM_LAYERS, num_heads, num_kv_heads, block_size, head_dim)
    Call(
        decode_kernel(shape, scores),
        cache=cache[0, LAYER].data_ptr(),
        seq_lens=seq_lens.data_ptr(),
        block_tables=tables.data_ptr(),
        table_width=tables.shape[1],
        sinks=sinks.data_ptr(),
        query=query.data_ptr(),
        query_stride=num_heads * head_dim,
        out=out.data_ptr(),
    ).run(len(LENGTHS) * num_kv_heads, 2)
    for i, (length, own_blocks) in enumerate(zip(LENGTHS, blocks, strict=True)):
        expected = softmax_attention(query[i].float(), cache[own_blocks, LAYER].float(), length, sinks, scores)
        tolerance = {torch.float32: 3e-6, torch.bfloat16: 1e-2}[dtype] * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(out[i].float(), expected, atol=tolerance, rtol=0)


def softmax_attention(query, cached, length, sinks, scores):
    """Of a query [heads, head_dim] over blocks [blocks, 2, kv heads, block size, head_dim]."""
    keys, values = cached.permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :length]
    group = len(query) // len(keys)
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    logits = torch.einsum("hd,htd->ht", query, keys) * scores.scale
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    if scores.window is not None:
        size, is_chunked = scores.window
        logits[:, : (length - 1) // size * size if is_chunked else max(0, length - size)] = -torch.inf
    extra = sinks[:, None] if scores.has_sinks else torch.full((len(query), 1), -torch.inf)
    weights = torch.softmax(torch.cat([logits, extra], dim=1), dim=1)[:, :-1]
    return torch.einsum("ht,htd->hd", weights, values)

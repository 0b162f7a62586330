"""Attention of chunks over shapes of heads and blocks, against softmax written out."""

import itertools

import pytest
import torch

from common.engine.contract.kv_groups import Window
from common.engine.devices.cpu.kernels.attention import CacheShape, Scores
from common.engine.devices.cpu.kernels.chunk_attention import (
    can_attend_chunks,
    chunk_attention_kernel,
    rows_per_task,
    whole_tiles,
)
from common.engine.devices.cpu.kernels.compiled import Call
from common.engine.devices.cpu.kernels.language import element_type_of
from common.engine.devices.cpu.kernels.tiles import has_tiles

NUM_LAYERS, LAYER = 2, 1
PLAIN = Scores(0.125)
SCORES = [
    PLAIN,
    Scores(0.2, window=Window(7)),
    Scores(0.1, softcap=5.0),
    Scores(0.3, window=Window(70), has_sinks=True),
    Scores(0.2, window=Window(21, is_chunked=True)),
]
CHUNKS = [(1, 1), (5, 5), (40, 40), (1, 77), (70, 133), (33, 300)]  # query tokens, tokens of the sequence
STEEP = Scores(1.5)  # maxima grow by more than what weights are kept relative to
QUICK = [
    (64, 16, 2, 3, PLAIN),
    (64, 16, 1, 2, STEEP),
    (128, 32, 1, 4, SCORES[3]),
    (96, 48, 2, 1, SCORES[1]),
    (64, 16, 1, 7, SCORES[2]),
    (64, 16, 1, 3, SCORES[4]),
]
ALL = list(itertools.product([32, 64, 96, 128, 256], [16, 48, 128], [2], [1, 3, 8], SCORES))
VARIANTS = [
    pytest.param(torch.float32, False, id="float32"),
    pytest.param(torch.bfloat16, False, id="bfloat16 in vectors"),
    pytest.param(
        torch.bfloat16,
        True,
        id="bfloat16",
        marks=pytest.mark.skipif(not has_tiles(), reason="the processor has no matrix instructions"),
    ),
]


@pytest.mark.parametrize(("dtype", "tiled"), VARIANTS)
@pytest.mark.parametrize(("head_dim", "block_size", "num_kv_heads", "group", "scores"), QUICK)
def test_equals_softmax(dtype, tiled, head_dim, block_size, num_kv_heads, group, scores):
    check(dtype, tiled, head_dim, block_size, num_kv_heads, group, scores)


@pytest.mark.kernels
@pytest.mark.parametrize(("dtype", "tiled"), VARIANTS)
@pytest.mark.parametrize(("head_dim", "block_size", "num_kv_heads", "group", "scores"), ALL)
def test_equals_softmax_in_every_shape(dtype, tiled, head_dim, block_size, num_kv_heads, group, scores):
    check(dtype, tiled, head_dim, block_size, num_kv_heads, group, scores)


def check(dtype, tiled, head_dim, block_size, num_kv_heads, group, scores):
    torch.manual_seed(0)
    num_heads = num_kv_heads * group
    sinks = torch.randn(num_heads)
    shape = CacheShape(element_type_of(dtype), NUM_LAYERS, num_heads, num_kv_heads, block_size, head_dim)
    kernel = chunk_attention_kernel(shape, scores, tiled=tiled)
    for num_tokens, seq_len in CHUNKS:
        num_blocks = -(-seq_len // block_size)
        cache = torch.randn(num_blocks + 1, NUM_LAYERS, 2, num_kv_heads, block_size, head_dim).to(dtype)
        padded = torch.randn(num_tokens, num_heads + 2, head_dim).to(dtype)  # queries are part of longer rows
        table, lengths = torch.randperm(num_blocks) + 1, torch.tensor([seq_len])
        out = torch.full((num_tokens, num_heads, head_dim), torch.nan, dtype=dtype)
        num_tiles = -(-num_tokens * group // rows_per_task(tiled=tiled))
        Call(
            kernel,
            cache=cache[0, LAYER].data_ptr(),
            query=padded.data_ptr(),
            query_stride=padded.stride(0),
            out=out.data_ptr(),
            block_tables=table.data_ptr(),
            table_width=num_blocks,
            seq_lens=lengths.data_ptr(),
            sinks=sinks.data_ptr(),
            configuration=whole_tiles() if tiled else 0,
            num_tokens=num_tokens,
            num_tiles=num_tiles,
        ).run(num_tiles * num_kv_heads, 2)
        keys, values = cache[table, LAYER].double().permute(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_dim)
        query = padded[:, :num_heads].double().view(num_tokens, num_kv_heads, group, head_dim)
        expected = attend(query, keys[:, :seq_len], values[:, :seq_len], scores, sinks)
        tolerance = 2e-5 if dtype == torch.float32 else 0.03
        torch.testing.assert_close(out.double(), expected.reshape(out.shape), atol=tolerance, rtol=tolerance)


def attend(query, keys, values, scores, sinks):
    num_tokens, num_kv_heads, group, _ = query.shape
    seq_len = keys.shape[1]
    logits = torch.einsum("qkgd,ktd->kgqt", query, keys) * scores.scale
    if scores.softcap is not None:
        logits = torch.tanh(logits / scores.softcap) * scores.softcap
    own, others = torch.arange(seq_len - num_tokens, seq_len)[:, None], torch.arange(seq_len)
    hidden = others > own
    if scores.window is not None:
        size, is_chunked = scores.window
        hidden |= others < (own // size * size if is_chunked else own - size + 1)
    logits.masked_fill_(hidden, -torch.inf)
    if scores.has_sinks:
        extra = sinks.double().view(num_kv_heads, group, 1, 1).expand(-1, -1, num_tokens, 1)
        logits = torch.cat([logits, extra], dim=-1)
    weights = logits.softmax(-1)[..., :seq_len]
    return torch.einsum("kgqt,ktd->qkgd", weights, values)


@pytest.mark.parametrize(
    ("head_dim", "block_size", "tiled", "can"),
    [
        (80, 16, False, True),
        (80, 16, True, False),
        (64, 8, False, False),
        (64, 24, True, False),
        (20, 16, False, False),
    ],
)
def test_shapes(head_dim, block_size, tiled, can):
    shape = CacheShape(element_type_of(torch.float32), NUM_LAYERS, 4, 2, block_size, head_dim)
    assert can_attend_chunks(shape, tiled=tiled) == can

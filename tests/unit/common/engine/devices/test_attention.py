"""The attention backends against attention written out token by token."""

import math

import pytest
import torch

from common.engine.contract.kv_groups import Window
from common.engine.devices.attention import AttentionArgs, AttentionMetadata
from common.engine.devices.cpu.attention import CpuAttention
from common.engine.devices.torch.attention import _MAX_SCORES, TorchAttention

NUM_LAYERS, NUM_KV_HEADS, GROUPS, BLOCK_SIZE, HEAD_DIM = 2, 2, 3, 4, 8
NUM_HEADS = NUM_KV_HEADS * GROUPS
NUM_BLOCKS = 256


def create_backend(name, kv_cache):
    if name == "triton":
        from common.engine.devices.gpu.attention import TritonAttention

        return TritonAttention(kv_cache)
    return {"torch": TorchAttention, "cpu": CpuAttention}[name](kv_cache)


def naive(query, keys, values, args):
    """Attention of the last `len(query)` tokens over all: [tokens, heads, head_dim], float64."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    first = len(keys) - len(query)
    for i in range(len(query)):
        position = first + i
        start = first_seen(position, args.window)
        for head in range(NUM_HEADS):
            seen = slice(start, position + 1)
            scores = keys[seen, head // GROUPS].double() @ query[i, head].double() * args.scale
            if args.slopes is not None:
                scores = scores + args.slopes[head] * (torch.arange(start, position + 1) - position)
            if args.softcap is not None:
                scores = args.softcap * torch.tanh(scores / args.softcap)
            total = scores.exp().sum() + (0.0 if args.sinks is None else args.sinks[head].double().exp())
            out[i, head] = (scores.exp() / total) @ values[seen, head // GROUPS].double()
    return out


def first_seen(position, window):
    if window is None:
        return 0
    return position // window.size * window.size if window.is_chunked else max(0, position - window.size + 1)


class Sequence:
    def __init__(self, length, blocks):
        self.blocks = [blocks.pop() for _ in range(-(-length // BLOCK_SIZE))]
        self.keys = torch.randn(length, NUM_KV_HEADS, HEAD_DIM)
        self.values = torch.randn(length, NUM_KV_HEADS, HEAD_DIM)
        self.query = torch.randn(length, NUM_HEADS, HEAD_DIM)

    def slots(self, start, end):
        return [self.blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(start, end)]


def metadata(sequences, spans):
    """One step in which each sequence computes tokens [start, end)."""
    tables = torch.zeros(len(sequences), max(-(-end // BLOCK_SIZE) for _, end in spans), dtype=torch.int64)
    for i, (sequence, (_, end)) in enumerate(zip(sequences, spans, strict=True)):
        count = -(-end // BLOCK_SIZE)
        tables[i, :count] = torch.tensor(sequence.blocks[:count])
    query_start = [0]
    slots = []
    for sequence, (start, end) in zip(sequences, spans, strict=True):
        query_start.append(query_start[-1] + end - start)
        slots += sequence.slots(start, end)
    ends = [end for _, end in spans]
    return AttentionMetadata(
        num_decodes=sum(end - start == 1 for start, end in spans),
        query_start=query_start,
        seq_lens=ends,
        seq_lens_tensor=torch.tensor(ends),
        block_tables=tables,
        slot_mapping=torch.tensor(slots),
    )


def test_a_batch_in_parts_has_the_same_tokens():
    torch.manual_seed(3)
    blocks = torch.randperm(NUM_BLOCKS - 1).add(1).tolist()
    spans = [(40, 41), (30, 31), (0, 1), (9, 20), (0, 7), (3, 6)]
    whole = metadata([Sequence(end, blocks) for _, end in spans], spans)
    for sizes in ([24], [1] * 24, [2, 22], [3, 1, 20], [5, 11, 8], [14, 7, 3], [20, 4]):
        parts = whole.split(sizes)
        assert [len(part.slot_mapping) for part in parts] == sizes
        assert [token for part in parts for token in tokens(part)] == tokens(whole)
        assert all(part.seq_lens == part.seq_lens_tensor.tolist() for part in parts)
    assert [part.num_decodes for part in whole.split([2, 2, 20])] == [2, 1, 0]


def tokens(batch):
    """What each query token attends to, and where its KV goes."""
    return [
        (batch.block_tables[i].tolist(), seq_len - (end - 1 - token), int(batch.slot_mapping[token]))
        for i, (seq_len, start, end) in enumerate(
            zip(batch.seq_lens, batch.query_start, batch.query_start[1:], strict=False)
        )
        for token in range(start, end)
    ]


def in_batch_order(sequences, spans):
    """As AttentionMetadata wants it: decodes first, longest first."""
    pairs = sorted(zip(sequences, spans, strict=True), key=lambda pair: (pair[1][1] - pair[1][0] > 1, -pair[1][1]))
    return [sequence for sequence, _ in pairs], [span for _, span in pairs]


def packed(sequences, spans, name):
    return torch.cat([getattr(s, name)[start:end] for s, (start, end) in zip(sequences, spans, strict=True)])[None]


ARGS = {
    "plain": AttentionArgs(scale=0.3),
    "window": AttentionArgs(scale=0.3, window=Window(6)),
    "window-1": AttentionArgs(scale=0.3, window=Window(1)),
    "chunked": AttentionArgs(scale=0.3, window=Window(6, is_chunked=True)),
    "softcap": AttentionArgs(scale=0.9, softcap=2.0),
    "sinks": AttentionArgs(scale=0.3, sinks=torch.linspace(-1, 1, NUM_HEADS)),
    "everything": AttentionArgs(scale=0.9, softcap=2.0, window=Window(5), sinks=torch.linspace(-1, 1, NUM_HEADS)),
}
STEPS = {
    "one": [[(0, 9)], [(9, 10)], [(10, 11)]],
    "boundaries": [[(0, 1), (0, 4), (0, 5), (0, 23)], [(1, 2), (4, 5), (5, 6), (23, 24)]],
    "mixed": [[(0, 40), (0, 30), (0, 9)], [(40, 41), (30, 31), (9, 20)], [(41, 42), (31, 32), (20, 22)]],
    "groups": [[(0, 100), (0, 3), (0, 2)], [(100, 101), (3, 4), (2, 3)]],  # decodes of very different lengths
    "chunks": [[(0, 7)], [(7, 8)], [(8, 16)], [(16, 29)]],
}
# Triton's interpreter takes seconds for each: tests/unit/common/engine/devices/gpu/kernels has more.
CASES = [
    *((backend, steps, args) for backend in ("torch", "cpu") for steps in STEPS for args in ARGS),
    ("triton", "groups", "plain"),
    pytest.param("triton", "mixed", "everything", marks=pytest.mark.kernels),
]


@pytest.mark.parametrize(("name", "steps", "args"), CASES)
def test_equals_naive_attention(name, steps, args, monkeypatch):
    if name == "triton":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_equals_naive(name, STEPS[steps], ARGS[args])


def check_equals_naive(name, steps, args):
    torch.manual_seed(len(steps))
    blocks = torch.randperm(NUM_BLOCKS - 1).add(1).tolist()
    kv_cache = torch.zeros(NUM_BLOCKS, NUM_LAYERS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    backend = create_backend(name, kv_cache)
    all_sequences = [Sequence(end, blocks) for _, end in steps[-1]]
    for step in steps:
        sequences, spans = in_batch_order(all_sequences, step)
        backend.begin_step(metadata(sequences, spans))
        for layer in range(NUM_LAYERS):
            sign = 1 - 2 * layer  # layers must not read each other's cache
            out = backend.attend(
                layer,
                packed(sequences, spans, "query"),
                sign * packed(sequences, spans, "keys"),
                sign * packed(sequences, spans, "values"),
                args,
            )
            parts = out[0].split([end - start for start, end in spans])
            for sequence, (start, end), part in zip(sequences, spans, parts, strict=True):
                expected = naive(
                    sequence.query[start:end], sign * sequence.keys[:end], sign * sequence.values[:end], args
                )
                torch.testing.assert_close(part.double(), expected, atol=2e-6, rtol=1e-5)
    used = {block for sequence in all_sequences for block in sequence.blocks}
    untouched = [block for block in range(NUM_BLOCKS) if block not in used]
    assert not kv_cache[untouched].any()


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("window", [None, Window(6), Window(6, is_chunked=True)])
def test_alibi_of_torchs_operators(steps, window):
    """No kernel has it."""
    slopes = torch.linspace(0.05, 0.9, NUM_HEADS)
    check_equals_naive("torch", STEPS[steps], AttentionArgs(scale=0.3, window=window, slopes=slopes))


def test_a_long_chunk_is_masked_in_parts(monkeypatch):
    monkeypatch.setattr("common.engine.devices.torch.attention._MAX_SCORES", 16 * 64)
    assert _MAX_SCORES > 16 * 64
    check_equals_naive("torch", [[(0, 30)], [(30, 64)]], AttentionArgs(scale=0.3))


def test_many_decodes_are_gathered_in_parts(monkeypatch):
    bytes_per_block = 2 * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM * 4
    monkeypatch.setattr("common.engine.devices.torch.attention._MAX_GATHERED_BYTES_CPU", 5 * bytes_per_block)
    prompts, decodes = [(0, 9), (0, 6), (0, 7), (0, 30)], [(9, 10), (6, 7), (7, 8), (30, 31)]
    check_equals_naive("torch", [prompts, decodes], AttentionArgs(scale=0.3))


@pytest.mark.parametrize(
    ("name", "dtype"), [("torch", torch.bfloat16), ("torch", torch.float16), ("cpu", torch.bfloat16)]
)
def test_low_precision_stays_close(name, dtype):
    torch.manual_seed(0)
    args = AttentionArgs(scale=1 / math.sqrt(HEAD_DIM))
    sequences = [Sequence(12, list(range(1, 8)))]
    kv_cache = torch.zeros(8, 1, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, dtype=dtype)
    backend = create_backend(name, kv_cache)
    for span in [(0, 5), (5, 11), (11, 12)]:
        backend.begin_step(metadata(sequences, [span]))
        out = backend.attend(
            0, *(packed(sequences, [span], name).to(dtype) for name in ("query", "keys", "values")), args
        )
        expected = naive(
            sequences[0].query[slice(*span)], sequences[0].keys[: span[1]], sequences[0].values[: span[1]], args
        )
        assert out.dtype == dtype
        torch.testing.assert_close(out[0].double(), expected, atol=0.05, rtol=0.05)

"""The Triton kernels over shapes of heads and blocks: in Triton's interpreter, and on a GPU where there is one."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch.nn import functional

from common.engine.contract.kv_groups import Window
from common.engine.devices.attention import AttentionArgs, AttentionMetadata, HeadNorms, ProjectedArgs, Rotary
from common.engine.devices.kv_quantization import pack
from common.engine.devices.torch.attention import TorchAttention

NUM_LAYERS, LAYER, NUM_BLOCKS = 2, 1, 96
# Sequences by what a step computes of each: their last token, or a chunk. Lengths on both sides of a block's end.
SPANS = [(56, 57), (32, 33), (15, 16), (0, 1), (20, 70), (0, 33), (16, 18)]
ARGS = {
    "plain": AttentionArgs(0.125),
    "window": AttentionArgs(0.2, window=Window(7)),
    "chunked": AttentionArgs(0.2, window=Window(21, is_chunked=True)),
    "softcap": AttentionArgs(0.1, softcap=5.0),
    "window and sinks": AttentionArgs(0.3, window=Window(40), sinks=torch.linspace(-1, 2, 64)),
}
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.04, torch.float16: 0.005}
DTYPES = list(TOLERANCE)
# dtype, head_dim, block_size, KV heads, query heads for each, arguments
QUICK = [
    (torch.float32, 64, 16, 2, 3, "plain"),
    (torch.bfloat16, 80, 48, 1, 8, "window and sinks"),
    (torch.float32, 64, 16, 1, 2, "chunked"),
]
SHAPES = [
    *itertools.product(DTYPES, [64, 128], [16, 32, 128], [2], [1, 4, 7, 16], ARGS),
    *itertools.product(DTYPES, [80, 96, 256], [16, 48], [1], [1, 2, 8], ARGS),
]
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def interpreter(monkeypatch, request):
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def cases(shapes, *marks):
    def case(device, shape):
        name = "-".join(str(part).removeprefix("torch.") for part in shape)
        return pytest.param(
            device, *shape, marks=[pytest.mark.gpu] if device == "cuda" else marks, id=f"{device}-{name}"
        )

    return [case(device, shape) for device in ("cpu", "cuda") for shape in shapes]


@pytest.mark.parametrize(("device", "dtype", "head_dim", "block_size", "num_kv_heads", "group", "args"), cases(QUICK))
def test_attention(device, dtype, head_dim, block_size, num_kv_heads, group, args):
    check_attention(device, dtype, head_dim, block_size, num_kv_heads, group, ARGS[args])


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "block_size", "num_kv_heads", "group", "args"), cases(SHAPES, pytest.mark.kernels)
)
def test_attention_in_every_shape(device, dtype, head_dim, block_size, num_kv_heads, group, args):
    check_attention(device, dtype, head_dim, block_size, num_kv_heads, group, ARGS[args])


def triton_attention(kv_cache):
    from common.engine.devices.gpu.attention import TritonAttention

    return TritonAttention(kv_cache)


def check_attention(device, dtype, head_dim, block_size, num_kv_heads, group, args):
    """Against torch's operators in float64, from the same cache; what blocks hold beyond their sequences is NaN."""
    torch.manual_seed(0)
    num_heads = num_kv_heads * group
    if args.sinks is not None:
        args = replace(args, sinks=args.sinks[:num_heads].to(device))
    cache, batch = filled_cache(device, dtype, head_dim, block_size, num_kv_heads)
    num_tokens = len(batch.slot_mapping)
    query = torch.randn(1, num_tokens, num_heads, head_dim, device=device).to(dtype)
    key, value = (torch.randn(1, num_tokens, num_kv_heads, head_dim, device=device).to(dtype) for _ in range(2))
    out = torch.full_like(query, torch.nan)
    backend = triton_attention(cache)
    backend.begin_step(batch)
    out = backend.attend(LAYER, query, key, value, args)

    reference = TorchAttention(cache.double().nan_to_num())
    reference.begin_step(batch)
    if args.sinks is not None:
        args = replace(args, sinks=args.sinks.double())
    expected = reference.attend(LAYER, query.double(), key.double(), value.double(), args)
    torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def filled_cache(device, dtype, head_dim, block_size, num_kv_heads, planes=2):
    """A cache whose sequences have random numbers up to what the step computes, and the step."""
    cache = torch.full((NUM_BLOCKS, NUM_LAYERS, planes, num_kv_heads, block_size, head_dim), torch.nan, dtype=dtype)
    counts = [-(-end // block_size) for _, end in SPANS]
    blocks = (torch.randperm(NUM_BLOCKS - 1)[: sum(counts)] + 1).split(counts)
    slots, query_start = [], [0]
    for (start, end), own in zip(SPANS, blocks, strict=True):
        places = [(int(own[at // block_size]), at % block_size) for at in range(end)]
        for block, offset in places[:start]:
            cache[block, :, :, :, offset] = torch.randn(NUM_LAYERS, planes, num_kv_heads, head_dim).to(dtype)
        slots += [block * block_size + offset for block, offset in places[start:]]
        query_start.append(len(slots))
    tables = torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True)
    ends = [end for _, end in SPANS]
    batch = AttentionMetadata(
        num_decodes=sum(end - start == 1 for start, end in SPANS),
        query_start=query_start,
        seq_lens=ends,
        seq_lens_tensor=torch.tensor(ends, device=device),
        block_tables=tables.to(device),
        slot_mapping=torch.tensor(slots, device=device),
    )
    return cache.to(device), batch


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("has_norms", [True, False])
@pytest.mark.parametrize(
    ("head_dim", "num_heads", "num_kv_heads"), [(16, 6, 2), pytest.param(80, 3, 3, marks=pytest.mark.kernels)]
)
def test_projections_are_normed_turned_cached_and_attended(device, has_norms, head_dim, num_heads, num_kv_heads):
    torch.manual_seed(0)
    cache, batch = filled_cache(device, torch.float32, head_dim, 16, num_kv_heads)
    num_tokens = len(batch.slot_mapping)
    positions = torch.cat([torch.arange(*span) for span in SPANS]).to(device)
    angles = torch.randn(128, head_dim, device=device)
    rotary = Rotary(angles.cos(), angles.sin(), positions)
    norms = HeadNorms(*torch.rand(2, head_dim, device=device), 1e-5) if has_norms else None
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, device=device)
    heads = qkv.view(num_tokens, -1, head_dim)
    query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    if norms is not None:
        query = functional.rms_norm(query, (head_dim,), norms.query, norms.epsilon)
        key = functional.rms_norm(key, (head_dim,), norms.key, norms.epsilon)
    query, key = (turned(each, rotary) for each in (query, key))

    other = cache.clone()
    reference = triton_attention(other)
    reference.begin_step(batch)
    expected = reference.attend(LAYER, query[None], key[None], value[None].clone(), ARGS["plain"])
    backend = triton_attention(cache)
    backend.begin_step(batch)
    found = backend.attend_projections(LAYER, 0, qkv, ProjectedArgs(num_heads, ARGS["plain"], norms), rotary)
    torch.testing.assert_close(found.view(expected.shape), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(cache, other, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.kernels
@pytest.mark.parametrize("kept", [torch.int8, torch.float8_e4m3fn])
def test_projections_are_quantised_as_keys_and_values_are(device, kept):
    torch.manual_seed(0)
    head_dim, num_heads, num_kv_heads = 80, 6, 2
    plain, batch = filled_cache(device, torch.float32, head_dim, 16, num_kv_heads)
    cache = pack(plain.nan_to_num(), kept)
    num_tokens = len(batch.slot_mapping)
    positions = torch.cat([torch.arange(*span) for span in SPANS]).to(device)
    rotary = Rotary(torch.ones(128, head_dim, device=device), torch.zeros(128, head_dim, device=device), positions)
    qkv = torch.randn(num_tokens, (num_heads + 2 * num_kv_heads) * head_dim, device=device)
    parts = qkv.clone().view(1, num_tokens, -1, head_dim).split([num_heads, num_kv_heads, num_kv_heads], dim=2)

    other = cache.clone()
    reference = triton_attention(other)
    reference.begin_step(batch)
    expected = reference.attend(LAYER, *parts, ARGS["plain"])
    backend = triton_attention(cache)
    backend.begin_step(batch)
    found = backend.attend_projections(LAYER, 0, qkv, ProjectedArgs(num_heads, ARGS["plain"], None), rotary)
    assert torch.equal(cache.view(torch.uint8), other.view(torch.uint8))
    assert torch.equal(found.view(expected.shape), expected)


def turned(heads, rotary):
    cosines, sines = (each[rotary.positions][:, None] for each in (rotary.cosines, rotary.sines))
    first, second = heads.chunk(2, dim=-1)
    return heads * cosines + torch.cat([-second, first], dim=-1) * sines

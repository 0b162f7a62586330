"""Quantised KV as torch computes it, and that backends write and read the same."""

from __future__ import annotations

import pytest
import torch

from common.engine.contract.kv_groups import Window
from common.engine.devices.attention import AttentionArgs, AttentionMetadata
from common.engine.devices.cpu.attention import CpuAttention
from common.engine.devices.kv_quantization import head_dim_of, pack, quantize, rounded, unpack
from common.engine.devices.torch.attention import TorchAttention

SHAPES = [(6, 2), (12, 4), (64, 16), (80, 48)]  # numbers of a head, tokens of a block
TYPES = [torch.int8, torch.float8_e4m3fn]
NUM_LAYERS, LAYER, NUM_KV_HEADS, NUM_HEADS = 2, 1, 2, 6
LENGTHS = [57, 33, 16, 2, 1]  # of decodes
CHUNKS = [(40, 61), (0, 20)]  # tokens [start, end) of sequences
ARGS = [
    AttentionArgs(scale=0.2),
    AttentionArgs(scale=0.2, window=Window(7), softcap=5.0, sinks=torch.linspace(-1, 1, NUM_HEADS)),
]


@pytest.mark.parametrize(("dtype", "error"), [(torch.int8, 0.5 / 127), (torch.float8_e4m3fn, 2.0**-4)])
def test_errors_are_within_half_a_step(dtype: torch.dtype, error: float) -> None:
    """Of int8, relative to a vector's largest number; of float8, to each number, but for those that are very small."""
    vectors = torch.randn(2000, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-20, 20, 2000)[:, None]
    largest = vectors.abs().amax(-1, keepdim=True)
    limit = largest if dtype == torch.int8 else vectors.abs().clamp(min=2.0**-6 / 448 * largest)
    assert float(((rounded(vectors, dtype) - vectors).abs() / limit).max()) <= error * 1.01  # the scale is bfloat16


@pytest.mark.parametrize("dtype", TYPES)
def test_a_token_has_the_same_bytes_whatever_is_beside_it(dtype: torch.dtype) -> None:
    vectors = torch.randn(3, 16, 32)
    packed = pack(vectors, dtype)
    assert packed.shape == (3, 16, 34)
    assert head_dim_of(packed) == 32
    assert torch.equal(unpack(packed, torch.float32), rounded(vectors, dtype))
    vectors[:, 5:] *= 1000
    other = pack(vectors, dtype).view(torch.uint8)
    assert torch.equal(other.flatten(1)[:, : 5 * 32], packed.view(torch.uint8).flatten(1)[:, : 5 * 32])


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", TYPES)
def test_what_is_not_finite_stays_so(dtype: torch.dtype, value: float) -> None:
    vectors = torch.zeros(2, 16)
    vectors[0, 3] = value
    found = rounded(vectors, dtype)
    assert found[0].isnan().all()
    assert not found[1].any()


@pytest.mark.parametrize("computed", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("args", ARGS, ids=["plain", "everything"])
@pytest.mark.parametrize(
    ("backend", "head_dim", "block_size"),
    [
        *(("torch", *shape) for shape in SHAPES),
        *(("cpu", *shape) for shape in SHAPES[::3]),
        *(pytest.param("cpu", *shape, marks=pytest.mark.kernels) for shape in SHAPES[1:3]),
        *(pytest.param("triton", *shape, marks=pytest.mark.kernels) for shape in SHAPES),
    ],
)
def test_attention_is_that_of_rounded_keys_and_values(
    backend: str,
    args: AttentionArgs,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    computed: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In two steps, of chunks and of decodes; backends write the same bytes."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    torch.manual_seed(0)
    for spans in ([(length - 1, length) for length in LENGTHS], CHUNKS):
        batch = batch_of(spans, block_size)
        num_tokens = len(batch.slot_mapping)
        query = torch.randn(1, num_tokens, NUM_HEADS, head_dim).to(computed)
        key, value = (torch.randn(1, num_tokens, NUM_KV_HEADS, head_dim).to(computed) for _ in range(2))
        cached = torch.randn(1 + int(batch.block_tables.max()), NUM_LAYERS, 2, NUM_KV_HEADS, block_size, head_dim)
        kv_cache = pack(cached, dtype)
        plain = TorchAttention(unpack(kv_cache, torch.float64))
        plain.begin_step(batch)
        keys, values = (rounded(each.double(), dtype) for each in (key, value))
        expected = plain.attend(LAYER, query.double(), keys, values, args).float()
        written = pack_written(kv_cache, batch, key, value, dtype)
        found = create_backend(backend, kv_cache, computed)
        found.begin_step(batch)
        tolerance = 2e-5 if computed == torch.float32 else 0.03
        result = found.attend(LAYER, query, key, value, args).float()
        torch.testing.assert_close(result, expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(kv_cache.view(torch.uint8), written.view(torch.uint8))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("backend", ["torch", "cpu", "triton"])
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # by numpy, with which Triton interprets
def test_backends_keep_what_is_not_finite(backend: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    batch = batch_of([(0, 3)], 16)
    kv_cache = pack(torch.zeros(2, NUM_LAYERS, 2, NUM_KV_HEADS, 16, 32), dtype)
    query, key, value = torch.ones(1, 3, NUM_HEADS, 32), *torch.ones(2, 1, 3, NUM_KV_HEADS, 32)
    key[0, 1, 0, 5], value[0, 2, 1, 7] = torch.nan, -torch.inf
    found = create_backend(backend, kv_cache, torch.float32)
    found.begin_step(batch)
    found.attend(LAYER, query, key, value, ARGS[0])
    are_nan = unpack(kv_cache, torch.float32)[1, LAYER].isnan()
    assert are_nan.any(-1).nonzero().tolist() == [[0, 0, 1], [1, 1, 2]]  # plane, head, token
    assert torch.equal(are_nan.all(-1), are_nan.any(-1))


def create_backend(name, kv_cache, computed):
    if name == "triton":
        from common.engine.devices.gpu.attention import TritonAttention

        return TritonAttention(kv_cache)
    return {"torch": TorchAttention, "cpu": CpuAttention}[name](kv_cache, computed)


def pack_written(kv_cache, batch, key, value, dtype):
    """The cache with the tokens in their slots, written one by one."""
    runs, block_size = kv_cache.clone().flatten(4), kv_cache.shape[4]
    for plane, vectors in enumerate((key, value)):
        numbers, scales = quantize(vectors[0], dtype)
        for token, slot in enumerate(batch.slot_mapping.tolist()):
            block_id, offset = divmod(slot, block_size)
            run, head_dim = runs[block_id, LAYER, plane], key.shape[-1]
            run[:, offset * head_dim :][:, :head_dim] = numbers[token]
            run[:, block_size * head_dim :].view(torch.bfloat16)[:, offset] = scales[token]
    return runs.unflatten(4, kv_cache.shape[4:])


def batch_of(spans: list[tuple[int, int]], block_size: int) -> AttentionMetadata:
    """A step that computes tokens [start, end) of each sequence."""
    ends = [end for _, end in spans]
    counts = [-(-end // block_size) for end in ends]
    blocks = torch.randperm(sum(counts)).add(1).split(counts)
    query_start, slots = [0], []
    for own, (start, end) in zip(blocks, spans, strict=True):
        query_start.append(query_start[-1] + end - start)
        slots += [int(own[at // block_size]) * block_size + at % block_size for at in range(start, end)]
    return AttentionMetadata(
        num_decodes=sum(end - start == 1 for start, end in spans),
        query_start=query_start,
        seq_lens=ends,
        seq_lens_tensor=torch.tensor(ends),
        block_tables=torch.nn.utils.rnn.pad_sequence(list(blocks), batch_first=True),
        slot_mapping=torch.tensor(slots),
    )

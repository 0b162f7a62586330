"""Attention over latents against attention written out with expanded keys and values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from common.engine.contract.kv_groups import Window
from common.engine.devices.attention import AttentionArgs, AttentionMetadata, LatentExpansion
from common.engine.devices.cpu.latent_attention import CpuLatentAttention
from common.engine.devices.torch.attention import chunks_of
from common.engine.devices.torch.latent_attention import TorchLatentAttention, expands
from tests.unit.common.engine.devices.test_attention import in_batch_order, metadata

NUM_LAYERS, BLOCK_SIZE, NUM_BLOCKS = 2, 4, 64
RANK, ROTARY_DIM, KEY_DIM, VALUE_DIM = 12, 4, 5, 7
STEPS = [
    [(0, 40), (0, 30), (0, 9), (0, 1)],
    [(40, 41), (30, 31), (9, 20), (1, 2)],
    [(41, 42), (31, 33), (20, 36), (2, 3)],
]
ARGS = {
    "plain": {},
    "window": {"window": Window(6)},
    "everything": {"softcap": 2.0, "window": Window(5), "sinks": torch.linspace(-1, 1, 4)},
}


class Sequence:
    def __init__(self, length: int, blocks: list[int], num_heads: int) -> None:
        self.blocks = [blocks.pop() for _ in range(-(-length // BLOCK_SIZE))]
        self.cached = torch.randn(length, RANK + ROTARY_DIM)
        self.query = torch.randn(length, num_heads, KEY_DIM + ROTARY_DIM)

    def slots(self, start: int, end: int) -> list[int]:
        return [self.blocks[i // BLOCK_SIZE] * BLOCK_SIZE + i % BLOCK_SIZE for i in range(start, end)]


def naive(sequence: Sequence, span: tuple[int, int], args: AttentionArgs) -> torch.Tensor:
    """[tokens, heads, VALUE_DIM], float64."""
    assert args.expansion is not None
    start, end = span
    weight = args.expansion.weight.double()
    latents, rotary = sequence.cached[:end].double().split([RANK, ROTARY_DIM], dim=1)
    rows = torch.einsum("tr,hdr->htd", latents, weight)
    keys = torch.cat([rows[..., :KEY_DIM], rotary.expand(len(rows), -1, -1)], dim=2)
    scores = torch.einsum("qhd,hkd->hqk", sequence.query[start:end].double(), keys) * args.scale
    if args.softcap is not None:
        scores = args.softcap * torch.tanh(scores / args.softcap)
    positions = torch.arange(end)
    hidden = positions > positions[start:, None]
    if args.window is not None:
        hidden |= positions <= positions[start:, None] - args.window.size
    scores = scores.masked_fill(hidden, -torch.inf)
    total = scores.exp().sum(dim=2, keepdim=True)
    if args.sinks is not None:
        total = total + args.sinks.double().exp().view(-1, 1, 1)
    return torch.einsum("hqk,hkd->qhd", scores.exp() / total, rows[..., KEY_DIM:])


@pytest.mark.parametrize("kind", ARGS)
@pytest.mark.parametrize(
    ("create", "num_heads"), [(TorchLatentAttention, 4), (CpuLatentAttention, 4), (CpuLatentAttention, 3)]
)  # there is no kernel for blocks of 4 tokens and 3 heads
def test_equals_naive_attention(create: type[TorchLatentAttention], num_heads: int, kind: str) -> None:
    torch.manual_seed(0)
    blocks = torch.randperm(NUM_BLOCKS - 1).add(1).tolist()
    weight = torch.randn(num_heads, KEY_DIM + VALUE_DIM, RANK) / 4
    args = AttentionArgs(scale=0.4, expansion=LatentExpansion(weight, KEY_DIM), **ARGS[kind])
    if args.sinks is not None:
        args = replace(args, sinks=args.sinks[:num_heads])
    kv_cache = torch.zeros(NUM_BLOCKS, NUM_LAYERS, 1, 1, BLOCK_SIZE, RANK + ROTARY_DIM)
    backend = create(kv_cache)
    every_sequence = [Sequence(end, blocks, num_heads) for _, end in STEPS[-1]]
    ways = set()
    for step in STEPS:
        sequences, spans = in_batch_order(every_sequence, step)
        batch: AttentionMetadata = metadata(sequences, spans)
        ways |= {expands(chunk, args.expansion) for chunk in chunks_of(batch)}
        backend.begin_step(batch)
        pairs = list(zip(sequences, spans, strict=True))
        cached = torch.cat([each.cached[start:end] for each, (start, end) in pairs])[None, :, None]
        query = torch.cat([each.query[start:end] for each, (start, end) in pairs])[None]
        for layer in range(NUM_LAYERS):
            found = backend.attend(layer, query, cached, cached[..., :0], args)
            expected = torch.cat([naive(each, span, args) for each, span in pairs])
            assert torch.allclose(found[0].double(), expected, atol=1e-5)
    assert ways == {True, False}
    first = every_sequence[0]
    assert torch.equal(kv_cache[first.blocks[0], :, 0, 0, 1], first.cached[1].expand(NUM_LAYERS, -1))

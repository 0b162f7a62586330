"""Whether a device's attention kernels compute what torch's operators do, with a model's shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from common.engine.devices.attention import AttentionArgs, AttentionBackend, AttentionMetadata, KVSpec
from common.engine.devices.kv_quantization import pack
from common.engine.devices.torch.attention import TorchAttention
from common.engine.devices.torch.latent_attention import TorchLatentAttention
from common.errors import ModelLoadError

_BLOCK_SIZE = 16
_DECODES = [(36, 37), (15, 16), (0, 1)]  # tokens [start, end) of sequences that a step computes
_CHUNKS = [(16, 37), (0, 20)]
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}

_Backend = Callable[[torch.Tensor], AttentionBackend]


@torch.inference_mode()
def check_attention(
    backend: _Backend, device: torch.device, spec: KVSpec, num_heads: Sequence[int], args: Sequence[AttentionArgs]
) -> None:
    """Runs both over a small cache of random numbers, for each kind of layer. `num_heads` and `args` are by layer.
    Raises ModelLoadError if they differ, or whatever a compiler raises."""
    checked: set[tuple[object, ...]] = set()
    for layer, (heads, layer_args) in enumerate(zip(num_heads, args, strict=True)):
        kind = (heads, layer_args.scale, layer_args.window, layer_args.softcap, layer_args.sinks is None)
        if kind not in checked and not _layer_agrees(backend, device, spec, layer, heads, layer_args):
            raise ModelLoadError("their attention differs from torch's", param="model")
        checked.add(kind)


def _layer_agrees(
    create: _Backend, device: torch.device, spec: KVSpec, layer: int, num_heads: int, args: AttentionArgs
) -> bool:
    generator = torch.Generator().manual_seed(layer)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device, spec.dtype)

    tolerance = _TOLERANCE[spec.dtype]
    for spans in (_DECODES, _CHUNKS):
        batch = _batch(spans, device)
        num_tokens = len(batch.slot_mapping)
        query_dim, value_dim = spec.head_dim, spec.head_dim
        if args.expansion is not None:
            query_dim, value_dim = spec.head_dim - args.expansion.rank + args.expansion.key_dim, 0
        query = random(1, num_tokens, num_heads, query_dim)
        key, value = (random(1, num_tokens, spec.num_kv_heads, dim) for dim in (spec.head_dim, value_dim))
        plain = replace(spec, quantized=None)
        kv_cache = random(1 + int(batch.block_tables.max()), *plain.block_shape(_BLOCK_SIZE))
        if spec.quantized is not None:
            kv_cache = pack(kv_cache, spec.quantized)
        results = []
        reference = TorchAttention if args.expansion is None else TorchLatentAttention
        for backend in (create(kv_cache), reference(kv_cache, spec.dtype)):
            backend.begin_step(batch)
            results.append(backend.attend(layer, query, key, value, args).float())
        found, expected = results
        if not torch.allclose(found, expected, rtol=tolerance, atol=tolerance):
            return False
    return True


def _batch(spans: Sequence[tuple[int, int]], device: torch.device) -> AttentionMetadata:
    """A step that computes tokens [start, end) of each sequence."""
    ends = [end for _, end in spans]
    blocks = [-(-end // _BLOCK_SIZE) for end in ends]
    tables = torch.zeros((len(blocks), max(blocks)), dtype=torch.int64)
    for row, count in enumerate(blocks):
        tables[row, :count] = 1 + sum(blocks[:row]) + torch.arange(count)
    query_start, slots = [0], list[int]()
    for row, (start, end) in enumerate(spans):
        query_start.append(query_start[-1] + end - start)
        slots += [int(tables[row, at // _BLOCK_SIZE]) * _BLOCK_SIZE + at % _BLOCK_SIZE for at in range(start, end)]
    return AttentionMetadata(
        num_decodes=sum(end - start == 1 for start, end in spans),
        query_start=query_start,
        seq_lens=ends,
        seq_lens_tensor=torch.tensor(ends, device=device),
        block_tables=tables.to(device),
        slot_mapping=torch.tensor(slots, device=device),
    )

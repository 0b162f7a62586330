"""Whether the CPU kernels compute what torch's operators do, with a model's shapes on this processor."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from common.engine.attention.base import AttentionArgs, AttentionBackend, AttentionMetadata, KVSpec
from common.engine.attention.cpu_backend import CpuAttention
from common.engine.attention.torch_backend import TorchAttention

logger = logging.getLogger(__name__)

_BLOCK_SIZE = 16
_LENGTHS = [37, 16, 1]  # tokens of sequences that are decoded
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.05}


@torch.inference_mode()
def kernels_agree(spec: KVSpec, num_heads: Sequence[int], args: Sequence[AttentionArgs]) -> bool:
    """Runs both over a small cache of random numbers, for each kind of layer. `num_heads` and `args` are by layer. Also
    False if a kernel does not compile."""
    checked: set[tuple[object, ...]] = set()
    for layer, (heads, layer_args) in enumerate(zip(num_heads, args, strict=True)):
        kind = (heads, layer_args.scale, layer_args.sliding_window, layer_args.softcap, layer_args.sinks is None)
        try:
            if kind not in checked and not _layer_agrees(spec, layer, heads, layer_args):
                return False
        except RuntimeError as error:  # LLVM's
            logger.warning("a CPU kernel does not compile: %s", error)
            return False
        checked.add(kind)
    return True


def _layer_agrees(spec: KVSpec, layer: int, num_heads: int, args: AttentionArgs) -> bool:
    generator = torch.Generator().manual_seed(layer)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(spec.dtype)

    blocks = [-(-length // _BLOCK_SIZE) for length in _LENGTHS]
    tables = torch.zeros((len(blocks), max(blocks)), dtype=torch.int64)
    for row, count in enumerate(blocks):
        tables[row, :count] = 1 + sum(blocks[:row]) + torch.arange(count)
    lasts = torch.tensor(_LENGTHS) - 1
    batch = AttentionMetadata(
        num_decodes=len(_LENGTHS),
        query_start=list(range(len(_LENGTHS) + 1)),
        seq_lens=_LENGTHS,
        seq_lens_tensor=torch.tensor(_LENGTHS),
        block_tables=tables,
        slot_mapping=tables.gather(1, lasts[:, None] // _BLOCK_SIZE)[:, 0] * _BLOCK_SIZE + lasts % _BLOCK_SIZE,
    )
    kv_cache = random(1 + sum(blocks), *spec.block_shape(_BLOCK_SIZE))
    query = random(1, len(_LENGTHS), num_heads, spec.head_dim)
    key, value = (random(1, len(_LENGTHS), spec.num_kv_heads, spec.head_dim) for _ in range(2))

    def attended(backend: AttentionBackend) -> torch.Tensor:
        backend.begin_step(batch)
        return backend.attend(layer, query, key, value, args).float()

    tolerance = _TOLERANCE[spec.dtype]
    found, expected = attended(CpuAttention(kv_cache)), attended(TorchAttention(kv_cache))
    return torch.allclose(found, expected, rtol=tolerance, atol=tolerance)

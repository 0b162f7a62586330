"""Paged attention over latents in plain torch operations: for CPU, and the reference for every other backend.

Decodes attend to the latents as they are: queries are multiplied by the matrix of keys, and what they gather by that of
values (`LatentExpansion`). That is attention with one KV head, whose values are a part of its keys. Latents of a
prompt's chunk are expanded into keys and values of all heads instead where that takes fewer operations.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from common.engine.devices.attention import AttentionArgs, LatentExpansion
from common.engine.devices.torch.attention import Chunk, TorchAttention


class TorchLatentAttention(TorchAttention):
    """See AttentionBackend. Works on any device and dtype; softmax is computed in float32."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, args: AttentionArgs
    ) -> torch.Tensor:
        """See AttentionBackend."""
        assert self._batch is not None
        assert args.expansion is not None
        self._write(layer, key)
        parts = []
        if num_decodes := self._batch.num_decodes:
            absorbed = args.expansion.absorbed(query[:, :num_decodes])
            attended = self.attend_absorbed(layer, absorbed, args)
            parts.append(args.expansion.values_of(attended))
        for chunk in self._chunks:
            rows = slice(chunk.start, chunk.end)
            parts.append(self._attend_latents(layer, query[:, rows], key[:, rows], chunk, args, args.expansion))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def attend_absorbed(self, layer: int, query: torch.Tensor, args: AttentionArgs) -> torch.Tensor:
        """Attention of decodes' queries to latents, [1, sequences, heads, rank + rotary dim] -> the same."""
        parts = [self._attend_decodes(layer, query[:, group.start : group.end], group, args) for group in self._groups]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _write(self, layer: int, key: torch.Tensor) -> None:
        """Puts latents and rotary parts [1, tokens, 1, rank + rotary dim] into the cache."""
        self._key_vectors[layer].index_copy_(0, self._write_rows, key.reshape(-1, self._head_dim))

    def _attend_latents(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        chunk: Chunk,
        args: AttentionArgs,
        expansion: LatentExpansion,
    ) -> torch.Tensor:
        """Attention of a chunk's tokens, [1, tokens, heads, value dim]."""
        if not expands(chunk, expansion):
            absorbed = expansion.absorbed(query)
            attended = torch.empty_like(absorbed)
            self._attend_chunk(layer, absorbed, key, key, attended, chunk, args)
            return expansion.values_of(attended)
        cached = key[0, :, 0] if chunk.num_tokens == chunk.seq_len else self._gather_chunk(layer, chunk)[0][0, 0]
        keys, values = expansion.expand(cached)
        attended = torch.empty_like(query)
        values = functional.pad(values, (0, keys.shape[2] - expansion.value_dim))
        self._attend_to(keys[None], values[None], query, attended, chunk, args)
        return attended[..., : expansion.value_dim]


def expands(chunk: Chunk, expansion: LatentExpansion) -> bool:
    """Whether expanding the latents of a chunk's sequence takes fewer operations than attending to them as they are.
    Both multiply as much for the chunk's own tokens; those before it have to be expanded again."""
    num_rows, rank = expansion.weight.shape[1:]
    num_before = chunk.seq_len - chunk.num_tokens
    num_pairs = chunk.num_tokens * (num_before + chunk.num_tokens / 2)
    return num_before * rank * num_rows < num_pairs * (2 * rank - num_rows)

"""The attention backend Protocol and the description of a step's ragged batch."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch.nn import functional

from common.engine.contract.kv_groups import Window, planes_of, row_numbers_of


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Shape of what a model caches per token."""

    num_layers: int
    num_kv_heads: int
    head_dim: int  # of keys; values are padded up to it
    value_head_dim: int  # 0: keys alone are kept, of which values are a part
    dtype: torch.dtype  # of keys and values
    quantized: torch.dtype | None = None  # in blocks; None: as they are

    @property
    def cache_dtype(self) -> torch.dtype:
        """Type of the numbers in blocks."""
        return self.quantized or self.dtype

    @property
    def row_numbers(self) -> int:
        """Numbers that a token takes in a plane of a head."""
        return row_numbers_of(name_of(self.cache_dtype), self.head_dim)

    def block_shape(self, block_size: int) -> tuple[int, int, int, int, int]:
        """Shape of one block: [num_layers, planes, num_kv_heads, block_size, row_numbers]."""
        return self.num_layers, planes_of(self.value_head_dim), self.num_kv_heads, block_size, self.row_numbers

    def bytes_per_block(self, block_size: int) -> int:
        """Size of one block in bytes."""
        return math.prod(self.block_shape(block_size)) * self.cache_dtype.itemsize


def name_of(dtype: torch.dtype) -> str:
    """Returns the name by which messages and stores know a type."""
    return str(dtype).removeprefix("torch.")


class GroupTables(NamedTuple):
    """The places of a batch's tokens in the blocks of one KV group."""

    block_tables: torch.Tensor  # [num_seqs, max blocks of a sequence] on the device, int64, padded with the null block
    slot_mapping: torch.Tensor  # [num_tokens] on the device, int64: where each query token's KV goes


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's ragged batch of `num_seqs` sequences packed into `num_tokens` query tokens.

    Sequences with one query token ("decodes") come first, longest first; then chunks of a prompt in any order.
    Sequence i owns query tokens [query_start[i], query_start[i + 1]), which are its last ones.
    """

    num_decodes: int
    query_start: list[int]  # [num_seqs + 1]
    seq_lens: list[int]  # [num_seqs], cached and query tokens together
    seq_lens_tensor: torch.Tensor  # the same on the device, int64
    block_tables: torch.Tensor  # see GroupTables; of the first KV group, as is the next
    slot_mapping: torch.Tensor
    has_drafts: bool = False  # several decodes are of one sequence: each reads what those before it write
    other_groups: Sequence[GroupTables] = ()

    def by_group(self) -> list[AttentionMetadata]:
        """The batch as the layers of each KV group need it."""
        others = [replace(self, **tables._asdict(), other_groups=()) for tables in self.other_groups]
        return [self, *others]

    def split(self, sizes: Sequence[int]) -> list[AttentionMetadata]:
        """The batch of a model with one KV group as batches of so many query tokens each. A sequence whose query tokens
        fall apart is in several of them, each time with the length that it has at the last one."""
        if len(sizes) == 1:
            return [self]
        parts, start = [], 0
        for size in sizes:
            parts.append(self._part(start, start + size))
            start += size
        return parts

    def _part(self, start: int, end: int) -> AttentionMetadata:
        first = bisect_right(self.query_start, start) - 1
        last = bisect_left(self.query_start, end)  # and the first that is not in it
        lengths = [
            seq_len - max(0, query_end - end)
            for seq_len, query_end in zip(
                self.seq_lens[first:last], self.query_start[first + 1 : last + 1], strict=True
            )
        ]
        return AttentionMetadata(
            num_decodes=min(max(self.num_decodes - start, 0), end - start),
            query_start=[min(max(place, start), end) - start for place in self.query_start[first : last + 1]],
            seq_lens=lengths,
            seq_lens_tensor=torch.tensor(lengths, device=self.seq_lens_tensor.device),
            block_tables=self.block_tables[first:last],
            slot_mapping=self.slot_mapping[start:end],
            has_drafts=self.has_drafts,
        )


class LatentExpansion(NamedTuple):
    """How keys and values are computed of what is cached of a token in their place: a latent of `rank` numbers, of
    which they are linear functions, and the rotary part that ends the keys of all heads."""

    weight: torch.Tensor  # [num_heads, key_dim + value dim, rank]
    key_dim: int  # of keys without their rotary part

    @property
    def rank(self) -> int:
        """Numbers of a latent."""
        return self.weight.shape[2]

    @property
    def value_dim(self) -> int:
        """Numbers of a head's value."""
        return self.weight.shape[1] - self.key_dim

    def expand(self, cached: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [num_heads, tokens, key_dim + rotary dim] and values [num_heads, tokens, value_dim] of what is cached of
        some tokens, [tokens, rank + rotary dim]."""
        num_heads, num_rows, rank = self.weight.shape
        latents, rotary = cached[:, :rank], cached[:, rank:]
        rows = functional.linear(latents, self.weight.view(-1, rank)).view(-1, num_heads, num_rows).transpose(0, 1)
        keys = torch.cat([rows[..., : self.key_dim], rotary.expand(num_heads, -1, -1)], dim=2)
        return keys, rows[..., self.key_dim :]

    def absorbed(self, query: torch.Tensor) -> torch.Tensor:
        """Queries [1, tokens, num_heads, key_dim + rotary dim] whose products with keys are those of the result, [1,
        tokens, num_heads, rank + rotary dim], with what is cached."""
        of_keys = torch.bmm(query[0, ..., : self.key_dim].transpose(0, 1), self.weight[:, : self.key_dim])
        return torch.cat([of_keys.transpose(0, 1), query[0, ..., self.key_dim :]], dim=2)[None]

    def values_of(self, attended: torch.Tensor) -> torch.Tensor:
        """Sums of values [1, tokens, num_heads, value_dim] of the same sums of latents, [1, tokens, num_heads, rank or
        more]."""
        latents = attended[0, ..., : self.rank].transpose(0, 1)
        return torch.bmm(latents, self.weight[:, self.key_dim :].transpose(1, 2)).transpose(0, 1)[None]


@dataclass(frozen=True, slots=True)
class AttentionArgs:
    """Arguments of a layer's attention beyond queries, keys and values."""

    scale: float  # of query . key
    window: Window | None = None  # of the tokens before it that a token sees; None: all
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)
    sinks: torch.Tensor | None = None  # [num_heads], extra logits that take probability and add nothing
    slopes: torch.Tensor | None = None  # [num_heads] float32, ALiBi: scores rise by so much from token to token
    expansion: LatentExpansion | None = None  # what is cached are latents


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMS norms over the heads of queries and keys."""

    query: torch.Tensor  # [head_dim] float32
    key: torch.Tensor  # [head_dim] float32
    epsilon: float


@dataclass(frozen=True, slots=True)
class ProjectedArgs:
    """Constants of a layer between its projections and its attention."""

    num_heads: int
    args: AttentionArgs
    norms: HeadNorms | None


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary embedding of a step's tokens."""

    cosines: torch.Tensor  # [positions, head_dim] float32
    sines: torch.Tensor  # [positions, head_dim] float32
    positions: torch.Tensor  # [num_tokens] int64, rows of both

    def split(self, sizes: Sequence[int]) -> list[Rotary]:
        """Splits it into parts of so many tokens each."""
        return [Rotary(self.cosines, self.sines, part) for part in torch.split(self.positions, list(sizes))]


class AttentionBackend(Protocol):
    """Computes attention of one KV group's layers over one worker's paged KV cache. Built with the KV cache
    [num_blocks, num_layers, planes, num_kv_heads, block_size, row_numbers] and the type of queries and results; called
    on the worker's thread only."""

    reads_whole_blocks: bool  # also the part beyond a sequence, which must be finite then

    def begin_step(self, batch: AttentionMetadata) -> None:
        """Prepare what all layers share. Called once before each forward pass."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, args: AttentionArgs
    ) -> torch.Tensor:
        """Write the tokens' keys and values to their slots, then attend. Called once per layer of a forward pass.

        `query` is [1, num_tokens, num_heads, head_dim], `key` and `value` are [1, num_tokens, num_kv_heads, head_dim];
        the leading dimension is the modelling code's. Returns [1, num_tokens, num_heads, head_dim].

        With an expansion, `query` is that of expanded keys, `key` is what is cached, and `value` is empty. Returns [1,
        num_tokens, num_heads, value dim].
        """


class ProjectionAttention(AttentionBackend, Protocol):
    """An attention backend that takes a decoder's projections as they are: norms of queries and keys, rotary embedding
    and writing to the cache belong to the same kernels then."""

    def begin_parts(self, parts: Sequence[AttentionMetadata]) -> None:
        """Begins a step, see `begin_step`, whose batch comes in parts, see Operators.split. In each layer they are
        attended to in turn, as a part may continue a sequence of the one before."""

    def attend_projections(
        self, layer: int, part: int, qkv: torch.Tensor, projected: ProjectedArgs, rotary: Rotary
    ) -> torch.Tensor:
        """Write the part's keys and values to their slots, then attend. `qkv` is [num_tokens, (num_heads + 2 *
        num_kv_heads) * head_dim] and is overwritten. Returns [num_tokens, num_heads * head_dim].
        """

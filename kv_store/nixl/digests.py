"""Digests of blocks in place: the producer computes them of what it sends, the consumer of what has arrived.

A block has a digest for each part that goes to another of the consumer's ranks (`common.engine.contract.parts`). It
covers the part's bytes and binds the block's hash and its number of tokens, so that another block's bytes, or a block
that was never written, are noticed as well. It is XXH3-128, which detects accidental damage (one of 2^128
random contents has the digest of another) but is no defence against a malicious producer. It is as fast as a plain read
of memory, so that no shorter checksum would be faster: both took 16 GB/s from memory and over 50 from a cache, on one
core.

On a GPU the slabs are copied to pinned host memory for it, a few at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import torch
import xxhash

from common.engine.contract.layout import Part
from common.engine.contract.parts import digests_of_rank, encode_place
from kv_store.block_format import DIGEST_BYTES, HEADER_BYTES
from kv_store.nixl.heads import SlabShape
from kv_store.staging import Staging, create_staging

if TYPE_CHECKING:
    from common.engine.contract.layout import KVLayout, MappedPart
    from common.engine.kv_connector import BlockTransfer
    from common.types import BlockHash
    from kv_store.base import Buffer

_STAGING_BYTES = 8 << 20


def block_digest(runs: Sequence[Buffer], block_hash: BlockHash, num_tokens: int) -> bytes:
    """Returns the digest, 16 bytes, of a slab, or a part of it in several runs, as the contents of this block."""
    if len(runs) == 1:
        digest = xxhash.xxh3_128_digest(runs[0])
    else:
        hasher = xxhash.xxh3_128()
        for run in runs:
            hasher.update(run)
        digest = hasher.digest()
    return xxhash.xxh3_128_digest(block_hash + num_tokens.to_bytes(4, "little") + digest)


class SlabReader(Protocol):
    """One thread's view of a KV cache."""

    def slabs(self, block_ids: Sequence[int]) -> Iterator[Buffer]:
        """Yields the bytes of each block, which are valid until the next one."""


def create_slab_reader(kv_cache: torch.Tensor) -> SlabReader:
    """Creates the reader of the calling thread."""
    if kv_cache.is_cpu:
        return HostSlabReader(kv_cache)
    return StagedSlabReader(create_staging(kv_cache, _STAGING_BYTES))


class HostSlabReader:
    """Reads host memory in place."""

    def __init__(self, kv_cache: torch.Tensor) -> None:
        self._slabs = kv_cache.detach().flatten(start_dim=1).view(torch.uint8).numpy()

    def slabs(self, block_ids: Sequence[int]) -> Iterator[Buffer]:
        """See SlabReader."""
        for block_id in block_ids:
            yield self._slabs[block_id].data


class StagedSlabReader:
    """Reads through frames in host memory."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging

    def slabs(self, block_ids: Sequence[int]) -> Iterator[Buffer]:
        """See SlabReader."""
        frames = self._staging.frames
        for start in range(0, len(block_ids), len(frames)):
            batch = block_ids[start : start + len(frames)]
            self._staging.gather(batch, 0)
            for frame in frames[: len(batch)]:
                yield frame[HEADER_BYTES:]


def digests_of(
    transfer: BlockTransfer, reader: SlabReader, block_size: int, slab: SlabShape, parts: Sequence[MappedPart]
) -> Iterator[bytes]:
    """Yields the digests of these parts of each block of the transfer."""
    places = [(encode_place(part.consumer_rank, part.target), part.source) for part in parts]
    for index, block in enumerate(reader.slabs(transfer.block_ids)):
        block_hash, num_tokens = transfer.block_hashes[index], transfer.num_tokens_in(index, block_size)
        digests = [place + block_digest(slab.runs(block, part), block_hash, num_tokens) for place, part in places]
        yield digests[0] if len(digests) == 1 else b"".join(digests)


def verified(
    transfer: BlockTransfer, reader: SlabReader, layout: KVLayout, slab: SlabShape, rank: int
) -> Iterator[bool]:
    """Yields whether each block of the transfer is what the producer's digests say, as far as it is this rank's. They
    need not cover features."""
    place_of_all = encode_place(rank, Part(0, slab.num_layers, 0, slab.num_heads))
    for index, block in enumerate(reader.slabs(transfer.block_ids)):
        encoded, block_hash = transfer.digests[index], transfer.block_hashes[index]
        num_tokens = transfer.num_tokens_in(index, layout.block_size)
        if encoded.startswith(place_of_all) and len(encoded) == len(place_of_all) + DIGEST_BYTES:
            yield encoded == place_of_all + block_digest([block], block_hash, num_tokens)
        else:
            counts = slab.num_layers, slab.num_heads, layout.num_feature_layers
            parts = digests_of_rank(encoded, rank, *counts)
            yield bool(parts) and all(
                block_digest(slab.runs(block, each.part), block_hash, num_tokens) == each.digest for each in parts
            )


class Digester:
    """Computes digests on a thread of its own."""

    def __init__(self, kv_cache: torch.Tensor, block_size: int, slab: SlabShape) -> None:
        self._block_size = block_size
        self._slab = slab
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kv-nixl-digests")
        self._reader = self._pool.submit(create_slab_reader, kv_cache)  # the first task of the only thread

    def start(self, transfer: BlockTransfer, parts: Sequence[MappedPart]) -> Future[tuple[bytes, ...]]:
        """Starts to compute the digests of these parts of all blocks, which must not change until the result is
        there."""
        return self._pool.submit(self._take, transfer, parts)

    def close(self) -> None:
        """Stops the thread; afterwards the KV cache is no longer read."""
        self._pool.shutdown(cancel_futures=True)

    def _take(self, transfer: BlockTransfer, parts: Sequence[MappedPart]) -> tuple[bytes, ...]:
        return tuple(digests_of(transfer, self._reader.result(), self._block_size, self._slab, parts))

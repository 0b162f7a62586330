"""How a model's KV is cut and lies in the caches of an engine's ranks, and how two engines' caches map onto each other.

The model's fingerprint names what KV means; the layout says where it is. Engines of one fingerprint may hand KV to each
other if `map_layouts` maps their layouts. A store keeps blocks whole, as an engine of one rank has them, so that what
lies there is the same whatever the degree of the engine that wrote it. Pure data.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import msgspec

from common.engine.contract.kv_groups import KVGroupSpec
from common.errors import IncompatiblePeerError

LAYOUT_DIGEST_BYTES = 16
MAX_RANKS = 1024  # more are an invalid message


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layout of an engine's KV cache, of all ranks together."""

    block_size: int  # tokens
    groups: tuple[KVGroupSpec, ...]  # with the heads of the whole model
    tensor_parallel_size: int = 1  # ranks, see heads_by_rank

    @property
    def of_store(self) -> KVLayout:
        """The same KV in a store."""
        return replace(self, tensor_parallel_size=1)

    @property
    def heads_by_rank(self) -> list[range]:
        """The KV heads that each rank has: an equal part of all, or, of fewer heads than ranks, one that others have,
        too. Raises IncompatiblePeerError if the heads cannot be divided."""
        num_heads, num_ranks = self.num_kv_heads, self.tensor_parallel_size
        if not 1 <= num_ranks <= MAX_RANKS or (num_heads % num_ranks and num_ranks % num_heads):
            problem = f"tensor_parallel_size: {num_heads} KV heads cannot be divided among {num_ranks} ranks"
            raise IncompatiblePeerError(problem, param="tensor_parallel_size")
        firsts = (rank * num_heads // num_ranks for rank in range(num_ranks))
        return [range(first, first + max(1, num_heads // num_ranks)) for first in firsts]

    @property
    def num_kv_heads(self) -> int:
        """Those of the whole model, in each group. Raises IncompatiblePeerError if groups differ."""
        found = {group.num_kv_heads for group in self.groups}
        if len(found) != 1 or min(found) < 1:
            problem = f"num_kv_heads: blocks of {sorted(found)} KV heads do not have one shape"
            raise IncompatiblePeerError(problem, param="num_kv_heads")
        return found.pop()

    @property
    def digest(self) -> bytes:
        """LAYOUT_DIGEST_BYTES that stand for the layout."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()[:LAYOUT_DIGEST_BYTES]


class MappedPart(NamedTuple):
    """A part of each block: KV heads that go from one rank's cache to another's. The first heads are counted in each
    rank's own cache."""

    producer_rank: int
    consumer_rank: int
    producer_head: int
    consumer_head: int
    num_heads: int


def map_layouts(producer: KVLayout, consumer: KVLayout) -> tuple[MappedPart, ...]:
    """The parts in which a block goes from one engine, or store, to another, by rank and head of the consumer. Each
    head of each of the consumer's ranks comes in one part; if several of the producer's ranks have it, they take turns.
    Raises IncompatiblePeerError that names what differs or cannot be divided."""
    _check_equal("block_size", producer.block_size, consumer.block_size)
    _check_equal("num_kv_groups", len(producer.groups), len(consumer.groups))
    for group, wanted in zip(producer.groups, consumer.groups, strict=True):
        if group != wanted:
            for field in fields(KVGroupSpec):
                _check_equal(field.name, getattr(group, field.name), getattr(wanted, field.name))
    sources, targets = producer.heads_by_rank, consumer.heads_by_rank
    copies = sources.count(sources[0])  # of each head
    parts = []
    for rank, target in enumerate(targets):
        for source_rank in range(rank % copies, len(sources), copies):
            source = sources[source_rank]
            first, stop = max(source.start, target.start), min(source.stop, target.stop)
            if first < stop:
                parts.append(MappedPart(source_rank, rank, first - source.start, first - target.start, stop - first))
    return tuple(parts)


def _check_equal(name: str, of_producer: object, of_consumer: object) -> None:
    if of_producer != of_consumer:
        problem = f"{name} differs: {of_producer} at the producer, {of_consumer} at the consumer"
        raise IncompatiblePeerError(problem, param=name)

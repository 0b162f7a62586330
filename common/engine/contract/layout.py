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


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Layout of an engine's KV cache, of all ranks together."""

    block_size: int  # tokens
    groups: tuple[KVGroupSpec, ...]  # with the heads of the whole model
    tensor_parallel_size: int = 1  # ranks, each of which has an equal part of the KV heads

    @property
    def of_store(self) -> KVLayout:
        """The same KV in a store."""
        return replace(self, tensor_parallel_size=1)

    @property
    def digest(self) -> bytes:
        """LAYOUT_DIGEST_BYTES that stand for the layout."""
        return hashlib.sha256(msgspec.msgpack.encode(self)).digest()[:LAYOUT_DIGEST_BYTES]


class MappedPart(NamedTuple):
    """A part of each block: what one rank of the producer has goes, as it is, to one rank of the consumer."""

    producer_rank: int
    consumer_rank: int


def map_layouts(producer: KVLayout, consumer: KVLayout) -> tuple[MappedPart, ...]:
    """The parts in which a block goes from one engine, or store, to another: today only layouts that are equal fit.
    Raises IncompatiblePeerError that names what differs."""
    _check_equal("block_size", producer.block_size, consumer.block_size)
    _check_equal("tensor_parallel_size", producer.tensor_parallel_size, consumer.tensor_parallel_size)
    _check_equal("num_kv_groups", len(producer.groups), len(consumer.groups))
    for group, wanted in zip(producer.groups, consumer.groups, strict=True):
        if group != wanted:
            for field in fields(KVGroupSpec):
                _check_equal(field.name, getattr(group, field.name), getattr(wanted, field.name))
    return tuple(MappedPart(rank, rank) for rank in range(producer.tensor_parallel_size))


def _check_equal(name: str, of_producer: object, of_consumer: object) -> None:
    if of_producer != of_consumer:
        problem = f"{name} differs: {of_producer} at the producer, {of_consumer} at the consumer"
        raise IncompatiblePeerError(problem, param=name)

"""How a model's KV is cut and lies in the caches of an engine's ranks, and how two engines' caches map onto each other.

The model's fingerprint names what KV means; the layout says where it is. Engines of one fingerprint may hand KV to each
other if `map_layouts` maps their layouts. A store keeps blocks whole, as an engine of one rank has them, so that what
lies there is the same whatever the degree of the engine that wrote it. Pure data.
"""

from __future__ import annotations

import hashlib
import itertools
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
    tensor_parallel_size: int = 1  # ranks of each stage, see heads_by_rank
    layers_by_stage: tuple[int, ...] = ()  # layers of a block in each stage of a pipeline; empty: there is one
    num_feature_layers: int = 0  # after a block's last layer: room for what a head takes, see Features

    @property
    def num_layers(self) -> int:
        """Layers of KV in a block. The last are not used by groups that have fewer."""
        return max(len(group.layers) for group in self.groups)

    @property
    def kv_dtype(self) -> str:
        """Name of the torch.dtype in blocks, which all groups have."""
        return self.groups[0].dtype if self.groups else ""

    @property
    def of_store(self) -> KVLayout:
        """The same KV in a store."""
        return replace(self, tensor_parallel_size=1, layers_by_stage=())

    @property
    def num_ranks(self) -> int:
        """The number of ranks in all stages together."""
        return self.tensor_parallel_size * max(1, len(self.layers_by_stage))

    @property
    def shards(self) -> list[Shard]:
        """Each rank's part of a block, stage by stage. Raises IncompatiblePeerError if heads or layers cannot be
        divided."""
        heads = self.heads_by_rank
        return [Shard(layers, each) for layers in self._runs_of_layers for each in heads]

    @property
    def _runs_of_layers(self) -> list[range]:
        num_layers = self.num_layers
        counts = self.layers_by_stage or (num_layers,)
        if min(counts) < 1 or sum(counts) != num_layers or len(counts) * self.tensor_parallel_size > MAX_RANKS:
            problem = f"layers_by_stage: {num_layers} layers cannot be divided into stages of {list(counts)}"
            raise IncompatiblePeerError(problem, param="layers_by_stage")
        runs = [range(stop - count, stop) for count, stop in zip(counts, itertools.accumulate(counts), strict=True)]
        return [*runs[:-1], range(runs[-1].start, num_layers + self.num_feature_layers)]

    @property
    def heads_by_rank(self) -> list[range]:
        """The KV heads that each rank of a stage has: an equal part of all, or, of fewer heads than ranks, one that
        others have, too. Raises IncompatiblePeerError if the heads cannot be divided."""
        num_heads, num_ranks = self.num_kv_heads, self.tensor_parallel_size
        if not 1 <= num_ranks <= MAX_RANKS or (num_heads % num_ranks and num_ranks % num_heads):
            problem = f"tensor_parallel_size: {num_heads} KV heads cannot be divided among {num_ranks} ranks"
            raise IncompatiblePeerError(problem, param="tensor_parallel_size")
        firsts = (rank * num_heads // num_ranks for rank in range(num_ranks))
        return [range(first, first + max(1, num_heads // num_ranks)) for first in firsts]

    @property
    def num_kv_heads(self) -> int:
        """The number of KV heads of the whole model, in each group. Raises IncompatiblePeerError if groups differ."""
        found = {group.num_kv_heads for group in self.groups}
        if len(found) != 1 or min(found) < 1:
            problem = f"num_kv_heads: blocks of {sorted(found)} KV heads do not have one shape"
            raise IncompatiblePeerError(problem, param="num_kv_heads")
        return found.pop()

    @property
    def num_planes(self) -> int:
        """Planes of a layer in a block, see KVGroupSpec. Raises IncompatiblePeerError if groups differ."""
        found = {group.num_planes for group in self.groups}
        if len(found) != 1:
            problem = f"value_head_dim: blocks of {sorted(found)} planes do not have one shape"
            raise IncompatiblePeerError(problem, param="value_head_dim")
        return found.pop()

    @property
    def digest(self) -> bytes:
        """LAYOUT_DIGEST_BYTES that stand for the layout of the KV, with features or without."""
        of_kv = replace(self, num_feature_layers=0)
        return hashlib.sha256(msgspec.msgpack.encode(of_kv)).digest()[:LAYOUT_DIGEST_BYTES]


class Shard(NamedTuple):
    """A rank's part of each block."""

    layers: range  # of the block: places in a group's `layers`, and those of features after them
    heads: range


class Part(NamedTuple):
    """Layers and KV heads of a block; the first are counted in a rank's own cache."""

    layer: int
    num_layers: int
    head: int
    num_heads: int


class MappedPart(NamedTuple):
    """A part of each block that goes from one rank's cache to another's."""

    producer_rank: int
    consumer_rank: int
    source: Part  # in the producer's cache
    target: Part  # the same in the consumer's


def map_layouts(producer: KVLayout, consumer: KVLayout) -> tuple[MappedPart, ...]:
    """The parts in which a block goes from one engine, or store, to another, by rank, layer and head of the consumer.
    Each head of a layer of each of the consumer's ranks comes in one part; if several of the producer's ranks have it,
    they take turns. Features go along, all of them, if both have as many layers of them.
    Raises IncompatiblePeerError that names what differs or cannot be divided."""
    _check_equal("block_size", producer.block_size, consumer.block_size)
    _check_equal("num_kv_groups", len(producer.groups), len(consumer.groups))
    for group, wanted in zip(producer.groups, consumer.groups, strict=True):
        if group != wanted:
            for field in fields(KVGroupSpec):
                _check_equal(field.name, getattr(group, field.name), getattr(wanted, field.name))
    if producer.num_feature_layers != consumer.num_feature_layers:
        producer, consumer = (replace(each, num_feature_layers=0) for each in (producer, consumer))
    sources, targets = producer.shards, consumer.shards
    copies = sources.count(sources[0])  # of each head
    parts = []
    for rank, target in enumerate(targets):
        for source_rank in range(rank % copies, len(sources), copies):
            source = sources[source_rank]
            layers, heads = _common(source.layers, target.layers), _common(source.heads, target.heads)
            if layers and heads:
                of_source, of_target = _in_cache(source, layers, heads), _in_cache(target, layers, heads)
                parts.append(MappedPart(source_rank, rank, of_source, of_target))
    return tuple(parts)


def _common(one: range, other: range) -> range:
    return range(max(one.start, other.start), min(one.stop, other.stop))


def _in_cache(shard: Shard, layers: range, heads: range) -> Part:
    return Part(layers.start - shard.layers.start, len(layers), heads.start - shard.heads.start, len(heads))


def _check_equal(name: str, of_producer: object, of_consumer: object) -> None:
    if of_producer != of_consumer:
        problem = f"{name} differs: {of_producer} at the producer, {of_consumer} at the consumer"
        raise IncompatiblePeerError(problem, param=name)

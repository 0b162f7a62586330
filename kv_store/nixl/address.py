"""The address of a consumer's KV cache, for producers that write into it: in ConnectorFacts.address there is one of
each rank.

The bytes come from another pod, and NIXL parses the agent's metadata in C++, so everything is checked first: a digest
of it all, then types and ranges, then that our blocks map onto the peer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Literal, NamedTuple

import msgspec
import xxhash
from msgspec import Meta

from common.engine.contract.layout import KVLayout, MappedPart, map_layouts
from common.engine.contract.parts import decode_addresses
from common.errors import IncompatiblePeerError, TransferError
from kv_store.nixl.heads import Cut, SlabShape

ADDRESS_VERSION = 3
_DIGEST_BYTES = 16

MemoryType = Literal["DRAM", "VRAM"]
_Count = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]  # number of blocks, or of bytes in a block


class Region(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A KV cache in some process's memory: `num_blocks` slabs of `block_bytes`, one after the other."""

    memory: MemoryType
    device_id: Annotated[int, Meta(ge=0, le=(1 << 16) - 1)]  # CUDA ordinal; 0 for DRAM
    base: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]  # address of the first byte
    num_blocks: _Count
    block_bytes: _Count


class NixlAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The address of the KV cache of one rank."""

    agent_name: Annotated[str, Meta(min_length=1, max_length=64)]  # unique per agent, so also per process start
    metadata: Annotated[bytes, Meta(max_length=1 << 20)]  # the agent's, opaque
    fingerprint: bytes  # of the model
    layout: KVLayout  # of all ranks
    region: Region
    version: int = ADDRESS_VERSION

    def encode(self) -> bytes:
        """Encodes the address for another pod."""
        body = msgspec.msgpack.encode(self)
        return xxhash.xxh3_128_digest(body) + body


class IncompatibleAddressError(TransferError):
    """The peer is no NIXL connector of this version, or its blocks differ from ours."""

    reason = IncompatiblePeerError.code.label


def decode_address(encoded: bytes) -> NixlAddress:
    """Raises IncompatibleAddressError unless it is an address of this version."""
    digest, body = encoded[:_DIGEST_BYTES], encoded[_DIGEST_BYTES:]
    if xxhash.xxh3_128_digest(body) != digest:
        raise IncompatibleAddressError("the peer's address is not one of a nixl connector", param="address")
    try:
        address = msgspec.msgpack.decode(body, type=NixlAddress)
    except msgspec.MsgspecError as error:
        raise IncompatibleAddressError(f"the peer's address is malformed: {error}", param="address") from error
    if address.version != ADDRESS_VERSION:
        raise IncompatibleAddressError(
            f"the peer's address has version {address.version}, not {ADDRESS_VERSION}", param="version"
        )
    return address


@dataclass(frozen=True, slots=True)
class RankSlabs:
    """The part of each block that one rank holds."""

    fingerprint: bytes  # of the model
    layout: KVLayout
    rank: int
    slab: SlabShape


class Route(NamedTuple):
    """The way of a part of each block: from our rank to one of the peer's."""

    part: MappedPart
    address: NixlAddress
    source: Cut
    target: Cut


def routes_to(encoded: bytes, own: RankSlabs) -> list[Route]:
    """The ways of all parts that our rank sends to the ranks with these addresses; none if others send what we have.
    Raises IncompatibleAddressError unless our blocks fit the peer's."""
    addresses = [decode_address(each) for each in decode_addresses(encoded)]
    if not addresses:
        raise IncompatibleAddressError("the peer's address is not one of a nixl connector", param="address")
    layout = addresses[0].layout
    try:
        parts = map_layouts(own.layout, layout)
        shards = layout.shards
    except IncompatiblePeerError as error:
        raise IncompatibleAddressError(error.message, param=error.param) from error
    if len(addresses) != len(shards):
        problem = f"the peer has {len(shards)} ranks, but {len(addresses)} addresses"
        raise IncompatibleAddressError(problem, param="address")
    planes = own.slab.planes_per_layer
    slabs = [replace(own.slab, num_heads=len(each.heads), num_planes=planes * len(each.layers)) for each in shards]
    for address, slab in zip(addresses, slabs, strict=True):
        _check_fits(address, own.fingerprint, layout, slab)
    return [
        _route(part, addresses[part.consumer_rank], own.slab, slabs[part.consumer_rank])
        for part in parts
        if part.producer_rank == own.rank
    ]


def _route(part: MappedPart, address: NixlAddress, own: SlabShape, peer: SlabShape) -> Route:
    in_one_run = part.source.num_heads == own.num_heads == peer.num_heads
    source, target = own.cut(part.source, in_one_run=in_one_run), peer.cut(part.target, in_one_run=in_one_run)
    return Route(part, address, source, target)


def _check_fits(address: NixlAddress, fingerprint: bytes, layout: KVLayout, slab: SlabShape) -> None:
    if address.fingerprint != fingerprint:
        raise IncompatibleAddressError("the peer serves another model", param="fingerprint")
    if address.layout != layout:
        raise IncompatibleAddressError("the peer's ranks differ in their layouts", param="layout")
    if address.region.block_bytes != slab.num_bytes:
        raise IncompatibleAddressError(
            f"the peer's blocks have {address.region.block_bytes} bytes, not {slab.num_bytes}", param="block_bytes"
        )


def check_block_ids(region: Region, block_ids: Sequence[int]) -> None:
    """Raises TransferError if the region has no such block."""
    for block_id in block_ids:
        if not 0 <= block_id < region.num_blocks:
            raise TransferError(f"block {block_id} is not one of {region.num_blocks}", param="block_ids")

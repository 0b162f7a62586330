"""The address of a consumer's KV cache, for producers that write into it: the bytes in ConnectorFacts.address.

The bytes come from another pod, and NIXL parses the agent's metadata in C++, so everything is checked first: a digest
of it all, then types and ranges, then that our blocks map onto the peer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
import xxhash
from msgspec import Meta

from common.engine.contract.layout import KVLayout, map_layouts
from common.errors import IncompatiblePeerError, TransferError

ADDRESS_VERSION = 2
_DIGEST_BYTES = 16

MemoryType = Literal["DRAM", "VRAM"]
_Count = Annotated[int, Meta(ge=1, le=(1 << 31) - 1)]  # of blocks, and of bytes in each


class Region(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A KV cache in some process's memory: `num_blocks` slabs of `block_bytes`, one after the other."""

    memory: MemoryType
    device_id: Annotated[int, Meta(ge=0, le=(1 << 16) - 1)]  # CUDA ordinal; 0 for DRAM
    base: Annotated[int, Meta(ge=1, le=(1 << 63) - 1)]  # address of the first byte
    num_blocks: _Count
    block_bytes: _Count


class NixlAddress(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The address of a KV cache."""

    agent_name: Annotated[str, Meta(min_length=1, max_length=64)]  # unique per agent, so also per process start
    metadata: Annotated[bytes, Meta(max_length=1 << 20)]  # the agent's, opaque
    fingerprint: bytes  # of the model
    layout: KVLayout
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


def check_fits(address: NixlAddress, fingerprint: bytes, layout: KVLayout, block_bytes: int) -> None:
    """Raises IncompatibleAddressError unless our blocks fit the peer's."""
    if address.fingerprint != fingerprint:
        raise IncompatibleAddressError("the peer serves another model", param="fingerprint")
    try:
        map_layouts(layout, address.layout)
    except IncompatiblePeerError as error:
        raise IncompatibleAddressError(error.message, param=error.param) from error
    if address.region.block_bytes != block_bytes:
        raise IncompatibleAddressError(
            f"the peer's blocks have {address.region.block_bytes} bytes, not {block_bytes}", param="block_bytes"
        )


def check_block_ids(region: Region, block_ids: Sequence[int]) -> None:
    """Raises TransferError if the region has no such block."""
    for block_id in block_ids:
        if not 0 <= block_id < region.num_blocks:
            raise TransferError(f"block {block_id} is not one of {region.num_blocks}", param="block_ids")

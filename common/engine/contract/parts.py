"""Addresses and digests of direct connectors, each a run of entries of ranks: those of several ranks are joined by
putting one after the other. Pure data."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

from common.engine.contract.layout import Part

_PLACE = struct.Struct("<HHHHH")
_PART = struct.Struct("<HHHHH16s")
_LENGTH = struct.Struct("<I")


class PartDigest(NamedTuple):
    """The digest of a part of a block: of layers and KV heads of one of the consumer's ranks."""

    consumer_rank: int
    layer: int  # the first, in the rank's own cache; the others see Part
    num_layers: int
    head: int
    num_heads: int
    digest: bytes  # 16 bytes

    @property
    def part(self) -> Part:
        """The part that was digested."""
        return Part(*self[1:5])


def encode_place(consumer_rank: int, part: Part) -> bytes:
    """The place of a part, for many blocks: it is followed by the digest in an encoded PartDigest."""
    return _PLACE.pack(consumer_rank, *part)


def encode_digests(parts: Iterable[PartDigest]) -> bytes:
    """Encodes the digests of parts of one block."""
    return b"".join(_PART.pack(*part) for part in parts)


def digests_of_rank(
    encoded: bytes, rank: int, num_layers: int, num_heads: int, num_feature_layers: int = 0
) -> list[PartDigest]:
    """The digests of the parts that make up a block of so many layers and heads of this rank of the consumer, by layer
    and head. Empty if they do not. The last layers may be missing if they are those of features."""
    if len(encoded) % _PART.size:
        return []
    parts = sorted(part for part in map(PartDigest._make, _PART.iter_unpack(encoded)) if part.consumer_rank == rank)
    layer = head = run = 0  # parts of the same `run` layers have all heads
    for part in parts:
        run = run if head else part.num_layers
        if (part.layer, part.num_layers, part.head) != (layer, run, head) or not run or not part.num_heads:
            return []
        head += part.num_heads
        if head == num_heads:
            layer, head = layer + run, 0
    return parts if layer in (num_layers - num_feature_layers, num_layers) and not head else []


def encode_address(address: bytes) -> bytes:
    """Encodes the address of one rank."""
    return _LENGTH.pack(len(address)) + address


def decode_addresses(encoded: bytes) -> list[bytes]:
    """The addresses of all ranks, rank 0 first. Empty if they are not whole."""
    addresses, offset = [], 0
    while offset + _LENGTH.size <= len(encoded):
        (length,) = _LENGTH.unpack_from(encoded, offset)
        offset += _LENGTH.size + length
        addresses.append(encoded[offset - length : offset])
    return addresses if offset == len(encoded) else []

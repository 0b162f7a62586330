"""Content addresses of KV blocks.

A block's hash is `H(parent hash, its token ids)`; the parent of the first block is a root made of the extra keys
(cache salt, adapter). Equal hashes therefore mean equal tokens in equal context for the same tenant, on every pod
and in every process: there is no seed. H is SHA-256 cut to 16 bytes: poisoning another tenant's cache would take a
second preimage (2^128 work).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import NewType

BlockHash = NewType("BlockHash", bytes)

HASH_BYTES = 16


def root_hash(cache_salt: str = "", adapter: str = "") -> BlockHash:
    """Parent of the first block of every prompt with these extra keys."""
    key = f"baton.block.v1\0{len(cache_salt)}\0{cache_salt}\0{adapter}"
    return BlockHash(hashlib.sha256(key.encode()).digest()[:HASH_BYTES])


def hash_block(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Hash of a block that holds `token_ids` after `parent`. Token ids are below 2**32."""
    return BlockHash(hashlib.sha256(parent + array("I", token_ids).tobytes()).digest()[:HASH_BYTES])


def hash_prompt(token_ids: Sequence[int], block_size: int, root: BlockHash) -> list[BlockHash]:
    """Hashes of all full blocks of `token_ids`, in order; a partial last block has none."""
    packed = memoryview(array("I", token_ids).tobytes())
    stride = block_size * 4
    hashes: list[BlockHash] = []
    parent = root
    for start in range(0, len(packed) - stride + 1, stride):  # [start, start + stride)
        parent = BlockHash(hashlib.sha256(parent + packed[start : start + stride]).digest()[:HASH_BYTES])
        hashes.append(parent)
    return hashes


def hash_partial_block(
    token_ids: Sequence[int], block_size: int, full: Sequence[BlockHash], root: BlockHash
) -> BlockHash:
    """Hash of the last, partial block of `token_ids`, whose full blocks have the hashes `full`.

    A partial block never equals a full one: its hash covers fewer tokens.
    """
    tail = token_ids[len(full) * block_size :]
    return hash_block(full[-1] if full else root, tail)


def group_key(block_hash: BlockHash, group: int) -> BlockHash:
    """Name of the block of a KV group. That of the first group, the only one of most models, is the hash itself."""
    return BlockHash(block_hash + bytes([group])) if group else block_hash


def group_of(key: BlockHash) -> int:
    """The KV group of a block by its key."""
    return key[HASH_BYTES] if len(key) > HASH_BYTES else 0


def split_hashes(hashes: bytes) -> list[BlockHash]:
    """Splits joined hashes into one item per block."""
    return [BlockHash(hashes[start : start + HASH_BYTES]) for start in range(0, len(hashes), HASH_BYTES)]

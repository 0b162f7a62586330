"""Content addresses of KV blocks.

A block's hash is `H(parent hash, its token ids)`, with what else decides its KV (extra keys: an image's digest, say;
positions other than the tokens' places in the prompt).
The parent of the first block is a root made of the request's cache salt and of its adapter, by the digest of its
weights. Equal hashes therefore mean equal tokens in equal context, with the same adapter, for the same tenant, on every
pod and in every process: there is no seed. H is SHA-256 cut to 16 bytes: poisoning another tenant's cache would take a
second preimage (2^128 work). What all requests of a pod share, its weights and the types of its numbers, is in the
fingerprint.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from struct import Struct
from typing import NamedTuple, NewType

from common.types.positions import PromptPositions

BlockHash = NewType("BlockHash", bytes)

HASH_BYTES = 16
ADAPTER_DIGEST_BYTES = 32

_ROOT = b"baton.block.v1\0"
_ADAPTED_ROOT = b"baton.block.adapter.v1\0"
_KEYED = b"baton.block.extra-keys.v1\0"  # longer than a parent's hash, with which other blocks begin
_POSITIONED = b"baton.block.positions.v1\0"
_POSITIONS_HEAD = Struct("<II")  # dimensions, tokens
_KEY_HEAD = Struct("<qqI")  # first token and end, from the block's first token on, and length of the digest


class ExtraKey(NamedTuple):
    """A key that decides the KV of some tokens of a prompt beside their ids, as an image does in whose place they
    are."""

    start: int  # index of the first token
    end: int  # one past the last
    digest: bytes  # of the content


def root_hash(cache_salt: str = "", adapter: bytes = b"") -> BlockHash:
    """Parent of the first block of every prompt with this salt and this adapter: the digest of its weights, of
    ADAPTER_DIGEST_BYTES; empty for the model alone. Raises ValueError for one of another length."""
    if not adapter:
        return BlockHash(hashlib.sha256(_ROOT + cache_salt.encode()).digest()[:HASH_BYTES])
    if len(adapter) != ADAPTER_DIGEST_BYTES:
        raise ValueError(f"an adapter's digest has {ADAPTER_DIGEST_BYTES} bytes, not {len(adapter)}")
    return BlockHash(hashlib.sha256(_ADAPTED_ROOT + adapter + cache_salt.encode()).digest()[:HASH_BYTES])


def hash_prompt(
    token_ids: Sequence[int],
    block_size: int,
    root: BlockHash,
    extra_keys: Sequence[ExtraKey] = (),
    first_token: int = 0,
    positions: PromptPositions | None = None,
) -> list[BlockHash]:
    """Hashes of all full blocks of `token_ids`, in order; a partial last block has none. `first_token`: where in the
    prompt they begin, for extra keys and positions."""
    packed = memoryview(array("I", token_ids).tobytes())
    stride = block_size * 4
    hashes: list[BlockHash] = []
    parent = root
    for start in range(0, len(packed) - stride + 1, stride):  # [start, start + stride)
        content = parent + packed[start : start + stride]
        if extra_keys:
            content = _with_keys(content, extra_keys, first_token + start // 4, block_size)
        if positions is not None:
            content = _with_positions(content, positions, first_token + start // 4, block_size)
        parent = BlockHash(hashlib.sha256(content).digest()[:HASH_BYTES])
        hashes.append(parent)
    return hashes


def hash_partial_block(
    token_ids: Sequence[int],
    block_size: int,
    full: Sequence[BlockHash],
    root: BlockHash,
    extra_keys: Sequence[ExtraKey] = (),
    positions: PromptPositions | None = None,
) -> BlockHash:
    """Hash of the last, partial block of `token_ids`, whose full blocks have the hashes `full`.

    A partial block never equals a full one: its hash covers fewer tokens.
    """
    first = len(full) * block_size
    content = (full[-1] if full else root) + array("I", token_ids[first:]).tobytes()
    if extra_keys:
        content = _with_keys(content, extra_keys, first, len(token_ids) - first)
    if positions is not None:
        content = _with_positions(content, positions, first, len(token_ids) - first)
    return BlockHash(hashlib.sha256(content).digest()[:HASH_BYTES])


def _with_keys(content: bytes, extra_keys: Sequence[ExtraKey], first: int, num_tokens: int) -> bytes:
    """Returns the hashed content of a block of so many tokens, from `first` on: where in it each key begins and ends,
    too, as neighbours of equal tokens could share it otherwise."""
    keys = [key for key in extra_keys if key.start < first + num_tokens and first < key.end]
    if not keys:
        return content
    packed = [_KEY_HEAD.pack(key.start - first, key.end - first, len(key.digest)) + key.digest for key in keys]
    return _KEYED + len(keys).to_bytes(4, "little") + b"".join(packed) + content


def _with_positions(content: bytes, positions: PromptPositions, first: int, num_tokens: int) -> bytes:
    """Returns the hashed content of a block of so many tokens, from `first` on. Where positions are the tokens' places,
    as in text before the first image, it is that of a prompt without positions."""
    places = list(range(first, first + num_tokens))
    of_tokens = positions.of_tokens(first, first + num_tokens)
    if all(each == places for each in of_tokens):
        return content
    packed = [array("q", each).tobytes() for each in of_tokens]
    return _POSITIONED + _POSITIONS_HEAD.pack(len(packed), num_tokens) + b"".join(packed) + content


MAX_KV_GROUPS = 256


def group_key(block_hash: BlockHash, group: int) -> BlockHash:
    """Name of the block of a KV group. That of the first group, the only one of most models, is the hash itself."""
    return BlockHash(block_hash + bytes([group])) if group else block_hash


def group_of(key: BlockHash) -> int:
    """The KV group of a block by its key."""
    return key[HASH_BYTES] if len(key) > HASH_BYTES else 0


def split_hashes(hashes: bytes) -> list[BlockHash]:
    """Splits joined hashes into one item per block."""
    return [BlockHash(hashes[start : start + HASH_BYTES]) for start in range(0, len(hashes), HASH_BYTES)]

"""How one block looks on a medium: a frame, which is a fixed-size header and the block's slab of bytes.

The payload has the layout of the store (`KVLayout.of_store`): a block of the whole model, whatever the degree of the
engine that wrote it. The header says what it is (format version, model fingerprint, layout, block hash, dtype, shape,
number of valid tokens) and what its bytes are (length, digest). A receiver knows all of that but the digest from its
own request, so `verify` compares every field with what is expected and then the digest with the bytes. There is nothing
else in a frame to interpret, and nothing is unpickled.

After the payload there may be features, which a head for drafts takes. The header has their length and a digest of
their own: a receiver without such a head, or with one of another size, reads the KV all the same.

The digest is XXH3-128: it detects accidental damage. It is no defence against an attacker who can write to the medium.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import NamedTuple

import xxhash

from common.engine.contract.layout import LAYOUT_DIGEST_BYTES
from common.errors import BlockCorruptError
from common.types import HASH_BYTES, BlockHash, group_key, group_of
from kv_store.base import Buffer

FORMAT_VERSION = 3
FINGERPRINT_BYTES = 32
DIGEST_BYTES = 16

_MAGIC = b"BATONKV\n"
# Little-endian: magic, version, dtype code, layers, planes, KV heads, block size, head dim, tokens, payload bytes,
# fingerprint, block hash, digest, digest of the layout, KV group, zeros; bytes of features, their digest, zeros. 192
# bytes keep the payload aligned.
_HEADER = struct.Struct(
    f"<8sHH6IQ{FINGERPRINT_BYTES}s{HASH_BYTES}s{DIGEST_BYTES}s{LAYOUT_DIGEST_BYTES}sB3sQ{DIGEST_BYTES}s40s"
)
_FEATURES = struct.Struct(f"<Q{DIGEST_BYTES}s")  # a part of the header
_FEATURES_AT = 128
HEADER_BYTES = _HEADER.size

_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1, "float8_e4m3fn": 1}
_DTYPE_CODES = {"float32": 1, "bfloat16": 2, "float16": 3, "int8": 4, "float8_e4m3fn": 5}
_DTYPE_NAMES = {code: name for name, code in _DTYPE_CODES.items()}

SUPPORTED_DTYPES = tuple(_DTYPE_CODES)


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Shape of one block: [num_layers + num_feature_layers, num_planes, num_kv_heads, block_size, head_dim] elements of
    `dtype`."""

    dtype: str  # one of SUPPORTED_DTYPES
    num_layers: int
    num_kv_heads: int
    block_size: int
    head_dim: int
    num_feature_layers: int = 0  # layers of features, which follow the layers of KV
    num_planes: int = 2  # keys and values, or keys alone

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """Elements along each axis of the KV."""
        return (self.num_layers, self.num_planes, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def payload_bytes(self) -> int:
        """Bytes of the KV."""
        return self.num_layers * self._layer_bytes

    @property
    def feature_bytes(self) -> int:
        """Bytes of the features, which follow."""
        return self.num_feature_layers * self._layer_bytes

    @property
    def slab_bytes(self) -> int:
        """Bytes of both."""
        return self.payload_bytes + self.feature_bytes

    @property
    def _layer_bytes(self) -> int:
        return math.prod(self.shape[1:]) * _DTYPE_BYTES[self.dtype]


class BlockHeader(NamedTuple):
    """A parsed header; the field names appear in error messages."""

    dtype: str
    shape: tuple[int, int, int, int, int]
    num_tokens: int  # valid tokens, from the first slot on
    payload_bytes: int
    fingerprint: bytes
    block_hash: BlockHash  # with the KV group, see group_key
    digest: bytes
    layout: bytes  # see BlockFormat
    feature_bytes: int
    feature_digest: bytes  # zeros if there are none

    @property
    def frame_bytes(self) -> int:
        """Bytes of the whole frame."""
        return HEADER_BYTES + self.payload_bytes + self.feature_bytes


def parse_header(frame: bytes | Buffer) -> BlockHeader:
    """Parses the header at the start of `frame`. Raises BlockCorruptError that names an invalid field."""
    if len(frame) < HEADER_BYTES:
        raise BlockCorruptError(f"{len(frame)} bytes are less than a header of {HEADER_BYTES}", param="length")
    header = _HEADER.unpack_from(frame)
    magic, version, dtype_code, *shape = header[:8]
    num_tokens, payload_bytes, fingerprint, block_hash, digest, layout, group, *rest = header[8:]
    padding, feature_bytes, feature_digest, more_padding = rest
    if magic != _MAGIC:
        raise BlockCorruptError(f"not a KV block: magic is {magic!r}", param="magic")
    if version != FORMAT_VERSION:
        raise BlockCorruptError(f"format version {version} is not {FORMAT_VERSION}", param="version")
    if dtype_code not in _DTYPE_NAMES:
        raise BlockCorruptError(f"unknown dtype code {dtype_code}", param="dtype")
    if any(padding) or any(more_padding):
        raise BlockCorruptError("padding is not zero", param="padding")
    return BlockHeader(
        dtype=_DTYPE_NAMES[dtype_code],
        shape=(shape[0], shape[1], shape[2], shape[3], shape[4]),
        num_tokens=num_tokens,
        payload_bytes=payload_bytes,
        fingerprint=fingerprint,
        block_hash=group_key(BlockHash(block_hash), group),
        digest=digest,
        layout=layout,
        feature_bytes=feature_bytes,
        feature_digest=feature_digest,
    )


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """Seals and verifies the frames of one model's blocks of one size."""

    fingerprint: bytes  # FINGERPRINT_BYTES of them
    layout: BlockLayout
    layout_digest: bytes  # LAYOUT_DIGEST_BYTES that stand for the store's whole layout, see KVLayout

    def __post_init__(self) -> None:
        if len(self.fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"a fingerprint has {FINGERPRINT_BYTES} bytes, not {len(self.fingerprint)}")

    @property
    def frame_bytes(self) -> int:
        """Bytes of header, payload and features, as they are written."""
        return HEADER_BYTES + self.layout.slab_bytes

    @property
    def namespace(self) -> str:
        """Separates blocks of this model, in this layout and of this size from all others; safe as a file name."""
        model = xxhash.xxh3_64_hexdigest(self.fingerprint + self.layout_digest)
        return f"v{FORMAT_VERSION}-{model}-{self.layout.block_size}"

    def seal(self, frame: Buffer, block_hash: BlockHash, num_tokens: int) -> None:
        """Writes the header of a frame whose payload and features are in place."""
        kv, features = self._split(frame)
        found = len(features), digest_of(features)
        frame[:HEADER_BYTES] = self._header(block_hash, num_tokens, digest_of(kv), *found)

    def verify(self, frame: Buffer, size: int, block_hash: BlockHash, num_tokens: int) -> None:
        """Raises BlockCorruptError, whose `param` names the field, unless `frame` is exactly the frame of this block.
        `size`: the bytes that the store has of it, of which features of another size than ours may be cut off. There
        are zeros in `frame` then in their place."""
        num_bytes, feature_digest = _FEATURES.unpack_from(frame, _FEATURES_AT) if size >= HEADER_BYTES else (0, b"")
        wanted_size = HEADER_BYTES + self.layout.payload_bytes + num_bytes
        if size != wanted_size:
            raise BlockCorruptError(f"{size} bytes, not {wanted_size}", param="length")
        kv, features = self._split(frame)
        if num_bytes == len(features):
            feature_digest = digest_of(features)
        else:
            features[:] = bytes(len(features))
        if bytes(frame[:HEADER_BYTES]) != self._header(
            block_hash, num_tokens, digest_of(kv), num_bytes, feature_digest
        ):
            raise self._difference(parse_header(frame), block_hash, num_tokens, feature_digest)

    def _split(self, frame: Buffer) -> tuple[Buffer, Buffer]:
        start = HEADER_BYTES + self.layout.payload_bytes
        return frame[HEADER_BYTES:start], frame[start:]

    def _header(
        self, block_hash: BlockHash, num_tokens: int, digest: bytes, feature_bytes: int, feature_digest: bytes
    ) -> bytes:
        return _HEADER.pack(
            _MAGIC,
            FORMAT_VERSION,
            _DTYPE_CODES[self.layout.dtype],
            *self.layout.shape,
            num_tokens,
            self.layout.payload_bytes,
            self.fingerprint,
            block_hash[:HASH_BYTES],
            digest,
            self.layout_digest,
            group_of(block_hash),
            b"",
            feature_bytes,
            feature_digest,
            b"",
        )

    def _difference(
        self, header: BlockHeader, block_hash: BlockHash, num_tokens: int, feature_digest: bytes
    ) -> BlockCorruptError:
        """Describes how a frame differs from the expected one."""
        expected = BlockHeader(
            dtype=self.layout.dtype,
            shape=self.layout.shape,
            num_tokens=num_tokens,
            payload_bytes=self.layout.payload_bytes,
            fingerprint=self.fingerprint,
            block_hash=block_hash,
            digest=header.digest,
            layout=self.layout_digest,
            feature_bytes=header.feature_bytes,
            feature_digest=feature_digest,
        )
        for field, found, wanted in zip(header._fields, header, expected, strict=True):
            if found != wanted:
                return BlockCorruptError(f"{field} is {_show(found)}, not {_show(wanted)}", param=field)
        return BlockCorruptError("the payload does not match the header's digest", param="digest")


def digest_of(part: Buffer | bytes) -> bytes:
    """Returns the digest of KV or of features; zeros if there are none."""
    return xxhash.xxh3_128_digest(part) if len(part) else bytes(DIGEST_BYTES)


def _show(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)

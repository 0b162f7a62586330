"""Checks a stored frame against its name, as far as possible without the request that it belongs to."""

from __future__ import annotations

from common.errors import BlockCorruptError
from kv_store.block_format import FORMAT_VERSION, HEADER_BYTES, BlockFormat, BlockLayout, digest_of, parse_header
from kv_store.inspection.base import StoredBlock, StoreInspector


def is_checked(block: StoredBlock) -> bool:
    """Whether it is of the format of this version, by its name; others are of pods of another version."""
    return block.namespace.startswith(f"v{FORMAT_VERSION}-")


def find_problem(inspector: StoreInspector, block: StoredBlock) -> BlockCorruptError | None:
    """Returns the problem of a block, whose `param` names the field; None if it is valid or gone."""
    frame = inspector.read(block)
    if frame is None:
        return None
    try:
        check_frame(block, frame)
    except BlockCorruptError as error:
        return error
    return None


def check_frame(block: StoredBlock, frame: bytes) -> None:
    """Raises BlockCorruptError unless `frame` is complete, unchanged and under its own name."""
    header = parse_header(frame)
    num_layers, num_planes, num_kv_heads, block_size, head_dim = header.shape
    layout = BlockLayout(header.dtype, num_layers, num_kv_heads, block_size, head_dim, num_planes=num_planes)
    own_format = BlockFormat(header.fingerprint, layout, header.layout)
    kv_end = HEADER_BYTES + layout.payload_bytes
    kv, features = frame[HEADER_BYTES:kv_end], frame[kv_end:]
    expected = {
        "shape": (num_planes in (1, 2), True),
        "payload_bytes": (header.payload_bytes, layout.payload_bytes),
        "length": (len(frame), header.frame_bytes),
        "fingerprint": (own_format.namespace, block.namespace),
        "block_hash": (header.block_hash.hex(), block.hash_hex),
        "digest": (header.digest, digest_of(kv)),
        "feature_digest": (header.feature_digest, digest_of(features)),
    }
    for field, (found, wanted) in expected.items():
        if found != wanted:
            raise BlockCorruptError(f"{field} is {_show(found)}, not {_show(wanted)}", param=field)
    if not 1 <= header.num_tokens <= block_size:
        raise BlockCorruptError(f"num_tokens is {header.num_tokens} in a block of {block_size}", param="num_tokens")


def _show(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)

"""The store Protocol: a medium that keeps KV blocks under their content hashes."""

from __future__ import annotations

from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from common.types import BlockHash

Buffer = memoryview  # of bytes, contiguous


class StoreConnectorOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options that every store connector has."""

    threads: Annotated[int, Meta(ge=1, le=64, description="Transfers that run at once.")] = 2
    timeout_s: Annotated[
        float, Meta(gt=0, le=3600, description="Seconds after which a transfer is given up and its blocks recomputed.")
    ] = 30.0


class BlockStore(Protocol):
    """A medium. A stored block is a frame: header and payload, opaque to the store (see `kv_store.block_format`).

    `open` comes first; `touch`, `write`, `read_into` and `discard` are then called from several threads at once and may
    block; the first three raise StoreError if the medium fails. The same key always means the same content, so of two
    writers the last wins, and a reader sees the frame of one of them, never a mixture.
    """

    def open(self, namespace: str, frame_bytes: int) -> None:
        """Make ready to hold frames of `frame_bytes` bytes. Keys of different namespaces (safe as a file name) never
        meet. Raises ConfigError naming the setting if the medium cannot be used."""

    def touch(self, key: BlockHash) -> bool:
        """True if the block is there; marks it as recently used."""

    def write(self, key: BlockHash, frame: Buffer) -> None:
        """Store a frame; older blocks may be evicted for it. `frame` is not used after the return."""

    def read_into(self, key: BlockHash, buffer: Buffer) -> int:
        """Copy the stored frame into `buffer` and return its size in bytes, whatever it is: what does not fit is left
        out, and nothing is checked. Marks the block as recently used. Raises BlockMissingError."""

    def discard(self, key: BlockHash) -> None:
        """Forget a block, which was found corrupt, so that a good one can be saved. Never raises: what cannot be
        forgotten is logged and found corrupt again."""

    def close(self) -> None:
        """Release the medium. Idempotent; safe after a partial start. Stored blocks stay."""

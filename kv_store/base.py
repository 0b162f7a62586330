"""The store Protocol: a medium that keeps KV blocks under their content hashes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta

from common.types import BlockHash

Buffer = memoryview  # of bytes, contiguous


class StoreConnectorOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options that every store connector has."""

    threads: Annotated[int, Meta(ge=1, le=64, description="Threads that move blocks, several for one transfer.")] = 2
    timeout_s: Annotated[
        float, Meta(gt=0, le=3600, description="Seconds after which a transfer is given up and its blocks recomputed.")
    ] = 30.0
    staging_bytes: Annotated[
        int, Meta(ge=1, description="Host memory of each transfer thread; at least one block is moved at a time.")
    ] = 2 << 20  # more does not stay in a core's cache between medium, digest and KV cache
    lookup_timeout_s: Annotated[
        float, Meta(gt=0, le=3600, description="Seconds that a request waits to hear which of its blocks are kept.")
    ] = 1.0
    host_bytes: Annotated[
        int, Meta(ge=0, description="Host memory of each pod in which it keeps blocks above the store; 0: none.")
    ] = 0
    offload: Annotated[
        bool | None,
        Meta(description="Keep every full block, not only those of handoffs; default: if there is host_bytes."),
    ] = None

    @property
    def wants_offloads(self) -> bool:
        """`offload`, or its default."""
        return self.host_bytes > 0 if self.offload is None else self.offload


class BlockSink(Protocol):
    """What a save needs of a BlockStore; see there."""

    def touch(self, keys: Sequence[BlockHash]) -> list[bool]:
        """Which of the blocks need not be saved."""

    def write(self, keys: Sequence[BlockHash], frames: Sequence[Buffer]) -> None:
        """Store frames."""


class BlockStore(Protocol):
    """A medium. A stored block is a frame: header and payload, opaque to the store (see `kv_store.block_format`).

    `open` comes first; `touch`, `write`, `read_into` and `discard` are then called from several threads at once and may
    block; the first three raise StoreError if the medium fails. A store whose medium can make callers wait refuses them
    with StoreUnavailableError while it is known to fail, and finds out by itself when it works again. Each takes a
    batch, which is one round trip where the medium has such a thing. The same key always means the same content, so of
    two writers the last wins, and a reader sees the frame of one of them, never a mixture.
    """

    def open(self, namespace: str, frame_bytes: int) -> None:
        """Make ready to hold frames of `frame_bytes` bytes. Keys of different namespaces (safe as a file name) never
        meet. Raises ConfigError naming the setting if the medium cannot be used as it is configured."""

    def touch(self, keys: Sequence[BlockHash]) -> list[bool]:
        """Which of the blocks are there; marks those as recently used."""

    def write(self, keys: Sequence[BlockHash], frames: Sequence[Buffer]) -> None:
        """Store frames; older blocks may be evicted for them. `frames` are not used after the return. If it raises,
        some of them may have been stored."""

    def read_into(self, keys: Sequence[BlockHash], buffers: Sequence[Buffer]) -> list[int | None]:
        """Copy each stored frame into its buffer. For each its size in bytes, whatever it is: what does not fit is left
        out, and nothing is checked; None if it is not there. Marks the blocks as recently used."""

    def discard(self, key: BlockHash) -> None:
        """Forget a block, which was found corrupt, so that a good one can be saved. Never raises: what cannot be
        forgotten is logged and found corrupt again."""

    def close(self) -> None:
        """Release the medium. Idempotent; safe after a partial start. Stored blocks stay."""

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
        float, Meta(gt=0, le=3600, description="Seconds after which a transfer fails and its blocks are recomputed.")
    ] = 30.0
    staging_bytes: Annotated[
        int, Meta(ge=1, description="Host memory of each transfer thread; at least one block is moved at a time.")
    ] = 2 << 20  # more does not stay in a core's cache between medium, digest and KV cache
    lookup_timeout_s: Annotated[
        float, Meta(gt=0, le=3600, description="Seconds that a request waits for the lookup of its blocks.")
    ] = 1.0
    host_bytes: Annotated[
        int, Meta(ge=0, description="Host memory of each pod for KV blocks, a tier above the store; 0: none.")
    ] = 0
    offload: Annotated[
        bool | None,
        Meta(description="Save every full block, not only those of handoffs; default: if host_bytes is given."),
    ] = None

    @property
    def wants_offloads(self) -> bool:
        """`offload`, or its default."""
        return self.host_bytes > 0 if self.offload is None else self.offload


class BlockSink(Protocol):
    """The part of a BlockStore that a save uses; see there."""

    def touch(self, keys: Sequence[BlockHash]) -> list[bool]:
        """Tells which of the blocks need not be saved."""

    def write(self, keys: Sequence[BlockHash], frames: Sequence[Buffer]) -> None:
        """Store frames."""


class BlockStore(Protocol):
    """A medium. A stored block is a frame: header and payload, opaque to the store (see `kv_store.block_format`).

    `open` comes first; `touch`, `write`, `read_into` and `discard` are then called from several threads at once and may
    block; the first three raise StoreError if the medium fails. A store whose medium can make callers wait rejects them
    with StoreUnavailableError while the medium is known to fail, and probes it until it works again. Each takes a
    batch, which is one round trip where the medium has such a thing. The same key always means the same content, so of
    two writers the last wins, and a reader sees the frame of one of them, never a mixture.
    """

    def open(self, namespace: str, frame_bytes: int) -> None:
        """Prepares to hold frames of `frame_bytes` bytes. Namespaces, which are safe as file names, keep equal keys
        apart. Raises ConfigError that names the setting if the medium cannot be used as it is configured."""

    def touch(self, keys: Sequence[BlockHash]) -> list[bool]:
        """Tells which of the blocks are stored, and marks those as recently used."""

    def write(self, keys: Sequence[BlockHash], frames: Sequence[Buffer]) -> None:
        """Store frames; older blocks may be evicted for them. `frames` are not used after the return. If it raises,
        some of them may have been stored."""

    def read_into(self, keys: Sequence[BlockHash], buffers: Sequence[Buffer]) -> list[int | None]:
        """Copies each stored frame into its buffer, as far as it fits, without checking it. Returns the size of each
        stored frame in bytes, None for those that are not stored. Marks the blocks as recently used."""

    def discard(self, key: BlockHash) -> None:
        """Deletes a block that was found corrupt, so that a good one can be saved. Never raises: a failure is logged,
        and the block will be found corrupt again."""

    def close(self) -> None:
        """Releases the medium. Idempotent; safe after a partial start. Stored blocks stay."""

"""The connector Protocol: how KV blocks get in and out of an engine.

The life of a transfer:

1. The scheduler decides that blocks are to be loaded (consumer) or saved (producer), pins them and puts a
   BlockTransfer with a fresh job id into the step's SchedulerOutput.
2. The worker hands it to its WorkerConnector: loads before the forward pass, saves after it.
3. The connector works in threads or in the transport of its own and calls `on_settled` from any thread once jobs
   have settled, so that an idle engine wakes up.
4. The worker collects results with `poll` at each step; they travel back in ModelRunnerOutput.
5. The scheduler unpins the blocks. Until a job has settled, nobody else may own its blocks: an error or a
   cancellation does not prove that the transport stopped writing.

A connector is one of two kinds. A store keeps blocks under their content hash; any pod may load them. A direct one
writes a producer's blocks into the blocks that one consumer has reserved: a save then has a `destination` and yields
the blocks' digests, which travel on the handoff stream; the consumer's load moves nothing but compares what has
arrived with them. Its reserved blocks stay pinned until the producer says that it is quiet, see
`common.engine.scheduler.transfers`.

A producer and a consumer over a store may have blocks of different sizes, one of which is a multiple of the other. The
producer saves its own; the consumer's loads name the producer's blocks and say how to regroup them (Regroup).

Some connectors also *keep* blocks (ConnectorFacts.keeps_blocks): what was saved once can be found and loaded by later
requests. These are the tiers below the device. A lookup asks how many leading blocks of a prefix are there, in one
round trip; loads and saves for the sake of a tier, not of a handoff, are marked as such.

The engine owns this Protocol; `kv_store` implements it; the pod's composition root names the factory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from common.types import BlockHash, RequestId

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Destination:
    """Where a direct connector saves to: blocks that a consumer has reserved."""

    address: bytes  # of the consumer's connector, see ConnectorFacts
    block_ids: tuple[int, ...]  # in the consumer's KV cache, one for each block of the transfer


class Piece(NamedTuple):
    """Adjacent tokens of one of the producer's blocks that go into one of the consumer's."""

    block: int  # index into BlockTransfer.block_ids
    start: int  # first slot in it
    source: int  # first slot in the producer's block
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Regroup:
    """How the blocks of a load lie to those that it fills, where the producer's have another size."""

    block_size: int  # tokens of each of the blocks that `block_hashes` names
    offset: int  # of the first one's first token from the first slot of `block_ids`; tokens before it are not wanted

    def pieces(self, index: int, num_tokens: int, block_size: int) -> Iterator[Piece]:
        """Where the `num_tokens` tokens of the producer's block `index` go, in blocks of `block_size` tokens."""
        first = self.offset + index * self.block_size
        slot, stop = max(first, 0), first + num_tokens
        while slot < stop:
            block, start = divmod(slot, block_size)
            piece = Piece(block, start, slot - first, min(block_size - start, stop - slot))
            yield piece
            slot += piece.num_tokens


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """A run of blocks to move. `block_ids[i]` holds the content that `block_hashes[i]` names, unless they are to be
    regrouped."""

    job_id: int  # unique per engine
    request_id: RequestId  # whose blocks; empty for a save of several requests' blocks
    block_ids: tuple[int, ...]  # empty for a lookup
    block_hashes: tuple[BlockHash, ...]
    num_tokens_in_last: int  # tokens in the last block that is named; all it can hold if it is full
    destination: Destination | None = None  # saves of a direct connector only
    digests: tuple[bytes, ...] = ()  # loads of a direct connector only: what the producer says of each block's bytes
    is_for_tier: bool = False  # no other pod waits for it
    regroup: Regroup | None = None  # loads of a store's connector only: `block_hashes` are of blocks of another size


@dataclass(frozen=True, slots=True)
class TransferResult:
    """A settled job: the transport no longer touches its blocks."""

    job_id: int
    num_blocks_ok: int  # leading blocks, as named by hashes, moved and verified; of a lookup: that a load would find
    error: str = ""  # reason label (TransferError.reason) if not all were
    digests: tuple[bytes, ...] = ()  # saves of a direct connector only: of the blocks moved


@dataclass(frozen=True, slots=True)
class ConnectorFacts:
    """What the engine and its peers must know of an open connector."""

    is_direct: bool = False
    address: bytes = b""  # direct: what a producer's connector needs to write into this KV cache; opaque to all others
    keeps_blocks: bool = False  # lookups find what was saved before
    wants_offloads: bool = False  # keeps_blocks, and every full block is to be saved, not only those of handoffs


class WorkerConnector(Protocol):
    """Moves blocks between one worker's KV cache and a medium. All methods are called on the worker's thread
    and return without waiting for the medium; every started job settles exactly once, within a deadline."""

    def register_kv_cache(
        self, kv_cache: torch.Tensor, fingerprint: bytes, on_settled: Callable[[], None]
    ) -> ConnectorFacts:
        """Called once, before anything else. `kv_cache` is
        [num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim], one block one contiguous slab.
        Opens the medium; raises ConfigError naming the setting if that is impossible."""

    def start_load(self, transfer: BlockTransfer) -> None:
        """Begin to fill the blocks. Each is checked against fingerprint, hash, length and digest."""

    def start_save(self, transfer: BlockTransfer) -> None:
        """Begin to make sure that the medium holds the blocks, which no longer change."""

    def start_lookup(self, transfer: BlockTransfer) -> None:
        """Begin to ask how many leading blocks of `block_hashes` are kept. Never called unless `keeps_blocks`. Settles
        soon: a request waits for it before it may be computed."""

    def cancel(self, job_id: int) -> None:
        """The result is no longer wanted; settle soon. Unknown and settled ids are ignored."""

    def poll(self) -> list[TransferResult]:
        """Jobs settled since the last call."""

    def close(self) -> None:
        """Settle or abandon everything and release the medium. Idempotent; safe after a partial start."""


ConnectorFactory = Callable[[str, Mapping[str, str | int | float | bool]], WorkerConnector]
"""(connector name, options) -> connector. Raises ConfigError for an unknown name or a bad option."""

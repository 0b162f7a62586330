"""The connector Protocol: how KV blocks move in and out of an engine.

The life of a transfer:

1. The step loop pins blocks and passes them to the transfer thread (`common.engine.transfers`).
2. That thread passes a BlockTransfer with a fresh job id to the connector, which works in threads or in a transport of
   its own.
3. The connector calls `on_settled` from any thread once jobs have settled; the transfer thread collects results with
   `poll`, starts the jobs that follow from them and notifies clients and the step loop.
4. The step loop unpins the blocks. Until a job has settled, no other request may own its blocks: an error or a
   cancellation does not prove that the transport stopped writing.

A connector is one of two kinds. A store keeps blocks under their content hash; any pod may load them. A direct one
writes a producer's blocks into the blocks that one consumer has reserved: a save then has a `destination` and yields
the blocks' digests, which travel on the handoff stream; the consumer's load moves nothing but compares what has
arrived with them, see `common.engine.transfers.streams`.

Some connectors also *keep* blocks (ConnectorFacts.keeps_blocks): what was saved once can be found and loaded by later
requests. These are the tiers below the device. A lookup asks how many leading blocks of a prefix are there, in one
round trip; loads and saves for the sake of a tier, not of a handoff, are marked as such.

The engine owns this Protocol; `kv_store` implements it; the pod's composition root names the factory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from common.engine.contract.layout import KVLayout
from common.engine.contract.step import Fence
from common.types import BlockHash, RequestId

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Destination:
    """The destination of a direct connector's saves: blocks that a consumer has reserved."""

    address: bytes  # of the connectors of all the consumer's ranks, see ConnectorFacts
    block_ids: tuple[int, ...]  # in the consumer's KV cache, one for each block of the transfer


@dataclass(frozen=True, slots=True)
class BlockTransfer:
    """A run of blocks to move. `block_ids[i]` holds the content that `block_hashes[i]` names; see `group_key`."""

    job_id: int  # unique per engine
    request_id: RequestId  # whose blocks; empty for a save of several requests' blocks
    block_ids: tuple[int, ...]  # empty for a lookup
    block_hashes: tuple[BlockHash, ...]
    num_tokens_in_last: int  # tokens in the last blocks; all they can hold if they are full
    destination: Destination | None = None  # saves of a direct connector only
    digests: tuple[bytes, ...] = ()  # loads of a direct connector only: the producer's, of each block, see PartDigest
    is_for_tier: bool = False  # no other pod waits for it
    fence: Fence = 0
    num_last: int = 1  # blocks at the end that hold `num_tokens_in_last` tokens, each of another KV group
    slots: tuple[int, ...] = ()  # of a rank: where its engine's ranks put these blocks together, see SlotConnector
    content: bytes = b""  # loads by a rank that does not see the slots: what is in them for it

    def num_tokens_in(self, index: int, block_size: int) -> int:
        """Tokens in the block of this index."""
        return self.num_tokens_in_last if index >= len(self.block_hashes) - self.num_last else block_size


@dataclass(frozen=True, slots=True)
class TransferResult:
    """A settled job: the transport no longer touches its blocks."""

    job_id: int
    num_blocks_ok: int  # leading blocks moved and verified; of a lookup: that a load would find
    error: str = ""  # reason label (TransferError.reason) if not all were
    digests: tuple[bytes, ...] = ()  # saves of a direct connector only: of the blocks moved, see PartDigest
    found: tuple[bool, ...] = ()  # lookups only: which of the blocks a load would find
    content: bytes = b""  # saves by a rank that does not see the slots: what it has for them


@dataclass(frozen=True, slots=True)
class ConnectorFacts:
    """Facts of an open connector, for the engine and its peers."""

    is_direct: bool = False
    max_write_s: float = 0.0  # direct: most seconds from the beginning of a write to its end
    part_blocks: int | None = None  # direct: most blocks of a save, so that a consumer checks one as the next goes on
    address: bytes = b""  # direct: for a producer's connectors, to write into this KV cache, see encode_address
    keeps_blocks: bool = False  # lookups find what was saved before
    wants_offloads: bool = False  # keeps_blocks, and every full block should be saved, not only those of handoffs


class Fences(Protocol):
    """The steps of a worker whose device goes on computing after they were answered. Used on any thread."""

    def is_over(self, fence: Fence) -> bool:
        """Whether the device has finished the step."""

    def wait(self, fence: Fence) -> None:
        """Work that the calling thread gives its current stream from now on begins after the step."""


class NoFences:
    """Fences of a device that has finished a step when it is answered."""

    def is_over(self, fence: Fence) -> bool:
        """See Fences."""
        return True

    def wait(self, fence: Fence) -> None:
        """See Fences."""


NO_FENCES = NoFences()


class Connector(Protocol):
    """Moves blocks between an engine's KV cache and a medium. Its methods are called on the transfer thread and return
    without waiting for the medium; every started job settles exactly once, within a deadline."""

    def start_load(self, transfer: BlockTransfer) -> None:
        """Starts to fill the blocks. Each is checked against fingerprint, hash, length and digest."""

    def start_save(self, transfer: BlockTransfer) -> None:
        """Starts to save the blocks, which no longer change, unless the medium has them."""

    def start_lookup(self, transfer: BlockTransfer) -> None:
        """Starts to look up how many leading blocks of `block_hashes` are kept. Only called if `keeps_blocks`. Must
        settle soon, as a request waits for it."""

    def cancel(self, job_id: int) -> None:
        """Cancels a job, which still settles, soon. Ignores unknown and settled ids."""

    def poll(self) -> list[TransferResult]:
        """Jobs settled since the last call."""


class WorkerConnector(Connector, Protocol):
    """The Connector of one worker, which opens and closes it on its own thread."""

    def register_kv_cache(
        self,
        kv_cache: torch.Tensor,
        fingerprint: bytes,
        layout: KVLayout,
        on_settled: Callable[[], None],
        fences: Fences = NO_FENCES,
        rank: int = 0,
    ) -> ConnectorFacts:
        """Called once, before anything else. `kv_cache` is that of `rank`,
        [num_blocks, num_layers, planes, num_kv_heads, block_size, head_dim], one block one contiguous slab;
        `layout` is that of the engine.
        Opens the medium; raises ConfigError that names the setting if that is impossible."""

    def split(self) -> SplitConnector:
        """The parts of it for an engine of several ranks, which uses these instead."""

    def close(self) -> None:
        """Settles or abandons all jobs and releases the medium. Idempotent; safe after a partial start."""


class SplitConnector(NamedTuple):
    """The parts of a connector in an engine of several ranks."""

    per_rank: WorkerConnector | None  # moves KV heads: each rank has one
    per_engine: WorkerConnector | None  # moves whole blocks: one for all ranks, over slots, see StagedConnector


class OpenConnector(NamedTuple):
    """A connector over a KV cache."""

    connector: Connector
    facts: ConnectorFacts


ConnectorFactory = Callable[[str, Mapping[str, str | int | float | bool]], WorkerConnector]
"""(connector name, options) -> connector. Raises ConfigError for an unknown name or a bad option."""

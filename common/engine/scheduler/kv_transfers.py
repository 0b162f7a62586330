"""The interface between the scheduler and KV transfers.

The scheduler decides which request owns which blocks, not how KV moves in and out of them. It passes on blocks and goes
on; the outcomes it collects between two steps. Implemented by
`common.engine.transfers.TransferPort`, which talks to an actor on a thread of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from common.engine.kv_cache import Block
from common.engine.scheduler.request import Request
from common.types import RequestId, SampledToken


class Kept(NamedTuple):
    """Answer to `ask`: so many leading blocks of the request are in its prefix cache or in a tier below."""

    request: Request
    num_blocks: int  # 0: no tier keeps any


class HandedOver(NamedTuple):
    """The handoff to a consumer has ended, successfully or not. The consumer continues from its leading valid
    blocks."""

    request_id: RequestId
    num_blocks: int  # leading blocks of the prompt that are valid, those found in the prefix cache included
    first_token: SampledToken | None  # None: the handoff failed
    failure: str  # reason label; empty: nothing is missing
    final_at: float | None  # when the producer's last update arrived, monotonic seconds
    may_be_written: bool  # the producer may still write to the reserved blocks: the request must take others


class Restored(NamedTuple):
    """A restore has ended, successfully or not."""

    request: Request
    num_blocks: int  # leading blocks that are valid


Arrival = Kept | HandedOver | Restored


class KVTransfers(Protocol):
    """Called on the scheduler's thread; every call returns at once and costs in proportion to what changed.

    Blocks that are handed over are pinned: they are not reused until the transport no longer touches
    them, even if their request ends.
    """

    def begin(self, request: Request) -> None:
        """A producer or consumer was queued."""

    def ask(self, request: Request) -> bool:
        """Ask how much of a request without blocks the tiers keep; `collect` answers with Kept. False: not asked."""

    def ask_again(self, request: Request, num_cached_blocks: int) -> bool:
        """At its turn, if the prefix that was cached when it asked is gone by now: see `ask`."""

    def admitted(self, request: Request) -> None:
        """The request has got blocks for all its tokens."""

    def receive(self, request: Request) -> list[int]:
        """A consumer waits for its KV; `collect` answers with HandedOver. The ids of its blocks for the rest of the
        prompt if a producer writes to them, else empty."""

    def restore(self, request: Request) -> None:
        """Fill the blocks that a tier keeps; `collect` answers with Restored."""

    def arrived(self, request: Request, arrival: HandedOver | Restored) -> None:
        """The request has taken what arrived: `request.num_computed_tokens` says how much."""

    def computed(self, request: Request) -> None:
        """A step has computed tokens of the request; the KV of `request.num_computed_tokens` tokens is in its blocks.
        Not called for a decode that fills no block."""

    def step_ended(self) -> None:
        """The step has ended."""

    def released(self, request: Request) -> None:
        """The request is about to lose its blocks: preempted, or ended."""

    def ended(self, request: Request, *, is_aborted: bool) -> None:
        """The request has ended. `is_aborted`: blocks that are not saved need not be."""

    def collect(self) -> Sequence[Arrival]:
        """Returns what has arrived since the last call, and unpins blocks that no transport touches any more."""

    def knows(self, request_id: RequestId) -> bool:
        """Whether blocks of a request of this id are still in transfer."""

    @property
    def has_events(self) -> bool:
        """Whether `collect` would do something."""

    @property
    def pinned_blocks(self) -> Iterable[Block]:
        """Blocks that were handed over, as often as they are pinned."""

    @property
    def writable_blocks(self) -> Iterable[Block]:
        """Blocks that a producer may be writing to."""


class NoTransfers:
    """KVTransfers of an engine without a connector."""

    has_events = False
    pinned_blocks: Sequence[Block] = ()
    writable_blocks: Sequence[Block] = ()

    def begin(self, request: Request) -> None:
        """See KVTransfers."""

    def ask(self, request: Request) -> bool:
        """See KVTransfers."""
        return False

    def ask_again(self, request: Request, num_cached_blocks: int) -> bool:
        """See KVTransfers."""
        return False

    def admitted(self, request: Request) -> None:
        """See KVTransfers."""

    def receive(self, request: Request) -> list[int]:
        """See KVTransfers. Never called: no request is a consumer."""
        raise RuntimeError("this engine has no connector")

    def restore(self, request: Request) -> None:
        """See KVTransfers. Never called: nothing is kept."""
        raise RuntimeError("this engine has no connector")

    def arrived(self, request: Request, arrival: HandedOver | Restored) -> None:
        """See KVTransfers. Never called: nothing arrives."""

    def computed(self, request: Request) -> None:
        """See KVTransfers."""

    def step_ended(self) -> None:
        """See KVTransfers."""

    def released(self, request: Request) -> None:
        """See KVTransfers."""

    def ended(self, request: Request, *, is_aborted: bool) -> None:
        """See KVTransfers."""

    def collect(self) -> Sequence[Arrival]:
        """See KVTransfers."""
        return ()

    def knows(self, request_id: RequestId) -> bool:
        """See KVTransfers."""
        return False

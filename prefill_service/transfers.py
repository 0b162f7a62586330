"""The transfers of a prefill pod. One transfer joins two legs, which may arrive in either order:

- the producer, a prefill in this pod's engine, which updates the state of the KV;
- the consumer, a decode pod's handoff stream, which reads it. It may lag: it gets the latest state, not each change.

      (new) --producer--> RUNNING --+--> SETTLED: delivered or failed
        |                    ^      |
        `--consumer--> WAITING -----+    (no producer within the lease: failed)

A transfer leaves the registry, which owns it, when

1. it is settled, and its consumer has got the outcome or has left;
2. its consumer has left before any producer came, without a cancellation;
3. it is settled and no consumer came within the lease; or it failed before a producer came, and is kept that long to
   refuse it;
4. it has failed, waits for its lease to end, and its place is needed.

A consumer that leaves without a cancellation does not end the prefill, as the router still needs its first token. A
direct connector is the exception: it would go on writing into blocks that the consumer cannot reserve without end. Its
transfer is settled only when the engine has stopped writing: `delivered` and `failed` promise that.
After the first token the lease also bounds the time between two saves, so that a connector that hangs keeps nothing.
A failed transfer is only remembered; it no longer counts as open work of the pod.

Leases. Each wait has one; a message of the awaited side renews it:

    waits for                                       began with                      renewed by
    the producer                                    the consumer's stream           (nothing)
    the consumer                                    the verdict                     (nothing)
    a consumer's blocks, direct connectors only     the first token                 its `renew`, while its engine works
    the last saves                                  the first token, the blocks     each save

The consumer has timeouts of its own: while a prefill is being computed it waits for its next event, and the last
progress is repeated as long as the engine works. See `decode_service.handoff`.

Restarts. A transfer belongs to one incarnation of either pod. A new incarnation of this one knows no transfers: the
streams of the old one have broken. A new incarnation of the decode pod comes with another epoch, which shares
nothing with the one before: neither outcome nor blocks nor the address of its connector.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from common.errors import (
    BatonError,
    DeadlineExceededError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from common.pod.admission import Admission
from common.types import SampledToken, TransferId

logger = logging.getLogger(__name__)


class TransferKey(NamedTuple):
    """Identifies one attempt of a transfer; the epoch fences attempts from each other."""

    transfer_id: TransferId
    epoch: int

    def __str__(self) -> str:
        return f"{self.transfer_id}/{self.epoch}"


@dataclass(frozen=True, slots=True)
class Reservation:
    """The blocks that the consumer has reserved for the transfer."""

    num_held_tokens: int  # leading prompt tokens whose KV it has already
    block_ids: tuple[int, ...]  # direct connectors: its blocks for the rest
    address: bytes  # direct connectors: of its connector


class ProducingLeg(Protocol):
    """The prefill that produces a transfer's KV. Calls return at once."""

    def cancel(self, error: BatonError) -> None:
        """Ends with `error` and fails the transfer with it: now, or when a direct connector has stopped writing."""

    def take_reservation(self, reservation: Reservation) -> None:
        """Takes the blocks of the consumer. Called at most once."""


class Transfer:
    """The state of one transfer. Changed by the registry's methods only."""

    def __init__(self, key: TransferKey) -> None:
        self.key = key
        self.has_producer = False
        self.has_consumer = False
        self.consumer_left = False
        self.is_computing = False  # the producer was scheduled
        self.reservation: Reservation | None = None  # once the consumer has its blocks
        self.num_ready_tokens = 0  # leading prompt tokens whose KV is in the connector
        self.digests: list[bytes] = []  # direct connectors: of the blocks written, in order
        self.first_token: SampledToken | None = None  # set once all KV is there: delivered
        self.error: BatonError | None = None  # set if it failed
        self.changed = asyncio.Event()  # wakes the consumer
        self.is_quiescent = True  # False: it failed, and its engine may still write
        self.producer: ProducingLeg | None = None  # while it runs
        self.data_parallel_rank = 0  # of the producer's engine
        self.lease: asyncio.TimerHandle | None = None

    @property
    def is_settled(self) -> bool:
        """Whether it was delivered or has failed; it no longer changes."""
        return self.first_token is not None or self.error is not None


class TransferRegistry:
    """Owns all transfers of the pod. Each counts as open work of the pod until it has failed or is removed."""

    def __init__(self, admission: Admission, *, max_transfers: int, lease_s: float, is_direct: bool) -> None:
        self._admission = admission
        self._is_direct = is_direct
        self._is_closed = False
        self._max_transfers = max_transfers
        self.lease_s = lease_s
        self._transfers: dict[TransferKey, Transfer] = {}

    def __len__(self) -> int:
        return len(self._transfers)

    @property
    def num_open(self) -> int:
        """Transfers that have not failed."""
        return sum(transfer.error is None for transfer in self._transfers.values())

    # -- the producer's side ----------------------------------------------------------------------------------------

    def attach_producer(self, key: TransferKey, producer: ProducingLeg, data_parallel_rank: int = 0) -> Transfer:
        """Registers a prefill that begins, in this of the pod's engines. Raises InvalidRequestError if the transfer has
        a producer already, the transfer's own error if it was cancelled before, OverloadedError if there are too
        many."""
        transfer = self._transfers.get(key)
        if transfer is None:
            transfer = self._create(key)
        elif transfer.has_producer:
            raise InvalidRequestError(f"transfer {key} has a producer already", param="transfer_id")
        elif transfer.error is not None:
            raise transfer.error
        transfer.has_producer = True
        transfer.producer = producer
        transfer.data_parallel_rank = data_parallel_rank
        self._end_lease(transfer)
        return transfer

    def note_computing(self, transfer: Transfer) -> None:
        """The producer was scheduled for the first time."""
        transfer.is_computing = True
        transfer.changed.set()

    def note_ready(self, transfer: Transfer, num_tokens: int, digests: Sequence[bytes] = ()) -> None:
        """The KV of the first `num_tokens` prompt tokens is in the connector; the engine may report this before it
        reports that the producer was scheduled. `digests`: of the blocks that this adds, direct connectors only."""
        if not transfer.is_settled and num_tokens > transfer.num_ready_tokens:
            transfer.is_computing = True
            transfer.num_ready_tokens = num_tokens
            transfer.digests += digests
            transfer.changed.set()
            if transfer.lease is not None:
                self._start_lease(transfer)

    def note_first_token(self, transfer: Transfer) -> None:
        """The prompt is computed: only saves are awaited from now on."""
        if not transfer.is_settled:
            self._start_lease(transfer)

    def deliver(self, transfer: Transfer, first_token: SampledToken) -> None:
        """All KV is in the connector."""
        if not transfer.is_settled:
            transfer.first_token = first_token
            self._settle(transfer)

    def fail(self, transfer: Transfer, error: BatonError, *, is_quiescent: bool = True) -> None:
        """Fails the transfer, unless it is settled. `is_quiescent` False: a direct connector may still write, so the
        consumer does not get the outcome."""
        if not transfer.is_settled:
            transfer.error = error
            transfer.is_quiescent = is_quiescent
            self._admission.release()
            self._settle(transfer)

    # -- the consumer's side ----------------------------------------------------------------------------------------

    def attach_consumer(self, key: TransferKey) -> Transfer:
        """Registers a decode pod that reads the transfer's events. Raises InvalidRequestError if there is one already,
        UnavailableError if the transfer is unknown and the pod is draining, OverloadedError if there are too many."""
        transfer = self._transfers.get(key)
        if transfer is None:
            if self._admission.draining:
                raise UnavailableError("the pod is draining and takes no new work")
            transfer = self._create(key)
            self._start_lease(transfer)
        elif transfer.has_consumer:
            raise InvalidRequestError(f"transfer {key} has a consumer already", param="transfer_id")
        elif transfer.is_settled:
            self._end_lease(transfer)
        transfer.has_consumer = True
        return transfer

    def reserve(self, transfer: Transfer, reservation: Reservation) -> None:
        """Takes the blocks of the consumer. Raises InvalidRequestError if it has sent them before."""
        if transfer.reservation is not None:
            raise InvalidRequestError(f"transfer {transfer.key} has its blocks already", param="reserved")
        transfer.reservation = reservation
        if transfer.lease is not None:
            self._start_lease(transfer)
        if transfer.producer is not None:
            transfer.producer.take_reservation(reservation)

    def renew(self, transfer: Transfer) -> None:
        """Extends the lease on KV that waits for the consumer's blocks. Nothing else of a transfer waits for the
        consumer, so nothing else is renewed."""
        if transfer.has_producer and transfer.lease is not None and not self._has_target(transfer):
            self._start_lease(transfer)

    def cancel(self, transfer: Transfer, error: BatonError) -> None:
        """Cancels the transfer for the consumer. The prefill ends too, even if it has not begun yet."""
        if transfer.producer is not None:
            transfer.producer.cancel(error)
        else:
            self.fail(transfer, error)

    def detach_consumer(self, transfer: Transfer) -> None:
        """The consumer's stream has ended."""
        transfer.consumer_left = True
        if self._is_direct and transfer.producer is not None:
            self.cancel(transfer, UnavailableError("the decode pod's stream broke"))
        if not transfer.has_producer and transfer.error is not None:
            self._start_lease(transfer)  # to refuse the producer
        elif transfer.is_settled or not transfer.has_producer:
            self._remove(transfer)

    # -- inside -----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Fails every transfer and ends its prefill; removes those to which the engine no longer writes. Idempotent."""
        self._is_closed = True
        for transfer in list(self._transfers.values()):
            self.cancel(transfer, UnavailableError("the pod is closing"))
            if transfer.is_settled:
                self._remove(transfer)

    def forget(self) -> None:
        """Removes what is left after `close`, once consumers have had time to read the outcome."""
        for transfer in list(self._transfers.values()):
            self.fail(transfer, UnavailableError("the pod is closing"), is_quiescent=False)
            self._remove(transfer)

    def violations(self) -> list[str]:
        """Transfers that will never be removed."""
        return [
            f"transfer {transfer.key} has neither a lease nor a producer, so it will never be removed"
            for transfer in self._transfers.values()
            if transfer.lease is None
            and transfer.producer is None
            and (transfer.consumer_left or not transfer.has_consumer)
        ]

    def _create(self, key: TransferKey) -> Transfer:
        if len(self._transfers) >= self._max_transfers and not self._forget_a_failed_one():
            raise OverloadedError(f"{len(self._transfers)} transfers are open, the limit of this pod")
        transfer = self._transfers[key] = Transfer(key)
        self._admission.hold()
        return transfer

    def _forget_a_failed_one(self) -> bool:
        """Makes room by removing the oldest failed transfer before its lease ends. False: there is none."""
        failed = (each for each in self._transfers.values() if each.error is not None and each.lease is not None)
        oldest = next(failed, None)
        if oldest is not None:
            self._remove(oldest)
        return oldest is not None

    def _settle(self, transfer: Transfer) -> None:
        transfer.producer = None
        transfer.changed.set()
        if transfer.consumer_left or (self._is_closed and not transfer.has_consumer):
            self._remove(transfer)
        elif transfer.has_consumer:
            self._end_lease(transfer)  # its stream sends the outcome
        else:
            self._start_lease(transfer)

    def _expire(self, transfer: Transfer) -> None:
        transfer.lease = None
        if transfer.is_settled:
            if transfer.error is None:
                logger.warning("transfer %s: no decode pod asked for it within %g s", transfer.key, self.lease_s)
            self._remove(transfer)
        elif transfer.has_producer:
            missing = "no KV was saved" if self._has_target(transfer) else "the decode pod reserved no blocks"
            self.cancel(transfer, DeadlineExceededError(f"{missing} for {self.lease_s:g} s"))
        else:
            self.fail(transfer, DeadlineExceededError(f"no prefill request came within {self.lease_s:g} s"))

    def _has_target(self, transfer: Transfer) -> bool:
        return not self._is_direct or transfer.reservation is not None

    def _remove(self, transfer: Transfer) -> None:
        self._end_lease(transfer)
        if self._transfers.pop(transfer.key, None) is not None and transfer.error is None:
            self._admission.release()

    def _start_lease(self, transfer: Transfer) -> None:
        self._end_lease(transfer)
        transfer.lease = asyncio.get_running_loop().call_later(self.lease_s, self._expire, transfer)

    def _end_lease(self, transfer: Transfer) -> None:
        if transfer.lease is not None:
            transfer.lease.cancel()
            transfer.lease = None

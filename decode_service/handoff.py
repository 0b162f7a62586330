"""The decode side of one handoff: a stream to the prefill pod, and what its events mean for the request.

    OPENING --computing--> RESERVED --progress*--> RESERVED --delivered--> DELIVERED
       |                      |
       |                      `--failed, broken, overdue, prefill leg failed--> FAILED: computes what is missing
       `--failed, broken, refused, overdue, prefill leg failed--> FAILED: computes all
    any --the request ended--> CANCELLED

OPENING lasts while the prefill queues: the request is not in the engine yet and holds no blocks. At `computing` it is
added as a consumer, which reserves blocks; when it has them, the prefill pod is told how much of the prompt they
hold already. A broken stream is noticed at once, and every wait has a deadline:

    waits for                                   at most                     renewed by
    the prefill's turn                          handoff_queue_timeout_s     (nothing)
    KV                                          STALL_TIMEOUT_S             each event; a slow prefill pod repeats its
                                                                            progress as long as its engine works
    our own blocks, direct connectors only      the request's deadline      (the prefill pod can do nothing without)

In the last case the prefill pod waits while it holds KV, so its lease is renewed as long as our engine works. For its
other leases see `prefill_service.transfers`.

A handoff joins one incarnation of either pod: when one ends, the stream breaks, and its successor does not know the
handoff. The router's next attempt has another epoch, so that leftovers of this one are ignored.

A direct connector's producer is also told which blocks these are, and writes into them. They stay reserved until it is
quiescent, even if the request has ended: its `delivered` or `failed` confirms that, also in reply to our cancellation.
If the stream breaks before either arrives, the blocks are quarantined.

A handoff fails a request only if that is the request's policy. Otherwise missing KV is computed here and counted under
a reason:

    prefill_failed     the prefill pod or the router reported that the prefill failed
    prefill_refused    the same, because of what the request asks for, or asks for too often
    handoff_broken     the prefill pod cannot be reached, or the stream ended early
    handoff_timeout    no event arrived in time
    handoff_refused    the prefill pod rejected the transfer
    handoff_invalid    an event does not fit the request
    incompatible       model, block layout or connector differ
    no_connector       this pod has no connector
    quarantine_full    lost prefill pods may still write to too many blocks
    internal           a bug; see the log
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from common.engine.contract.layout import KVLayout, map_layouts
from common.engine.kv_cache import KVGroups
from common.errors import (
    BatonError,
    DeadlineExceededError,
    ErrorCode,
    IncompatiblePeerError,
    InvalidRequestError,
    OverloadedError,
    RequestCancelledError,
)
from common.pb import pods_pb2
from common.pb.pods_pb2_grpc import HandoffStub
from common.pod.convert import layout_from_pb, layout_to_pb, sampled_token_from_pb
from common.rpc.channel import ChannelPool
from common.rpc.errors import error_from_pb, from_rpc_error
from common.types import SampledToken

if TYPE_CHECKING:
    from common.pb.pods_pb2_grpc import HandoffAsyncStub  # exists in the type stubs only

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 2.0  # within a cluster; if it fails, this pod computes the prompt itself
STALL_TIMEOUT_S = 30.0  # as long as the default lease of a prefill pod, which repeats its progress three times in it
WRITE_TIMEOUT_S = 5.0  # for gRPC to take one of our small messages
DEFAULT_LEASE_S = 30.0  # of a prefill pod that does not state its own
DEFAULT_QUARANTINE_S = 60.0  # the same
PREFILL_REFUSED = "prefill_refused"  # a reason
_LONGEST_S = 86_400.0  # longer ones are invalid
RENEWALS_PER_LEASE = 3  # so that one may be late
MIN_RENEWAL_S = 0.01  # whatever lease the prefill pod names
CANCEL_TIMEOUT_S = 1.0  # for the prefill pod to take a cancellation
ABORT_TIMEOUT_S = 1.0  # for the router to abort a request whose prefill was cancelled

_Call = grpc.aio.StreamStreamCall[pods_pb2.HandoffCommand, pods_pb2.HandoffEvent]
_Reading = asyncio.Future[pods_pb2.HandoffEvent | object]


def reason_of(code: ErrorCode) -> str:
    """The reason under which a prefill that failed with this error is counted."""
    is_refused = code.value.http_status < 500 and code is not ErrorCode.CANCELLED
    return PREFILL_REFUSED if is_refused else "prefill_failed"


class Consumer(Protocol):
    """The request for which the handoff is made. Calls come in the order of the diagram and return at once."""

    def reserve(self) -> None:
        """Adds the request to the engine, which reserves blocks and waits for KV."""

    def is_alive(self) -> bool:
        """Whether its engine has made a step since the last call."""

    def load(self, num_ready_tokens: int, digests: Sequence[bytes]) -> None:
        """Loads the KV of so many leading prompt tokens. `digests`, here and below: of the blocks that this adds, in
        order; direct connectors only."""

    def complete(self, num_ready_tokens: int, first_token: SampledToken, digests: Sequence[bytes]) -> None:
        """Loads all KV, and takes the first token. The prefill pod no longer writes."""

    def recompute(self, reason: str, num_ready_tokens: int, digests: Sequence[bytes], *, is_quiescent: bool) -> None:
        """Loads what is ready and computes the rest, or fails if that is the policy: no more KV will arrive.
        `is_quiescent`: the prefill pod of a direct connector no longer writes."""

    def note_quiescent(self) -> None:
        """Direct connectors: the prefill pod no longer writes. Also called after the request has ended."""

    def quarantine(self, num_blocks: int, duration_s: float) -> None:
        """Direct connectors: called instead of `note_quiescent` if the prefill pod may go on writing to so many
        blocks."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The prefill pod whose KV is awaited, and what it must fit."""

    address: str  # of the prefill pod
    transfer_id: str
    epoch: int
    num_prompt_tokens: int
    vocab_size: int
    fingerprint: bytes
    connector: str
    pod_id: str  # ours
    layout: KVLayout  # of our KV cache
    is_direct: bool = False  # the prefill pod writes into our blocks
    connector_address: bytes = b""  # direct: of our connector


@dataclass(frozen=True, slots=True)
class HandoffTimeouts:
    """How long a handoff waits for its prefill pod, in seconds."""

    queue_s: float  # until the pod begins to compute
    connect_s: float = CONNECT_TIMEOUT_S
    stall_s: float = STALL_TIMEOUT_S  # between two events of a prompt that is being computed


class Phase(enum.Enum):
    """See the module's diagram."""

    OPENING = enum.auto()
    RESERVED = enum.auto()
    DELIVERED = enum.auto()
    FAILED = enum.auto()
    CANCELLED = enum.auto()


@dataclass(frozen=True, slots=True)
class _Held:
    num_tokens: int
    block_ids: tuple[int, ...]


class _HandoffError(Exception):
    """The handoff cannot go on, for this reason."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


class _PrefillCancelledError(_HandoffError):
    """The prefill was cancelled, most likely by the router, which then ends the request as well."""


class Handoff:
    """One attempt. `run` is a task of the owner, who ends it with `leave` or `fail`; both notify the prefill pod.
    Cancelling the task would break the stream without notice, since gRPC ends a call whose write is cancelled."""

    def __init__(self, offer: Offer, consumer: Consumer, peers: ChannelPool, timeouts: HandoffTimeouts) -> None:
        self.offer = offer
        self._order = KVGroups(offer.layout.groups, offer.layout.block_size).order(offer.num_prompt_tokens)
        self.phase = Phase.OPENING
        self._consumer = consumer
        self._peers = peers
        self._timeouts = timeouts
        self._num_ready_tokens = 0
        self._num_digests = 0  # received so far
        self._digests: list[bytes] = []  # those of them that the consumer has not received
        self._held: asyncio.Future[_Held] = asyncio.get_running_loop().create_future()
        self._told_held = False
        self._lease_s = DEFAULT_LEASE_S
        self._quarantine_s = DEFAULT_QUARANTINE_S
        self._are_blocks_settled = not offer.is_direct
        self._is_ended = asyncio.get_running_loop().create_future()
        self._stream_is_over = False  # its last event has arrived
        self._cancel_reason = "the request ended"  # sent to the prefill pod

    @property
    def is_over(self) -> bool:
        """True once the consumer expects nothing more."""
        return self.phase not in (Phase.OPENING, Phase.RESERVED)

    def note_held(self, num_tokens: int, block_ids: Sequence[int] = ()) -> None:
        """Takes note that the consumer has its blocks, which hold `num_tokens` of the prompt. `block_ids`: the blocks
        to which a direct connector writes the rest."""
        if not self._held.done():
            self._held.set_result(_Held(num_tokens, tuple(block_ids)))

    def leave(self) -> None:
        """Ends as CANCELLED, unless it is over already."""
        if not self.is_over:
            self._end(Phase.CANCELLED)

    def fail(self, reason: str, detail: str = "") -> None:
        """Ends as FAILED, unless it is over already."""
        if self.is_over:
            return
        self._end(Phase.FAILED)
        self._cancel_reason = reason
        logger.info(
            "transfer %s/%d from %s failed: %s %s",
            self.offer.transfer_id, self.offer.epoch, self.offer.address, reason, detail,
        )  # fmt: skip
        self._are_blocks_settled |= self._is_quiescent
        self._consumer.recompute(reason, self._num_ready_tokens, self._take_digests(), is_quiescent=self._is_quiescent)

    async def run(self) -> None:
        """Opens the stream, follows it to its end and settles the reserved blocks. Raises only CancelledError."""
        try:
            await self._open()
        finally:
            self._settle_blocks()

    @property
    def _may_be_written(self) -> bool:
        return self.offer.is_direct and self._told_held and not self._stream_is_over

    @property
    def _is_quiescent(self) -> bool:
        return self.offer.is_direct and not self._may_be_written

    def _settle_blocks(self) -> None:
        if self._are_blocks_settled:
            return
        self._are_blocks_settled = True
        if self._may_be_written:
            self._consumer.quarantine(len(self._held.result().block_ids), self._quarantine_s)
        else:
            self._consumer.note_quiescent()

    async def _open(self) -> None:
        try:
            with self._failing():
                async with self._peers.channel(self.offer.address, self._timeouts.connect_s) as channel:
                    if not self.is_over:  # it may have ended while we connected
                        await self._converse(HandoffStub(channel))
        except _PrefillCancelledError as cancelled:
            await asyncio.wait({self._is_ended}, timeout=ABORT_TIMEOUT_S)
            self.fail(cancelled.reason, str(cancelled))

    @contextmanager
    def _failing(self) -> Iterator[None]:
        """Turns exceptions into a failed handoff, except that of a cancelled prefill, which the caller handles."""
        try:
            yield
        except _PrefillCancelledError:
            raise
        except _HandoffError as rejected:
            self.fail(rejected.reason, str(rejected))
        except grpc.aio.AioRpcError as error:
            self._fail_with(from_rpc_error(error))
        except BatonError as error:
            self._fail_with(error)
        except Exception as error:
            logger.exception("transfer %s/%d", self.offer.transfer_id, self.offer.epoch)
            self.fail("internal", repr(error))

    # -- the stream -------------------------------------------------------------------------------------------------

    async def _converse(self, stub: HandoffAsyncStub) -> None:
        call = stub.Open(None)  # read and written explicitly; the call has no deadline, each wait below has its own
        reading: _Reading | None = None
        try:
            with self._failing():  # at once, as closing the call may take time
                await _write(call, pods_pb2.HandoffCommand(start=self._start()))
                while not self.is_over:
                    reading = reading or asyncio.ensure_future(call.read())
                    if await self._wait(call, reading):
                        event, reading = reading.result(), None
                        self._take(event)
        finally:
            await self._close_call(call, reading)

    async def _wait(self, call: _Call, reading: _Reading) -> bool:
        """Waits for an event, for our own reservation, which it sends to the prefill pod, or for `leave` or `fail`.
        True: `reading` is done. It is not cancelled on a timeout: that would end the call before the prefill pod can
        be told."""
        timeout_s = self._timeout_s
        awaited: set[asyncio.Future[Any]] = {reading, self._is_ended}
        if not self._told_held:
            awaited.add(self._held)
        done, _ = await asyncio.wait(awaited, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not done and self._waits_for_blocks:
            await self._renew(call)
        elif not done:
            raise _HandoffError("handoff_timeout", f"no event within {timeout_s:g} s")
        if self._held in done and not self.is_over:
            self._told_held = True
            held = self._held.result()
            reserved = pods_pb2.HandoffReserved(num_held_tokens=held.num_tokens, block_ids=held.block_ids)
            await _write(call, pods_pb2.HandoffCommand(reserved=reserved))
        return reading in done and not self.is_over

    @property
    def _waits_for_blocks(self) -> bool:
        """The prefill pod cannot go on before we have blocks."""
        return self.offer.is_direct and self.phase is Phase.RESERVED and not self._told_held

    @property
    def _timeout_s(self) -> float:
        if self._waits_for_blocks:
            return max(self._lease_s / RENEWALS_PER_LEASE, MIN_RENEWAL_S)
        is_queued = self.phase is Phase.OPENING
        return self._timeouts.queue_s if is_queued else self._timeouts.stall_s

    async def _renew(self, call: _Call) -> None:
        if self._consumer.is_alive():
            await _write(call, pods_pb2.HandoffCommand(renew=pods_pb2.HandoffRenew()))

    def _end(self, phase: Phase) -> None:
        self.phase = phase
        if not self._is_ended.done():
            self._is_ended.set_result(None)

    def _take(self, event: pods_pb2.HandoffEvent | object) -> None:
        """Makes one transition of the diagram."""
        if not isinstance(event, pods_pb2.HandoffEvent):
            raise _HandoffError("handoff_broken", "the stream ended early")
        self._note_verdict(event)
        match event.WhichOneof("event"):
            case "computing" if self.phase is Phase.OPENING:
                map_layouts(layout_from_pb(event.computing.layout), self.offer.layout)  # as the prefill pod has done
                self.phase = Phase.RESERVED
                self._lease_s = _duration(event.computing.lease_s, DEFAULT_LEASE_S)
                self._quarantine_s = _duration(event.computing.quarantine_s, DEFAULT_QUARANTINE_S)
                self._consumer.reserve()
            case "progress" if self.phase is Phase.RESERVED:
                self._advance(event.progress.num_ready_tokens, event.progress.digests)
                self._consumer.load(self._num_ready_tokens, self._take_digests())
            case "delivered" if self.phase is Phase.RESERVED:
                self._complete(event.delivered)
            case "failed":
                self._advance(event.failed.num_ready_tokens, event.failed.digests)
                error = error_from_pb(event.failed.error)
                if isinstance(error, RequestCancelledError):
                    raise _PrefillCancelledError("prefill_failed", error.message)
                overdue = isinstance(error, DeadlineExceededError)
                raise _HandoffError("handoff_timeout" if overdue else reason_of(error.code), error.message)
            case kind:
                raise _HandoffError("handoff_invalid", f"unexpected {kind} in phase {self.phase.name}")

    def _note_verdict(self, event: pods_pb2.HandoffEvent) -> None:
        self._stream_is_over |= event.WhichOneof("event") in ("delivered", "failed")

    def _advance(self, num_ready_tokens: int, digests: Sequence[bytes]) -> None:
        if not self._num_ready_tokens <= num_ready_tokens <= self.offer.num_prompt_tokens:
            of_all = f"of {self.offer.num_prompt_tokens} tokens"
            detail = f"progress from {self._num_ready_tokens} to {num_ready_tokens} {of_all}"
            raise _HandoffError("handoff_invalid", detail)
        num_written = self._num_written_blocks(num_ready_tokens)
        if self._num_digests + len(digests) != num_written:
            detail = f"{self._num_digests} + {len(digests)} digests of {num_written} blocks"
            raise _HandoffError("handoff_invalid", detail)
        self._num_ready_tokens = num_ready_tokens
        self._num_digests += len(digests)
        self._digests.extend(digests)

    def _num_written_blocks(self, num_ready_tokens: int) -> int:
        """Returns how many of our blocks the prefill pod must have written when so many tokens are ready."""
        if not self.offer.is_direct:
            return 0
        block_size = self.offer.layout.block_size
        is_all = num_ready_tokens == self.offer.num_prompt_tokens
        num_ready_spans = -(-num_ready_tokens // block_size) if is_all else num_ready_tokens // block_size
        num_held_tokens = self._held.result().num_tokens if self._told_held else 0
        return max(0, self._order.num_blocks(num_ready_spans) - self._order.num_blocks(num_held_tokens // block_size))

    def _take_digests(self) -> list[bytes]:
        digests, self._digests = self._digests, []
        return digests

    def _complete(self, delivered: pods_pb2.HandoffDelivered) -> None:
        self._advance(delivered.num_ready_tokens, delivered.digests)
        if self._num_ready_tokens != self.offer.num_prompt_tokens:
            raise _HandoffError(
                "handoff_invalid", f"delivered only {self._num_ready_tokens} of {self.offer.num_prompt_tokens} tokens"
            )
        if delivered.first_token_id >= self.offer.vocab_size:
            raise _HandoffError("handoff_invalid", f"first token {delivered.first_token_id} is outside the vocabulary")
        logprobs = delivered.logprobs if delivered.HasField("logprobs") else None
        self.phase = Phase.DELIVERED
        self._are_blocks_settled = True
        first_token = sampled_token_from_pb(delivered.first_token_id, logprobs)
        self._consumer.complete(self._num_ready_tokens, first_token, self._take_digests())

    def _fail_with(self, error: BatonError) -> None:
        match error:
            case IncompatiblePeerError():
                reason = "incompatible"
            case DeadlineExceededError():
                reason = "handoff_timeout"
            case InvalidRequestError() | OverloadedError():
                reason = "handoff_refused"
            case _:
                reason = "handoff_broken"
        self.fail(reason, error.message)

    def _start(self) -> pods_pb2.HandoffStart:
        offer = self.offer
        return pods_pb2.HandoffStart(
            transfer_id=offer.transfer_id,
            epoch=offer.epoch,
            fingerprint=offer.fingerprint,
            connector=offer.connector,
            decode_pod_id=offer.pod_id,
            connector_address=offer.connector_address,
            layout=layout_to_pb(offer.layout),
        )

    async def _close_call(self, call: _Call, reading: _Reading | None) -> None:
        """Ends the call. Cancels the transfer if the prefill pod still works on it, and waits for its verdict if it
        may be writing into our blocks."""
        timeout_s = self._quarantine_s if self._may_be_written else CANCEL_TIMEOUT_S
        try:
            if not call.done():
                async with asyncio.timeout(timeout_s):
                    if not self._stream_is_over:
                        cancel = pods_pb2.HandoffCancel(reason=self._cancel_reason)
                        await _write(call, pods_pb2.HandoffCommand(cancel=cancel))
                    await call.done_writing()
                    await self._read_to_end(call, reading)
        except (TimeoutError, _HandoffError, grpc.aio.AioRpcError, asyncio.InvalidStateError):
            pass  # the prefill pod is gone, or will notice that the call has ended
        finally:
            call.cancel()
            if reading is not None:
                reading.add_done_callback(_see_exception)

    async def _read_to_end(self, call: _Call, reading: _Reading | None) -> None:
        event = await (reading or call.read())
        while isinstance(event, pods_pb2.HandoffEvent):
            self._note_verdict(event)
            event = await call.read()


async def _write(call: _Call, command: pods_pb2.HandoffCommand) -> None:
    try:
        async with asyncio.timeout(WRITE_TIMEOUT_S):
            await call.write(command)
    except TimeoutError as error:
        raise _HandoffError("handoff_timeout", "the prefill pod does not read") from error
    except (asyncio.InvalidStateError, grpc.aio.AioRpcError):
        pass  # the call has ended; `read` returns the reason


def _see_exception(reading: _Reading) -> None:
    """Retrieves the exception of a call that is no longer read, so that asyncio does not log it."""
    if not reading.cancelled():
        reading.exception()


def _duration(seconds: float, default: float) -> float:
    """Returns a prefill pod's lease or quarantine, or `default` if it is invalid."""
    return seconds if 0 < seconds <= _LONGEST_S else default

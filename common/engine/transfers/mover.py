"""Moves KV: decides which blocks go where and when, and whom to notify. A state machine without threads or a clock.

It takes messages of the step loop and of clients, and results of the connector, in whatever order they come, and yields
jobs for the connector, events for the step loop and outputs for clients. `TransferActor` runs it on a thread.

    producer    Announce, Send as chunks are computed, [TransferTarget] --> saves --> KVSaved, ..., Closed
    consumer    Announce, Receive, TransferUpdates as KV becomes ready --> loads --> HandedOver, [window shut], Closed
    tiers       LookUp, Restore --> a load, Offload --> a save: each answered by Moved

Producers and consumers are known from Announce to Closed, after which no transport touches their blocks any more.
Messages about others, which have ended, are ignored.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable
from typing import Protocol

from common.engine.kv_cache import KVGroups
from common.engine.kv_connector import BlockTransfer, ConnectorFacts, TransferResult
from common.engine.messages import (
    AbortRequests,
    KVSaved,
    RequestEvent,
    RequestOutput,
    TransferQuiesced,
    TransferTarget,
    TransferUpdate,
)
from common.engine.scheduler.kv_transfers import HandedOver
from common.engine.transfers.messages import (
    Announce,
    Blocks,
    Closed,
    End,
    LookUp,
    Message,
    Moved,
    Offload,
    Receive,
    Restore,
    Send,
    TransferEvent,
    Withdraw,
)
from common.engine.transfers.streams import Batch, DirectIncoming, DirectOutgoing, Incoming, Outgoing
from common.types import RequestId

logger = logging.getLogger(__name__)


class Jobs(Protocol):
    """The connector as the mover uses it; see Connector."""

    def start_load(self, transfer: BlockTransfer) -> None:
        """Begin to fill blocks."""

    def start_save(self, transfer: BlockTransfer) -> None:
        """Begin to save blocks."""

    def start_lookup(self, transfer: BlockTransfer) -> None:
        """Begin to ask how many blocks are kept."""

    def cancel(self, job_id: int) -> None:
        """Cancels a job whose result is not needed."""


_Settled = Callable[[TransferResult], None]


class Mover:
    """Owns the handoffs, restores and offloads of one engine."""

    def __init__(self, connector: Jobs, facts: ConnectorFacts, groups: KVGroups, clock: Callable[[], float]) -> None:
        """`clock` gives monotonic seconds."""
        self._connector = connector
        self._groups = groups
        self._clock = clock
        self._part_blocks = facts.part_blocks
        self._incoming_type: type[Incoming] = DirectIncoming if facts.is_direct else Incoming
        self._outgoing_type: type[Outgoing] = DirectOutgoing if facts.is_direct else Outgoing
        self._incoming: dict[RequestId, Incoming] = {}
        self._outgoing: dict[RequestId, Outgoing] = {}
        self._jobs: dict[int, _Settled] = {}  # that the connector was asked to do
        self._tickets: dict[int, int] = {}  # jobs of tickets that are not answered
        self._hurried: set[int] = set()  # of those, the ones that were cancelled
        self._job_ids = itertools.count(1)
        self._events: list[TransferEvent] = []
        self._outputs: dict[RequestId, list[RequestEvent]] = {}

    def __len__(self) -> int:
        """Handoffs and jobs that have not ended."""
        return len(self._incoming) + len(self._outgoing) + len(self._jobs)

    def take_events(self) -> list[TransferEvent]:
        """Returns the events for the step loop, in order, since the last call."""
        events, self._events = self._events, []
        return events

    def take_outputs(self) -> list[RequestOutput]:
        """Returns the events for clients since the last call."""
        outputs, self._outputs = self._outputs, {}
        return [RequestOutput(request_id=request_id, events=events) for request_id, events in outputs.items()]

    def handle(self, message: Message) -> None:
        """Take one message."""
        match message:
            case Announce():
                self._announce(message)
            case Send():
                self._send(message)
            case Receive():
                self._receive(message)
            case TransferUpdate() | TransferQuiesced():
                self._take_command(message)
            case TransferTarget():
                self._aim(message)
            case LookUp():
                self._look_up(message)
            case Restore():
                self._restore(message)
            case Offload():
                self._offload(message)
            case Withdraw():
                if (job_id := self._tickets.get(message.ticket)) is not None:
                    self._cancel([job_id])
            case End():
                self._end(message)
            case AbortRequests():
                for request_id in message.request_ids:
                    self._abort(request_id)

    def settle(self, results: Iterable[TransferResult]) -> None:
        """Handles results of the connector."""
        for result in results:
            self._hurried.discard(result.job_id)
            settled = self._jobs.pop(result.job_id, None)
            if settled is None:
                logger.warning("ignoring the result of unknown connector job %d", result.job_id)
            else:
                settled(result)

    def _announce(self, request: Announce) -> None:
        if request.is_producer:
            self._outgoing.setdefault(request.request_id, self._outgoing_type(request, self._groups))
        else:
            self._incoming.setdefault(request.request_id, self._incoming_type(request, self._groups))

    def _end(self, message: End) -> None:
        if message.is_aborted:
            self._abort(message.request_id)
        incoming = self._incoming.get(message.request_id)
        if incoming is not None:
            incoming.is_concluded = True
            self._close_incoming(incoming)

    def _abort(self, request_id: RequestId) -> None:
        """Starts no more jobs for the request; those in flight are cancelled and still settle."""
        if (outgoing := self._outgoing.get(request_id)) is not None:
            outgoing.fail("aborted")
            self._cancel(outgoing.in_flight)
            self._advance_outgoing(outgoing)
        if (incoming := self._incoming.get(request_id)) is not None:
            self._cancel(incoming.in_flight)

    # ---------------------------------------------------------------- producers

    def _send(self, message: Send) -> None:
        outgoing = self._outgoing.get(message.request_id)
        if outgoing is not None:
            outgoing.offer(message.blocks)
            self._advance_outgoing(outgoing)

    def _aim(self, target: TransferTarget) -> None:
        """Ignored if the producer is of another epoch or has a target."""
        outgoing = self._outgoing.get(target.request_id)
        if outgoing is not None and outgoing.epoch == target.epoch and outgoing.wants_target:
            outgoing.aim(target)
            self._advance_outgoing(outgoing)

    def _advance_outgoing(self, outgoing: Outgoing) -> None:
        """Starts saves, reports progress, and closes the producer if it has ended."""
        if (batch := outgoing.take()) is not None:
            for part in batch.parts(self._part_blocks):
                self._save(outgoing, part)
        self._report(outgoing)
        if outgoing.is_over and self._outgoing.pop(outgoing.request_id, None) is not None:
            self._events.append(Closed(outgoing.request_id))

    def _save(self, outgoing: Outgoing, batch: Batch) -> None:
        blocks = batch.blocks
        num_blocks = len(blocks.ids)

        def settled(result: TransferResult) -> None:
            outgoing.settle(result, num_blocks)
            if outgoing.is_broken and not outgoing.may_report_failure:
                self._cancel(outgoing.in_flight)  # the failure is reported when nothing is written any more
            self._advance_outgoing(outgoing)

        job_id = self._open(settled)
        outgoing.start(job_id, num_blocks)
        self._connector.start_save(
            BlockTransfer(
                job_id=job_id,
                request_id=outgoing.request_id,
                block_ids=blocks.ids,
                block_hashes=blocks.keys,
                num_tokens_in_last=outgoing.num_tokens_in(blocks.first + num_blocks - 1),
                num_last=outgoing.num_last(blocks.first, blocks.first + num_blocks),
                destination=batch.destination,
                fence=blocks.fence,
            )
        )

    def _report(self, outgoing: Outgoing) -> None:
        """Reports how much of the prompt is in the connector, if that has changed."""
        if outgoing.is_reported_broken:
            return
        num_tokens = outgoing.num_saved_tokens
        failure = outgoing.error if outgoing.may_report_failure and not outgoing.is_complete else ""
        if num_tokens > outgoing.num_reported_tokens or failure:
            outgoing.num_reported_tokens = num_tokens
            outgoing.is_reported_broken = bool(failure)
            saved = KVSaved(num_tokens=num_tokens, failure=failure, digests=outgoing.take_digests())
            self._outputs.setdefault(outgoing.request_id, []).append(saved)

    # ---------------------------------------------------------------- consumers

    def _receive(self, message: Receive) -> None:
        incoming = self._incoming.get(message.request_id)
        if incoming is not None:
            incoming.reserve(message.blocks)
            self._advance_incoming(incoming)

    def _take_command(self, command: TransferUpdate | TransferQuiesced) -> None:
        """Ignored if the consumer is of another epoch."""
        incoming = self._incoming.get(command.request_id)
        if incoming is None or incoming.epoch != command.epoch:
            return
        if isinstance(command, TransferQuiesced):
            incoming.quiesce()
        else:
            incoming.apply(command, self._clock())
        self._advance_incoming(incoming)

    def _advance_incoming(self, incoming: Incoming) -> None:
        """Load what is ready; conclude what is over, once it has failed or the producer writes no more."""
        if incoming.blocks is not None and not incoming.is_concluded:
            if incoming.num_loadable > incoming.num_started:
                self._load(incoming, incoming.blocks)
            elif incoming.is_over and (incoming.has_failed or not incoming.is_window_open):
                self._conclude(incoming)
            elif incoming.is_broken:
                self._cancel(incoming.in_flight)  # blocks after the gap are useless
        self._close_incoming(incoming)

    def _load(self, incoming: Incoming, blocks: Blocks) -> None:
        start, stop = incoming.num_started, incoming.num_loadable
        run = slice(start - blocks.first, stop - blocks.first)

        def settled(result: TransferResult) -> None:
            incoming.settle(result, stop - start)
            self._advance_incoming(incoming)

        job_id = self._open(settled)
        incoming.start(job_id, stop - start)
        self._connector.start_load(
            BlockTransfer(
                job_id=job_id,
                request_id=incoming.request_id,
                block_ids=blocks.ids[run],
                block_hashes=blocks.keys[run],
                num_tokens_in_last=incoming.num_tokens_in(stop - 1),
                num_last=incoming.num_last(start, stop),
                digests=incoming.digests(start, stop),
                fence=blocks.fence,
            )
        )

    def _conclude(self, incoming: Incoming) -> None:
        incoming.is_concluded = True
        self._close_incoming(incoming)  # first: the step loop must not compute into blocks that may be written to
        self._events.append(
            HandedOver(
                request_id=incoming.request_id,
                num_blocks=incoming.num_moved_spans,
                first_token=incoming.first_token,
                failure=incoming.error or incoming.failure,
                final_at=incoming.final_at,
                may_be_written=incoming.is_window_open,
            )
        )

    def _close_incoming(self, incoming: Incoming) -> None:
        """Removes a consumer that has concluded, once nothing touches its blocks."""
        if not incoming.is_concluded or incoming.in_flight or incoming.is_window_open:
            return
        if self._incoming.pop(incoming.request_id, None) is not None:
            self._events.append(Closed(incoming.request_id))

    # ---------------------------------------------------------------- tiers

    def _look_up(self, message: LookUp) -> None:
        self._connector.start_lookup(
            BlockTransfer(
                job_id=self._open_ticket(message.ticket, len(message.keys)),
                request_id=message.request_id,
                block_ids=(),
                block_hashes=message.keys,
                num_tokens_in_last=self._groups.block_size,
                is_for_tier=True,
            )
        )

    def _restore(self, message: Restore) -> None:
        self._connector.start_load(self._tier_transfer(message.ticket, message.request_id, message.blocks))

    def _offload(self, message: Offload) -> None:
        self._connector.start_save(self._tier_transfer(message.ticket, RequestId(""), message.blocks))

    def _tier_transfer(self, ticket: int, request_id: RequestId, blocks: Blocks) -> BlockTransfer:
        return BlockTransfer(
            job_id=self._open_ticket(ticket, len(blocks.ids)),
            request_id=request_id,
            block_ids=blocks.ids,
            block_hashes=blocks.keys,
            num_tokens_in_last=self._groups.block_size,
            is_for_tier=True,
            fence=blocks.fence,
        )

    def _open_ticket(self, ticket: int, num_blocks: int) -> int:
        """The id of a job about so many blocks, whose outcome answers the ticket."""

        def settled(result: TransferResult) -> None:
            del self._tickets[ticket]
            self._events.append(Moved(ticket, min(max(result.num_blocks_ok, 0), num_blocks), result.found))

        job_id = self._tickets[ticket] = self._open(settled)
        return job_id

    # ---------------------------------------------------------------- inside

    def _open(self, settled: _Settled) -> int:
        """The id of a new job; `settled` is called with its result, once."""
        job_id = next(self._job_ids)
        self._jobs[job_id] = settled
        return job_id

    def _cancel(self, job_ids: Iterable[int]) -> None:
        for job_id in job_ids:
            if job_id not in self._hurried:
                self._hurried.add(job_id)
                self._connector.cancel(job_id)

"""The gRPC services of a prefill pod: Prefill for the router, Handoff for decode pods."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from common.engine.contract.layout import map_layouts
from common.errors import BatonError, IncompatiblePeerError, InvalidRequestError, RequestCancelledError
from common.observability.logging import fields
from common.observability.tracing.context import TRACEPARENT, TRACESTATE, read_parent
from common.pb import pods_pb2, pods_pb2_grpc
from common.pod.context import PodContext
from common.pod.convert import add_request_from_pb, layout_from_pb, layout_to_pb
from common.pod.tasks import TaskSet
from common.rpc.convert import finish_reason_to_pb, logprobs_to_pb
from common.rpc.errors import error_to_pb, rpc_errors
from common.types import FinishReason, TransferId
from prefill_service.producer import FirstToken, Producer
from prefill_service.tracing import PrefillTrace
from prefill_service.transfers import Reservation, Transfer, TransferKey, TransferRegistry

logger = logging.getLogger(__name__)

HANDOFF_START_TIMEOUT_S = 10.0  # for the first message of a handoff stream
_AT_ONCE = 256  # log probabilities of a prompt's tokens that are converted; takes a few milliseconds
RENEWALS_PER_LEASE = 3  # so that one may be late
HANG_UP_TIMEOUT_S = 1.0  # for the decode pod to end its side, after the last event
FLUSH_TIMEOUT_S = 2.0  # for decode pods to take the last events of a closing pod


class PrefillServicer(pods_pb2_grpc.PrefillServicer):
    """Computes prompts."""

    def __init__(self, pod: PodContext, transfers: TransferRegistry) -> None:
        self._pod = pod
        self._transfers = transfers

    async def Prefill(  # noqa: N802  (the proto's name)
        self, request: pods_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> pods_pb2.PrefillResponse:
        """Returns with the first token; saves may go on after that. Cancelling the call cancels the prefill."""
        async with rpc_errors(context, self._pod.metrics.internal_errors.inc):
            try:
                first = await self._prefill(request, self._trace(request, context))
            except BatonError as error:
                self._pod.metrics.request_failure.labels(error.code.label).inc()
                logger.info(
                    "request %s failed: %s: %s",
                    request.request.request_id,
                    error.code.label,
                    error.message,
                    extra=fields(request_id=request.request.request_id),
                )
                raise
            self._count(first)
        return await _response(first)

    async def _prefill(self, message: pods_pb2.PrefillRequest, trace: PrefillTrace | None) -> FirstToken:
        request = add_request_from_pb(message.request, self._pod.spec)
        key = _key(message.transfer_id, message.epoch) if message.transfer_id else None
        self._pod.admission.admit()
        try:
            producer = Producer(self._pod, self._transfers, self._pod.requests.place(request), trace)
            producer.start(key)
            try:
                return await producer.first_token
            except asyncio.CancelledError:
                self._pod.metrics.request_success.labels(FinishReason.ABORT.label).inc()
                producer.cancel(RequestCancelledError("the prefill call was cancelled"))
                raise
        finally:
            self._pod.admission.release()

    def _trace(
        self, message: pods_pb2.PrefillRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> PrefillTrace | None:
        """The trace of a call that the router traces."""
        if self._pod.tracer is None:
            return None
        metadata = {key: str(value) for key, value in context.invocation_metadata() or ()}
        parent = read_parent(metadata.get(TRACEPARENT), metadata.get(TRACESTATE))
        if parent is None or not parent.is_sampled:
            return None
        request = message.request
        return PrefillTrace(self._pod.tracer, parent.span, request.request_id, len(request.prompt_token_ids))

    def _count(self, first: FirstToken) -> None:
        metrics = self._pod.metrics
        metrics.queue_time.observe(first.queue_s)
        metrics.prefill_time.observe(first.compute_s)
        metrics.request_success.labels((first.finish_reason or FinishReason.HANDOFF).label).inc()


class HandoffServicer(pods_pb2_grpc.HandoffServicer):
    """Reports to decode pods how their KV proceeds."""

    def __init__(self, pod: PodContext, transfers: TransferRegistry, *, quarantine_s: float) -> None:
        """`quarantine_s`: see PrefillConfig."""
        self._pod = pod
        self._quarantine_s = quarantine_s
        self._transfers = transfers
        self._readers = TaskSet()
        self._num_streams = 0
        self._all_told = asyncio.Event()
        self._all_told.set()

    async def Open(  # type: ignore[override]  # noqa: N802  (grpc.aio also takes a coroutine that writes)
        self,
        request_iterator: AsyncIterator[pods_pb2.HandoffCommand],
        context: grpc.aio.ServicerContext[Any, pods_pb2.HandoffEvent],
    ) -> None:
        """Ends after `delivered` or `failed`. A broken stream does not end the prefill; `cancel` does."""
        async with rpc_errors(context, self._pod.metrics.internal_errors.inc):
            start = await _read_start(request_iterator)
            self._check_pairing(start)
            transfer = self._transfers.attach_consumer(_key(start.transfer_id, start.epoch))
            reader = self._readers.spawn(self._obey(request_iterator, transfer, start), "handoff reader")
            self._num_streams += 1
            self._all_told.clear()
            try:
                await self._tell(transfer, context)
                # The decode pod ends the call first: its own write to an ended call would fail.
                await asyncio.wait({reader}, timeout=HANG_UP_TIMEOUT_S)
            finally:
                self._num_streams -= 1
                if self._num_streams == 0:
                    self._all_told.set()
                self._pod.metrics.handoffs.labels(_outcome(transfer)).inc()
                self._transfers.detach_consumer(transfer)
                reader.cancel()

    async def close(self) -> None:
        """Waits until decode pods have read the outcome of their transfers, all of which are settled or about to be."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FLUSH_TIMEOUT_S):
                await self._all_told.wait()
        await self._readers.close()

    async def _tell(self, transfer: Transfer, context: grpc.aio.ServicerContext[Any, pods_pb2.HandoffEvent]) -> None:
        """Writes events as they come, skipping outdated progress."""
        told_computing, told_ready, told_digests = False, 0, 0
        is_renewal = False
        while True:
            transfer.changed.clear()
            if transfer.is_computing and not told_computing:
                told_computing = True
                computing = pods_pb2.HandoffComputing(
                    incarnation=self._pod.incarnation,
                    lease_s=self._transfers.lease_s,
                    layout=layout_to_pb(self._pod.spec.layout),
                    quarantine_s=self._quarantine_s,
                )
                await context.write(pods_pb2.HandoffEvent(computing=computing))
            if transfer.error is not None and not transfer.is_quiescent:
                raise transfer.error
            if transfer.is_settled:
                await context.write(_verdict(transfer, transfer.digests[told_digests:]))
                return
            if transfer.num_ready_tokens > told_ready or (is_renewal and told_computing):
                digests = transfer.digests[told_digests:]
                told_ready, told_digests = transfer.num_ready_tokens, len(transfer.digests)
                progress = pods_pb2.HandoffProgress(num_ready_tokens=told_ready, digests=digests)
                await context.write(pods_pb2.HandoffEvent(progress=progress))
            is_renewal = await self._wait_for_change(transfer)

    async def _wait_for_change(self, transfer: Transfer) -> bool:
        """Waits for a change. False: there is one. True: there was none for a while, but its engine works."""
        by_engine = self._pod.stats.by_engine
        while True:
            figures = by_engine[transfer.data_parallel_rank]
            try:
                async with asyncio.timeout(self._transfers.lease_s / RENEWALS_PER_LEASE):
                    await transfer.changed.wait()
            except TimeoutError:
                if by_engine[transfer.data_parallel_rank] is not figures:
                    return True
            else:
                return False

    async def _obey(
        self, commands: AsyncIterator[pods_pb2.HandoffCommand], transfer: Transfer, start: pods_pb2.HandoffStart
    ) -> None:
        """Executes the decode pod's commands until it ends its side of the stream."""
        decode_pod_id = start.decode_pod_id
        async for command in commands:
            match command.WhichOneof("command"):
                case "cancel":
                    reason = command.cancel.reason or "cancelled"
                    logger.info("transfer %s: cancelled by %s: %s", transfer.key, decode_pod_id, reason)
                    self._transfers.cancel(transfer, RequestCancelledError(f"the decode pod cancelled: {reason}"))
                    return
                case "renew":
                    self._transfers.renew(transfer)
                case "reserved":
                    held = command.reserved.num_held_tokens
                    logger.debug("transfer %s: %s has %d tokens already", transfer.key, decode_pod_id, held)
                    reservation = Reservation(held, tuple(command.reserved.block_ids), start.connector_address)
                    self._reserve(transfer, reservation)

    def _reserve(self, transfer: Transfer, reservation: Reservation) -> None:
        try:
            self._transfers.reserve(transfer, reservation)
        except InvalidRequestError as error:
            logger.warning("transfer %s: %s", transfer.key, error)
            self._transfers.cancel(transfer, error)

    def _check_pairing(self, start: pods_pb2.HandoffStart) -> None:
        """Raises IncompatiblePeerError that names what differs."""
        connector, spec = self._pod.config.connector or "", self._pod.spec
        layout = layout_from_pb(start.layout)
        _check_equal("connector", connector, start.connector, start)
        _check_equal("kv_dtype", spec.layout.kv_dtype, layout.kv_dtype, start)  # by which fingerprints differ as well
        _check_equal("fingerprint", spec.fingerprint, start.fingerprint, start)
        map_layouts(spec.layout, layout)
        if spec.is_direct and not start.connector_address:
            raise IncompatiblePeerError(
                f"connector_address: {start.decode_pod_id} has none, so {connector} cannot write to it",
                param="connector_address",
            )


def _check_equal(name: str, ours: str | bytes, theirs: str | bytes, start: pods_pb2.HandoffStart) -> None:
    if ours != theirs:
        raise IncompatiblePeerError(
            f"{name} differs: {_shown(ours)} here, {_shown(theirs)} on {start.decode_pod_id}", param=name
        )


def _shown(fact: str | bytes) -> str:
    return fact.hex()[:12] if isinstance(fact, bytes) else repr(fact)


async def _read_start(commands: AsyncIterator[pods_pb2.HandoffCommand]) -> pods_pb2.HandoffStart:
    try:
        async with asyncio.timeout(HANDOFF_START_TIMEOUT_S):
            command = await anext(commands)
    except (StopAsyncIteration, TimeoutError) as error:
        raise InvalidRequestError("the first message of a handoff must be `start`", param="start") from error
    if command.WhichOneof("command") != "start":
        raise InvalidRequestError("the first message of a handoff must be `start`", param="start")
    return command.start


def _key(transfer_id: str, epoch: int) -> TransferKey:
    if not transfer_id:
        raise InvalidRequestError("transfer_id is empty", param="transfer_id")
    if epoch < 1:
        raise InvalidRequestError(f"epoch must be >= 1, got {epoch}", param="epoch")
    return TransferKey(TransferId(transfer_id), epoch)


def _verdict(transfer: Transfer, digests: Sequence[bytes]) -> pods_pb2.HandoffEvent:
    """Returns the last event of a settled transfer. `digests`: those not sent before."""
    ready = transfer.num_ready_tokens
    if transfer.error is not None:
        failed = pods_pb2.HandoffFailed(error=error_to_pb(transfer.error), num_ready_tokens=ready, digests=digests)
        return pods_pb2.HandoffEvent(failed=failed)
    token = transfer.first_token
    assert token is not None
    delivered = pods_pb2.HandoffDelivered(num_ready_tokens=ready, first_token_id=token.token_id, digests=digests)
    if token.logprobs is not None:
        delivered.logprobs.CopyFrom(logprobs_to_pb(token.logprobs))
    return pods_pb2.HandoffEvent(delivered=delivered)


def _outcome(transfer: Transfer) -> str:
    """Value of the metric label."""
    if transfer.error is not None:
        return "cancelled" if isinstance(transfer.error, RequestCancelledError) else "failed"
    return "delivered" if transfer.is_settled else "broken"


async def _response(first: FirstToken) -> pods_pb2.PrefillResponse:
    response = pods_pb2.PrefillResponse(
        first_token_id=first.token.token_id,
        finish_reason=finish_reason_to_pb(first.finish_reason),
        num_cached_tokens=first.num_cached_tokens,
        timing=pods_pb2.PrefillTiming(queue_s=first.queue_s, compute_s=first.compute_s),
    )
    for start in range(0, len(first.prompt_logprobs), _AT_ONCE):
        part = first.prompt_logprobs[start : start + _AT_ONCE]
        response.prompt_logprobs.extend(logprobs_to_pb(entry) for entry in part)
        await asyncio.sleep(0)  # others' turn
    if first.token.logprobs is not None:
        response.logprobs.CopyFrom(logprobs_to_pb(first.token.logprobs))
    return response

"""One request of a session, from Submit to its last delta.

1. Submitted, it enters the engine at once (colocated), or opens a handoff that adds it as a consumer.
2. The engine's outputs become deltas. The first with tokens reports how the prompt was obtained.
3. KV that does not arrive by handoff is computed here, unless the request's policy is to fail.
4. It ends once: finished by the engine, aborted, overdue, or failed. Then engine, handoff and timer are released.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from common.engine.messages import (
    AddRequest,
    KVReceived,
    KVTransferParams,
    RequestOutput,
    RequestStarted,
    TransferQuiesced,
    TransferUpdate,
)
from common.errors import BatonError, DeadlineExceededError, EngineDeadError, ErrorCode, UnavailableError
from common.observability.logging import fields
from common.observability.repeats import RepeatedLine
from common.pb import common_pb2, pods_pb2
from common.pod.context import PodContext
from common.pod.convert import error_of
from common.pod.tasks import TaskSet
from common.rpc.channel import ChannelPool
from common.rpc.convert import finish_reason_to_pb, logprobs_to_pb
from common.rpc.errors import error_to_pb
from common.types import FinishReason, RequestId, SampledToken, TransferId
from decode_service.config import DecodeConfig
from decode_service.handoff import PREFILL_REFUSED, Handoff, HandoffTimeouts, Offer, reason_of
from decode_service.quarantine import Quarantine

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class PodServices:
    """Services that the requests of a pod share."""

    pod: PodContext
    config: DecodeConfig
    peers: ChannelPool  # channels to prefill pods
    handoffs: TaskSet
    quarantine: Quarantine
    timeouts: HandoffTimeouts
    recompute_lines: defaultdict[str, RepeatedLine] = field(  # by reason
        default_factory=lambda: defaultdict(lambda: RepeatedLine(logger, logging.WARNING))
    )


@dataclass(frozen=True, slots=True)
class _Report:
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    recompute_reason: str = ""
    queue_s: float = 0.0
    handoff_s: float = 0.0


class DecodeRequest:
    """OutputSink in the engine and Consumer of its handoff."""

    def __init__(
        self,
        services: PodServices,
        request: AddRequest,
        submit: pods_pb2.Submit,
        *,
        emit: Callable[[DecodeRequest, pods_pb2.TokenDelta], None],
        on_end: Callable[[DecodeRequest], None],
    ) -> None:
        """`emit` takes each delta, `on_end` is called once, after the last."""
        self.request_id = request.request_id
        self._services = services
        self._pod = services.pod
        self._request = request
        self._engine_rank = request.data_parallel_rank or 0
        self._remote = submit.remote_prefill if submit.HasField("remote_prefill") else None
        self._timeout_s = submit.timeout_s
        self._may_recompute = _may_recompute(submit.kv_failure_policy, services.config)
        self._emit = emit
        self._on_end = on_end
        self._submitted_at = time.monotonic()
        self._entered_at = self._submitted_at  # the engine
        self._engine_id: RequestId | None = None
        self._known_figures = services.pod.stats.by_engine[self._engine_rank]
        self._handoff: Handoff | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._report = _Report()
        self._has_reported = False
        self._first_token_at: float | None = None  # here, of its answer
        self._has_ended = False

    def start(self) -> None:
        """Starts it. Any error ends it with a delta."""
        if self._timeout_s > 0:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._expire)
        if self._remote is None:
            self._enter_engine(self._request)
        elif not self._pod.config.connector:
            self.recompute("no_connector", 0)
        elif self._services.quarantine.is_full:
            self.recompute("quarantine_full", 0)
        else:
            self._handoff = Handoff(self._offer(self._remote), self, self._services.peers, self._services.timeouts)
            self._services.handoffs.spawn(self._handoff.run(), f"handoff {self.request_id}")

    def note_prefill_failed(self, epoch: int, code: ErrorCode) -> None:
        """Handles the router's report that the prefill leg failed; one about another attempt is ignored."""
        if self._handoff is not None and self._handoff.offer.epoch == epoch:
            self._handoff.fail(reason_of(code), f"the prefill leg failed: {code.label}")

    def abort(self) -> None:
        """Aborts it at the router's request."""
        if not self._has_ended:
            self._pod.metrics.request_success.labels(FinishReason.ABORT.label).inc()
            self._end(self._last_delta(FinishReason.ABORT))

    def fail(self, error: BatonError) -> None:
        """Ends it with an error. Also called as an OutputSink."""
        if not self._has_ended:
            self._pod.metrics.request_failure.labels(error.code.label).inc()
            logger.info(
                "request %s failed: %s: %s",
                self.request_id,
                error.code.label,
                error.message,
                extra=fields(request_id=self.request_id),
            )
            self._end(self._last_delta(FinishReason.ERROR, error_to_pb(error)))

    # -- Consumer ---------------------------------------------------------------------------------------------------

    def reserve(self) -> None:
        """Reserves blocks, as the prefill has begun."""
        assert self._remote is not None
        params = KVTransferParams(
            transfer_id=TransferId(self._remote.transfer_id),
            epoch=self._remote.epoch,
            role="consumer",
        )
        self._enter_engine(msgspec.structs.replace(self._request, transfer=params))

    def is_alive(self) -> bool:
        """Compares statistics: each step of the engine brings new ones."""
        known, self._known_figures = self._known_figures, self._pod.stats.by_engine[self._engine_rank]
        return self._known_figures is not known

    def load(self, num_ready_tokens: int, digests: Sequence[bytes]) -> None:
        """Loads the KV that has become ready."""
        self._update_transfer(num_ready_tokens, digests=digests)

    def complete(self, num_ready_tokens: int, first_token: SampledToken, digests: Sequence[bytes]) -> None:
        """Loads all KV."""
        if self._pod.spec.is_direct:
            self.note_quiescent()
        self._update_transfer(num_ready_tokens, final=True, first_token=first_token, digests=digests)

    def recompute(
        self, reason: str, num_ready_tokens: int, digests: Sequence[bytes] = (), *, is_quiescent: bool = False
    ) -> None:
        """Computes the rest here, if the policy allows it. Once it is in the engine, the engine reports the outcome."""
        if self._engine_id is not None:
            if is_quiescent:
                self.note_quiescent()
            self._update_transfer(num_ready_tokens, final=True, failure=reason, digests=digests)
        if not self._may_recompute:
            self._fail_without_kv(reason)
        elif self._engine_id is None:
            self._note_recompute(reason)
            self._enter_engine(self._request)

    def note_quiescent(self) -> None:
        """The prefill pod no longer writes to the blocks that were reserved for the handoff."""
        if self._engine_id is not None and self._remote is not None:
            self._pod.requests.quiesce_transfer(TransferQuiesced(request_id=self._engine_id, epoch=self._remote.epoch))

    def quarantine(self, num_blocks: int, duration_s: float) -> None:
        """Keeps the blocks until the quarantine ends."""
        self._services.quarantine.hold(self.request_id, num_blocks, duration_s, self.note_quiescent)

    # -- OutputSink -------------------------------------------------------------------------------------------------

    def take_output(self, output: RequestOutput) -> None:
        """Handles an output of the engine."""
        for event in output.events:
            match event:
                case RequestStarted():
                    self._note_started(event)
                case KVReceived():
                    self._note_received(event)
        if self._has_ended:
            return
        if output.finish_reason is not None:
            self._pod.requests.forget(output.request_id)  # the engine has ended it, so there is nothing to abort
        if output.finish_reason is FinishReason.ERROR:
            self.fail(error_of(output))
        elif output.tokens or output.prompt_logprobs or output.finish_reason is not None:
            delta = self._delta(output)
            if output.finish_reason is None:
                self._emit(self, delta)
            else:
                self._pod.metrics.request_success.labels(output.finish_reason.label).inc()
                if self._first_token_at is not None:
                    self._pod.metrics.decode_time.observe(time.monotonic() - self._first_token_at)
                self._end(delta)

    # -- inside -----------------------------------------------------------------------------------------------------

    def _enter_engine(self, request: AddRequest) -> None:
        self._entered_at = time.monotonic()
        try:
            self._engine_id = self._pod.requests.add(request, self)
        except EngineDeadError as error:
            self.fail(error)

    def _update_transfer(
        self,
        num_ready_tokens: int,
        *,
        final: bool = False,
        first_token: SampledToken | None = None,
        failure: str = "",
        digests: Sequence[bytes] = (),
    ) -> None:
        if self._engine_id is None or self._remote is None:
            return  # the engine died under `reserve`
        update = TransferUpdate(
            request_id=self._engine_id,
            epoch=self._remote.epoch,
            num_ready_tokens=num_ready_tokens,
            final=final,
            first_token=first_token,
            failure=failure,
            digests=list(digests),
        )
        self._pod.requests.update_transfer(update)

    def _note_started(self, event: RequestStarted) -> None:
        queue_s = self._entered_at - self._submitted_at + event.queue_s
        self._report = replace(self._report, queue_s=queue_s, num_cached_tokens=event.num_cached_tokens)
        self._pod.metrics.queue_time.observe(queue_s)
        if self._handoff is not None:
            self._handoff.note_held(event.num_cached_tokens, event.reserved_block_ids)

    def _note_received(self, event: KVReceived) -> None:
        self._report = replace(self._report, num_external_tokens=event.num_tokens, handoff_s=event.handoff_s)
        self._pod.metrics.handoff_time.observe(event.handoff_s)
        self._pod.metrics.handoff_tokens.inc(event.num_tokens)
        if event.recompute_reason and not self._may_recompute:
            self._fail_without_kv(event.recompute_reason)
        elif event.recompute_reason:
            self._note_recompute(event.recompute_reason)
        else:
            self._pod.metrics.handoffs.labels("delivered").inc()

    def _note_recompute(self, reason: str) -> None:
        text = "request %s: recomputing KV that did not arrive by handoff: %s"
        if reason == PREFILL_REFUSED:
            logger.info(text, self.request_id, reason, extra=fields(request_id=self.request_id))
        else:
            self._services.recompute_lines[reason].log(text, self.request_id, reason)
        self._report = replace(self._report, recompute_reason=reason)
        self._pod.metrics.handoffs.labels("failed").inc()
        self._pod.metrics.kv_recompute.labels(reason).inc()
        self._pod.metrics.kv_failures.labels(reason, "recomputed").inc()

    def _fail_without_kv(self, reason: str) -> None:
        self._pod.metrics.handoffs.labels("failed").inc()
        self._pod.metrics.kv_failures.labels(reason, "failed").inc()
        self.fail(UnavailableError(f"the KV did not arrive: {reason}", param="kv_failure_policy"))

    def _delta(self, output: RequestOutput) -> pods_pb2.TokenDelta:
        delta = pods_pb2.TokenDelta(
            request_id=self.request_id,
            start_index=output.start_index,
            token_ids=[token.token_id for token in output.tokens],
            logprobs=[logprobs_to_pb(token.logprobs) for token in output.tokens if token.logprobs is not None],
            finish_reason=finish_reason_to_pb(output.finish_reason),
            prompt_logprobs=[logprobs_to_pb(entry) for entry in output.prompt_logprobs],
            prompt_start=output.prompt_start,
            num_verified_drafts=output.num_verified_drafts,
            num_accepted_drafts=output.num_accepted_drafts,
        )
        if output.tokens and not self._has_reported:
            self._has_reported = True
            self._first_token_at = time.monotonic()
            report = self._report
            delta.report.CopyFrom(
                pods_pb2.DecodeReport(
                    num_cached_tokens=report.num_cached_tokens,
                    num_external_tokens=report.num_external_tokens,
                    recompute_reason=report.recompute_reason,
                    queue_s=report.queue_s,
                    handoff_s=report.handoff_s,
                    first_token_s=self._first_token_at - self._submitted_at,
                )
            )
        return delta

    def _last_delta(self, reason: FinishReason, error: common_pb2.Error | None = None) -> pods_pb2.TokenDelta:
        return pods_pb2.TokenDelta(request_id=self.request_id, finish_reason=finish_reason_to_pb(reason), error=error)

    def _expire(self) -> None:
        self.fail(DeadlineExceededError(f"not finished within {self._timeout_s:g} s"))

    def _end(self, last: pods_pb2.TokenDelta) -> None:
        """Releases everything. Later outputs of the engine are ignored."""
        self._has_ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self._engine_id is not None:
            self._pod.requests.abort(self._engine_id)
        if self._handoff is not None:
            self._handoff.leave()
        self._emit(self, last)
        self._on_end(self)

    def _offer(self, remote: pods_pb2.RemotePrefill) -> Offer:
        spec = self._pod.spec
        return Offer(
            address=remote.prefill_address,
            transfer_id=remote.transfer_id,
            epoch=remote.epoch,
            num_prompt_tokens=len(self._request.prompt_token_ids),
            vocab_size=spec.vocab_size,
            fingerprint=spec.fingerprint,
            connector=self._pod.config.connector or "",
            pod_id=self._pod.pod_id,
            layout=spec.layout,
            is_direct=spec.is_direct,
            connector_address=spec.connector_addresses[self._engine_rank],
        )


def _may_recompute(policy: common_pb2.KVFailurePolicy.ValueType, config: DecodeConfig) -> bool:
    if policy == common_pb2.KV_FAILURE_POLICY_UNSPECIFIED:
        return config.kv_failure_policy == "recompute"
    return policy != common_pb2.KV_FAILURE_POLICY_FAIL

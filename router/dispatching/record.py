"""The record of one generation: its timeline, the metrics, the dispatcher's lessons, the log."""

from __future__ import annotations

import logging
import time
from typing import Any

from common.errors import BatonError, ErrorCode
from common.observability.logging import fields
from common.pb import pods_pb2
from common.types import FinishReason
from router.dispatching.dispatcher import Dispatcher
from router.dispatching.validity import checked_seconds
from router.requests.request import GenerationRequest
from router.timelines.timeline import Timeline

logger = logging.getLogger(__name__)


class Record:
    """Decides nothing."""

    def __init__(self, request: GenerationRequest, dispatcher: Dispatcher, transfer_id: str) -> None:
        self.timeline = Timeline(request, dispatcher.name_of(request))
        self.first_token_at = 0.0  # time.monotonic(), as is the next; 0: none has come
        self.last_token_at = 0.0
        self._request = request
        self._metrics = dispatcher.metrics
        self._router_metrics = dispatcher.router_metrics
        self._estimates = dispatcher.estimates
        self._transfer_id = transfer_id
        self._fields = fields(request_id=request.request_id)  # of its log lines
        self._reported = False

    def log(self, level: int, text: str, *values: object, **options: Any) -> None:
        """Writes a line. The first value that `text` takes is the name of the transfer."""
        logger.log(level, text, self._transfer_id, *values, extra=self._fields, **options)

    def began(self) -> None:
        """It is under way."""
        self._metrics.inflight.inc()

    def left(self, *, is_over: bool) -> None:
        """The front has left it; if it is not over, its client has gone."""
        self._metrics.inflight.dec()
        if not is_over:
            self._router_metrics.errors.labels(ErrorCode.CANCELLED.label).inc()
            self.timeline.end(time.monotonic(), error=ErrorCode.CANCELLED.label)

    def progressed(self, index: int, num_new: int, now: float) -> bool:
        """Tokens came, from output index `index` on, and there are `num_new` in all. True: they are the first."""
        is_first = not self.first_token_at
        if is_first:
            self.first_token_at = now
            self.timeline.first_token(now)
            self._metrics.time_to_first_token.observe(now - self._request.arrived_at)
        else:
            gaps = self._metrics.inter_token_latency
            self.timeline.gap(gaps.observe(now - self.last_token_at), gaps.num_buckets, index, now)
        self.last_token_at = now
        self.timeline.num_output_tokens = num_new
        return is_first

    def reported(self, report: pods_pb2.DecodeReport, now: float, decode: str) -> None:
        """The decode pod of this attempt reports. The first report of all is counted."""
        metrics, timeline = self._metrics, self.timeline
        if report.recompute_reason:
            report.recompute_reason = self._router_metrics.recompute_reasons.value_of(report.recompute_reason)
            timeline.event("recompute", report.recompute_reason, decode)
        timeline.reported(report, now)
        if self._reported:
            return
        self._reported = True
        self._cached(report.num_cached_tokens)
        metrics.external_tokens.inc(report.num_external_tokens)
        metrics.first_token_phase.labels("decode_queue").observe(report.queue_s)
        if report.num_external_tokens:
            self._estimates.handed_over(report.handoff_s, report.num_external_tokens)
            metrics.first_token_phase.labels("handoff").observe(report.handoff_s)
        if report.recompute_reason:
            metrics.recomputed.labels(report.recompute_reason).inc()
            self.log(logging.INFO, "%s: the prompt was recomputed: %s", report.recompute_reason)

    def prefilled(self, response: pods_pb2.PrefillResponse, now: float) -> None:
        """The prefill pod has answered."""
        self._cached(min(response.num_cached_tokens, len(self._request.prompt_token_ids)))
        queue_s, compute_s = checked_seconds(response.timing.queue_s), checked_seconds(response.timing.compute_s)
        self._metrics.first_token_phase.labels("queue").observe(queue_s)
        self._metrics.first_token_phase.labels("prefill").observe(compute_s)
        self.timeline.prefilled(queue_s, compute_s, now)

    def _cached(self, num_tokens: int) -> None:
        self._metrics.cached_tokens.inc(num_tokens)
        self.timeline.num_cached_tokens = max(self.timeline.num_cached_tokens, num_tokens)

    def prefill_failed(self, error: BatonError, pod: str) -> None:
        """The prefill leg failed."""
        self._router_metrics.prefill_failures.labels(error.code.label).inc()
        self.log(_level_of(error), "%s: prefill pod %s failed: %s", pod, error.message)
        self.timeline.event("prefill_failed", error.code.label, pod)

    def prefill_retried(self, reason: str, pod: str) -> None:
        """Another prefill pod takes over."""
        self._router_metrics.survival.prefill_retries.labels(reason).inc()
        self.log(logging.INFO, "%s: goes to prefill pod %s instead: %s", pod, reason)
        self.timeline.event("prefill_retry", reason, pod)

    def prefill_disagreed(self, conflict: str, pod: str) -> None:
        """The prefill pod's first token is not the one that is known."""
        self._router_metrics.token_mismatches.inc()
        self.log(logging.ERROR, "%s: prefill pod %s disagrees: %s", pod, conflict)

    def lost(self, error: BatonError, reason: str, detail: str, pod: str) -> None:
        """The decode leg broke."""
        problem = f"{error.message}: {detail}" if detail else error.message
        level = logging.INFO
        if reason == "disagreement":
            self._router_metrics.token_mismatches.inc()
            level = logging.ERROR
        self.log(level, "%s: decode pod %s: %s", pod, problem)
        self._redispatched(reason, pod)

    def moved(self, pod: str) -> None:
        """It leaves its decode pod, which drains."""
        self.log(logging.INFO, "%s: leaves decode pod %s, which drains", pod)
        self._redispatched("drain", pod)

    def _redispatched(self, reason: str, pod: str) -> None:
        self._router_metrics.survival.redispatched.labels(reason).inc()
        self.timeline.event("redispatch", reason, pod)

    def finished(self, reason: FinishReason, num_tokens: int, num_new: int, now: float) -> None:
        """It ended well, with `num_tokens`, `num_new` of which were made here."""
        self.timeline.end(now, finish_reason=reason.label)
        metrics = self._metrics
        metrics.success.labels(reason.label).inc()
        metrics.generation_tokens.inc(num_new)
        metrics.output_length.observe(num_new)
        self._estimates.answered(num_tokens)
        metrics.e2e_latency.observe(now - self._request.arrived_at)
        if num_new:
            metrics.decode_time.observe(now - self.first_token_at)
        if num_new > 1:
            metrics.time_per_output_token.observe((now - self.first_token_at) / (num_new - 1))

    def failed(self, error: BatonError) -> None:
        """It ended with an error."""
        self.log(_level_of(error), "%s: failed: %s: %s", error.code.label, error.message)
        self.timeline.end(time.monotonic(), error=error.code.label)


def _level_of(error: BatonError) -> int:
    """A warning if it is not the client's fault."""
    return logging.WARNING if error.code.value.http_status >= 500 else logging.INFO

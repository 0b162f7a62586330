"""A decode pod's spans of one request. They are made of the deltas that go to the router, and of the report in the
first of them: nothing else in the pod knows that a request is traced."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from common.errors import ErrorCode
from common.observability.tracing.context import TraceContext, read_parent
from common.observability.tracing.span import Attributes, AttributeValue, Span, SpanKind, WallClock
from common.observability.tracing.tracer import Tracer
from common.pb import common_pb2, pods_pb2
from decode_service.request import DecodeRequest

Emit = Callable[[DecodeRequest, pods_pb2.TokenDelta], None]

_FAILED = (common_pb2.FINISH_REASON_ERROR, common_pb2.FINISH_REASON_ABORT)


def traced(emit: Emit, submit: pods_pb2.Submit, tracer: Tracer | None) -> Emit:
    """Returns `emit` itself, or one that also notes the deltas if the request is traced."""
    if tracer is None or not submit.traceparent:
        return emit
    parent = read_parent(submit.traceparent, submit.tracestate)
    if parent is None or not parent.is_sampled:
        return emit
    trace = _DecodeTrace(tracer, parent.span, submit.request.request_id)

    def emit_and_note(request: DecodeRequest, delta: pods_pb2.TokenDelta) -> None:
        emit(request, delta)
        trace.note(delta)

    return emit_and_note


class _DecodeTrace:
    """
    decode_pod
    |-- decode_queue
    |-- transfer, first_decode    if the KV came by handoff
    |-- prefill                   if the prompt was computed here
    `-- decode
    """

    def __init__(self, tracer: Tracer, parent: TraceContext, request_id: str) -> None:
        self._tracer = tracer
        self._context = parent.child("decode_pod")
        self._request_id = request_id
        self._began = time.monotonic()
        self._first_at = 0.0  # 0: there was none, as below
        self._second_at = 0.0
        self._num_tokens = 0
        self._report: pods_pb2.DecodeReport | None = None

    def note(self, delta: pods_pb2.TokenDelta) -> None:
        now = time.monotonic()
        if delta.token_ids:
            self._num_tokens += len(delta.token_ids)
            if not self._first_at:
                self._first_at = now
                self._report = pods_pb2.DecodeReport()
                self._report.CopyFrom(delta.report)
            elif not self._second_at:
                self._second_at = now
        if delta.finish_reason:
            self._tracer.export(list(self._spans(now, _error_of(delta))))

    def _spans(self, now: float, error: str) -> Iterator[Span]:
        clock = WallClock()
        report = self._report
        attributes: dict[str, AttributeValue] = {
            "baton.request_id": self._request_id,
            "gen_ai.usage.output_tokens": self._num_tokens,
        }
        if report is not None:
            attributes["gen_ai.usage.cache_read.input_tokens"] = report.num_cached_tokens
            attributes["baton.handoff.num_tokens"] = report.num_external_tokens
        yield Span(
            name="decode_pod",
            context=self._context,
            kind=SpanKind.SERVER,
            start_ns=clock.ns(self._began),
            end_ns=clock.ns(now),
            attributes=attributes,
            error=error,
        )
        if report is not None:
            yield from self._phases(report, now, clock)

    def _phases(self, report: pods_pb2.DecodeReport, now: float, clock: WallClock) -> Iterator[Span]:
        def span(name: str, start: float, end: float, attributes: Attributes | None = None) -> Span:
            return Span(
                name=name,
                context=self._context.child(name),
                start_ns=clock.ns(start),
                end_ns=clock.ns(max(start, end)),
                attributes=attributes or {},
            )

        first = self._first_at
        scheduled = min(first, self._began + report.queue_s)
        yield span("decode_queue", self._began, scheduled)
        if report.num_external_tokens and not report.recompute_reason:
            second = self._second_at or now
            yield span("transfer", max(self._began, first - report.handoff_s), first)
            yield span("first_decode", first, second)
            yield span("decode", second, now)
            return
        reason = report.recompute_reason
        yield span("prefill", scheduled, first, {"baton.recompute_reason": reason} if reason else None)
        yield span("decode", first, now)


def _error_of(delta: pods_pb2.TokenDelta) -> str:
    if delta.finish_reason not in _FAILED:
        return ""
    if delta.finish_reason == common_pb2.FINISH_REASON_ERROR:
        return ErrorCode.from_number(delta.error.code).label
    return ErrorCode.CANCELLED.label

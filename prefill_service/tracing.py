"""A prefill pod's spans of one request: queue, prefill with an event for each chunk, transfer of its KV."""

from __future__ import annotations

import time

from common.observability.tracing.context import TraceContext
from common.observability.tracing.span import Attributes, Span, SpanEvent, SpanKind, WallClock
from common.observability.tracing.tracer import Tracer


class PrefillTrace:
    """Notes what happens to a request that is traced. Exported once, when pod and engine have done with it."""

    def __init__(self, tracer: Tracer, parent: TraceContext, request_id: str, num_prompt_tokens: int) -> None:
        """`parent`: the router's span of the leg."""
        self._tracer: Tracer | None = tracer  # None: it was exported
        self._context = parent.child("prefill_pod")
        self._request_id = request_id
        self._num_prompt_tokens = num_prompt_tokens
        self._num_cached_tokens = 0
        self._began = time.monotonic()
        self._queue_s: float | None = None  # None: it was not scheduled
        self._token_at: float | None = None
        self._saved: list[tuple[float, int]] = []  # when KV of how many tokens was in the connector

    def started(self, queue_s: float, num_cached_tokens: int) -> None:
        """It was scheduled for the first time."""
        self._queue_s = queue_s
        self._num_cached_tokens = num_cached_tokens

    def saved(self, num_tokens: int) -> None:
        """The KV of the first tokens is in the connector."""
        self._saved.append((time.monotonic(), num_tokens))

    def first_token(self) -> None:
        """It was computed."""
        self._token_at = time.monotonic()

    def end(self, error: str = "") -> None:
        """Exports its spans. Idempotent. `error`: label of its code; empty: it has not failed."""
        tracer, self._tracer = self._tracer, None
        if tracer is not None:
            tracer.export(self._spans(time.monotonic(), error))

    def _spans(self, now: float, error: str) -> list[Span]:
        clock = WallClock()

        def span(name: str, start: float, end: float, events: list[SpanEvent] | None = None) -> Span:
            return Span(
                name=name,
                context=self._context.child(name),
                start_ns=clock.ns(start),
                end_ns=clock.ns(max(start, end)),
                events=events or [],
            )

        scheduled = now if self._queue_s is None else min(now, self._began + self._queue_s)
        spans = [span("prefill_queue", self._began, scheduled)]
        if self._queue_s is not None:
            chunks = [SpanEvent("chunk_saved", clock.ns(at), {"baton.num_tokens": num}) for at, num in self._saved]
            spans.append(span("prefill", scheduled, self._token_at or now, chunks))
        if self._saved:
            spans.append(span("transfer", scheduled, self._saved[-1][0]))
        attributes: Attributes = {
            "baton.request_id": self._request_id,
            "gen_ai.usage.input_tokens": self._num_prompt_tokens,
            "gen_ai.usage.cache_read.input_tokens": self._num_cached_tokens,
        }
        return [
            Span(
                name="prefill_pod",
                context=self._context,
                kind=SpanKind.SERVER,
                start_ns=clock.ns(self._began),
                end_ns=clock.ns(now),
                attributes=attributes,
                error=error,
            ),
            *spans,
        ]

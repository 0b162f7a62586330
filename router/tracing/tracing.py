"""Decides which requests are traced, and exports their spans when they have ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from prometheus_client import Counter

from common.observability.tracing.context import (
    TRACEPARENT,
    TRACESTATE,
    TraceContext,
    begin_trace,
    continue_trace,
    read_parent,
)
from common.observability.tracing.tracer import create_tracer
from router.requests.request import GenerationRequest
from router.timelines.timeline import Timeline
from router.tracing.config import RouterTracingConfig
from router.tracing.spans import spans_of


class RequestTracing:
    """Traces the requests of one router. Without an exporter it does nothing."""

    def __init__(self, config: RouterTracingConfig, instance: str, counter: Counter) -> None:
        """`instance`: name of this router in spans. Raises ConfigError if an exporter cannot be had."""
        self._ratio = config.traces_sampling_ratio
        self._tracer = create_tracer(config, service="baton-router", instance=instance, counter=counter)

    def begin(self, header: Callable[[str], str | None]) -> TraceContext | None:
        """The span of a request with these headers; None: it is not traced. An invalid header is ignored."""
        if self._tracer is None:
            return None
        parent = read_parent(header(TRACEPARENT), header(TRACESTATE))
        return begin_trace(self._ratio) if parent is None else continue_trace(parent)

    def export(self, requests: Sequence[GenerationRequest], timelines: Sequence[Timeline]) -> None:
        """Exports the spans of a request that has ended, if it is traced: its generations, each with its timeline."""
        trace = requests[0].trace
        if self._tracer is not None and trace is not None:
            self._tracer.export(spans_of(trace, requests, timelines))

    async def close(self) -> None:
        """Exports what is queued, for a few seconds at most."""
        if self._tracer is not None:
            await asyncio.to_thread(self._tracer.close)

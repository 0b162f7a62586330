"""Takes spans from the event loop and exports them on threads, so that no request ever waits for an exporter.

Each exporter has a bounded queue and a thread. What a full queue cannot take is dropped and counted.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence

from prometheus_client import Counter

from common import __version__
from common.errors import UnavailableError
from common.observability.repeats import RepeatedLine
from common.observability.tracing.config import TracingConfig
from common.observability.tracing.exporters import Exporter, create_exporters
from common.observability.tracing.span import Span

logger = logging.getLogger(__name__)

MAX_QUEUED = 8192  # spans; some hundred requests, 1 KB each
_MAX_BATCH = 512  # spans that are exported together
_CLOSE_TIMEOUT_S = 5.0
_EXPORTED, _FAILED, _DROPPED = "exported", "failed", "dropped"


class Tracer:
    """Exports finished spans."""

    def __init__(self, exporters: Sequence[Exporter], counter: Counter, *, max_queued: int = MAX_QUEUED) -> None:
        """Takes ownership of the exporters. `counter` has the labels exporter and outcome."""
        self._queues = [_ExportQueue(exporter, counter, max_queued) for exporter in exporters]

    def export(self, spans: Sequence[Span]) -> None:
        """Queues the spans. Never blocks."""
        for queue in self._queues:
            queue.put(spans)

    def close(self) -> None:
        """Exports what is queued, for a few seconds at most. Blocks; idempotent."""
        deadline = time.monotonic() + _CLOSE_TIMEOUT_S
        for queue in self._queues:
            queue.end()
        for queue in self._queues:
            queue.close(max(0.0, deadline - time.monotonic()))


class _ExportQueue:
    def __init__(self, exporter: Exporter, counter: Counter, max_queued: int) -> None:
        self._exporter = exporter
        self._max_queued = max_queued
        self._counts = {outcome: counter.labels(exporter.name, outcome) for outcome in (_EXPORTED, _FAILED, _DROPPED)}
        self._changed = threading.Condition()
        self._spans: deque[Span] = deque()
        self._is_ended = False
        self._is_closed = False
        self._failure_line = RepeatedLine(logger, logging.WARNING)
        self._thread = threading.Thread(target=self._run, name=f"traces to {exporter.name}", daemon=True)

    def put(self, spans: Sequence[Span]) -> None:
        with self._changed:
            if self._is_ended or len(self._spans) + len(spans) > self._max_queued:
                self._counts[_DROPPED].inc(len(spans))
                return
            self._spans.extend(spans)
            if not self._thread.ident:
                self._thread.start()
            self._changed.notify()

    def end(self) -> None:
        """Takes no more."""
        with self._changed:
            self._is_ended = True
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if self._thread.ident:
            self._thread.join(timeout_s)
        with self._changed:
            self._counts[_DROPPED].inc(len(self._spans))
            self._spans.clear()
        self._exporter.close()

    def _run(self) -> None:
        while batch := self._next_batch():
            try:
                self._exporter.export(batch)
            except UnavailableError as error:
                self._counts[_FAILED].inc(len(batch))
                self._failure_line.log(
                    "%d spans were not exported: %s: %s", len(batch), self._exporter.name, error.message
                )
            else:
                self._counts[_EXPORTED].inc(len(batch))

    def _next_batch(self) -> list[Span]:
        """Waits for spans. Returns none at the end."""
        with self._changed:
            while not (self._spans or self._is_ended):
                self._changed.wait()
            return [self._spans.popleft() for _ in range(min(_MAX_BATCH, len(self._spans)))]


def create_tracer(config: TracingConfig, *, service: str, instance: str, counter: Counter) -> Tracer | None:
    """Returns the tracer of a process; None: tracing is off. `service` and `instance` name the process in spans. Raises
    ConfigError if an exporter cannot be had."""
    if not config.is_on:
        return None
    resource = {"service.name": service, "service.instance.id": instance, "service.version": __version__}
    return Tracer(create_exporters(config, resource), counter)


def trace_span_counter(prefix: str) -> Counter:
    """Counts what became of spans. `prefix` begins its name. In no registry yet."""
    return Counter(
        f"{prefix}_trace_spans",
        "Spans by exporter and outcome: exported; failed, not taken by the exporter; dropped, as its queue was full.",
        ["exporter", "outcome"],
        registry=None,
    )

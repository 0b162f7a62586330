"""Spans over OTLP. The only module that imports OpenTelemetry; its SDK sends what it is given, and measures nothing."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcSpanExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as HttpSpanExporter
from opentelemetry.sdk.resources import Resource as SdkResource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, TraceFlags, TraceState
from opentelemetry.trace.status import Status, StatusCode

from common.errors import UnavailableError
from common.observability.tracing import span as spans_module
from common.observability.tracing.config import OtlpProtocol
from common.observability.tracing.otlp_json import SCOPE
from common.observability.tracing.span import Resource, Span

_KINDS = {
    spans_module.SpanKind.INTERNAL: SpanKind.INTERNAL,
    spans_module.SpanKind.SERVER: SpanKind.SERVER,
    spans_module.SpanKind.CLIENT: SpanKind.CLIENT,
}
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_TIMEOUT_S = 5.0  # of one batch, repetitions included
_TRACES_PATH = "/v1/traces"


class _Reasons(logging.Handler):
    """Takes the lines that the SDK's exporters log, several for each batch while the collector is gone."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._reasons = threading.local()
        exporters = logging.getLogger(name)
        exporters.addHandler(self)
        exporters.propagate = False

    @contextmanager
    def collected(self) -> Iterator[list[str]]:
        """The lines that this thread logs within."""
        self._reasons.lines = lines = list[str]()
        yield lines

    def emit(self, record: logging.LogRecord) -> None:
        """See logging.Handler."""
        getattr(self._reasons, "lines", []).append(record.getMessage())


_reasons = _Reasons("opentelemetry.exporter")


class OtlpExporter:
    """See Exporter."""

    name = "otlp"

    def __init__(self, endpoint: str, protocol: OtlpProtocol, resource: Resource) -> None:
        """Headers, certificates and compression are read from OTEL_EXPORTER_OTLP_* variables. Connects later."""
        self._endpoint = endpoint
        self._resource = SdkResource(resource)
        self._scope = InstrumentationScope(SCOPE)
        self._exporter = _exporter(endpoint, protocol)

    def export(self, spans: Sequence[Span]) -> None:
        """See Exporter."""
        with _reasons.collected() as reasons:
            result = self._exporter.export([self._readable(span) for span in spans])
        if result is not SpanExportResult.SUCCESS:
            raise UnavailableError(f"{self._endpoint}: {reasons[0] if reasons else 'no reason was given'}")

    def close(self) -> None:
        """See Exporter."""
        self._exporter.shutdown()

    def _readable(self, span: Span) -> ReadableSpan:
        context = span.context
        parent = _span_context(context.trace_id, context.parent_id, "") if context.parent_id else None
        return ReadableSpan(
            name=span.name,
            context=_span_context(context.trace_id, context.span_id, context.state),
            parent=parent,
            resource=self._resource,
            attributes=dict(span.all_attributes),
            events=[Event(event.name, dict(event.attributes), event.at_ns) for event in span.events],
            kind=_KINDS[span.kind],
            status=Status(StatusCode.ERROR, span.error) if span.error else Status(),
            start_time=span.start_ns,
            end_time=span.end_ns,
            instrumentation_scope=self._scope,
        )


def _exporter(endpoint: str, protocol: OtlpProtocol) -> SpanExporter:
    parts = urlsplit(endpoint)
    is_secure = parts.scheme in ("https", "grpcs")
    if protocol == "grpc":
        return GrpcSpanExporter(endpoint=parts.netloc, insecure=not is_secure, timeout=_TIMEOUT_S)
    url = parts._replace(scheme="https" if is_secure else "http", path=parts.path.rstrip("/") or _TRACES_PATH)
    return HttpSpanExporter(endpoint=url.geturl(), timeout=_TIMEOUT_S)


def _span_context(trace_id: str, span_id: str, state: str) -> SpanContext:
    others = TraceState.from_header([state]) if state else TraceState()
    return SpanContext(int(trace_id, 16), int(span_id, 16), is_remote=False, trace_flags=_SAMPLED, trace_state=others)

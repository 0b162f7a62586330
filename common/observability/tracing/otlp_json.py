"""Spans as OTLP's JSON: one ExportTraceServiceRequest per line, which OpenTelemetry's collector reads as it is
(`otlpjsonfile` receiver)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from common.observability.tracing.span import Attributes, AttributeValue, Span

SCOPE = "baton"
_STATUS_ERROR = 2


def to_line(resource: Mapping[str, str], spans: Sequence[Span]) -> bytes:
    """Returns the spans of one process, with a line break at the end and none before."""
    scope_spans = {"scope": {"name": SCOPE}, "spans": [_span(span) for span in spans]}
    request = {"resourceSpans": [{"resource": {"attributes": _attributes(resource)}, "scopeSpans": [scope_spans]}]}
    return msgspec.json.encode(request) + b"\n"


def _span(span: Span) -> dict[str, Any]:
    context = span.context
    encoded: dict[str, Any] = {
        "traceId": context.trace_id,
        "spanId": context.span_id,
        "name": span.name,
        "kind": int(span.kind),
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _attributes(span.all_attributes),
        "events": [
            {"timeUnixNano": str(event.at_ns), "name": event.name, "attributes": _attributes(event.attributes)}
            for event in span.events
        ],
        "status": {"code": _STATUS_ERROR, "message": span.error} if span.error else {},
    }
    if context.parent_id:
        encoded["parentSpanId"] = context.parent_id
    if context.state:
        encoded["traceState"] = context.state
    return encoded


def _attributes(attributes: Attributes) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: AttributeValue) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case str():
            return {"stringValue": value}
        case _:
            return {"arrayValue": {"values": [_value(each) for each in value]}}

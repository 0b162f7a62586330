"""Spans of requests, and where they are exported. Nothing of OpenTelemetry is imported unless OTLP is asked for."""

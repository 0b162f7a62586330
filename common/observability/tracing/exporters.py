"""Exporters of spans: to a file, the console, or OTLP. Each is used by one thread."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Protocol, TextIO

from common.errors import ConfigError, UnavailableError
from common.observability.tracing.config import TracingConfig
from common.observability.tracing.otlp_json import to_line
from common.observability.tracing.span import Resource, Span


class Exporter(Protocol):
    """May block. Called on a thread of its own."""

    name: str  # metric label

    def export(self, spans: Sequence[Span]) -> None:
        """Raises UnavailableError if they were not taken."""

    def close(self) -> None:
        """Ends a running export early, too. Called from another thread."""


class FileExporter:
    """Appends one line per batch in one write, so that several processes can share the file."""

    name = "file"

    def __init__(self, path: str, resource: Resource) -> None:
        """Raises ConfigError if the file cannot be opened."""
        self._path = path
        self._resource = resource
        try:
            self._file = open(path, "ab", buffering=0)  # noqa: SIM115  (closed by `close`)
        except OSError as error:
            raise ConfigError(f"--traces-file: cannot write {path}: {error.strerror}", param="traces_file") from error

    def export(self, spans: Sequence[Span]) -> None:
        """See Exporter."""
        line = to_line(self._resource, spans)
        try:
            written = os.write(self._file.fileno(), line)
        except OSError as error:
            raise UnavailableError(f"cannot write {self._path}: {error.strerror}") from error
        if written < len(line):
            raise UnavailableError(f"cannot write {self._path}: only {written} of {len(line)} bytes were written")

    def close(self) -> None:
        """See Exporter."""
        self._file.close()


class ConsoleExporter:
    """Writes for people: one line per span."""

    name = "console"

    def __init__(self, resource: Resource, stream: TextIO | None = None) -> None:
        """`stream`: default: stderr."""
        self._service = resource["service.instance.id"]
        self._stream = stream

    def export(self, spans: Sequence[Span]) -> None:
        """See Exporter."""
        stream = self._stream or sys.stderr
        try:
            stream.write("".join(f"[{self._service}] {_line_of(span)}\n" for span in spans))
            stream.flush()
        except OSError as error:
            raise UnavailableError(f"cannot write to the console: {error.strerror}") from error

    def close(self) -> None:
        """See Exporter."""


def create_exporters(config: TracingConfig, resource: Resource) -> list[Exporter]:
    """Returns those that the settings name. Raises ConfigError if one cannot be had."""
    exporters: list[Exporter] = []
    if config.otlp_traces_endpoint:
        exporters.append(_otlp(config, resource))
    if config.traces_file:
        exporters.append(FileExporter(config.traces_file, resource))
    if config.traces_console:
        exporters.append(ConsoleExporter(resource))
    return exporters


def _otlp(config: TracingConfig, resource: Resource) -> Exporter:
    setting = "otlp_traces_endpoint"
    try:
        from common.observability.tracing.otlp import OtlpExporter
    except ModuleNotFoundError as error:
        problem = f"--otlp-traces-endpoint: {error.name} is not installed; pip install 'baton-llm[tracing]'"
        raise ConfigError(problem, param=setting) from error
    return OtlpExporter(config.otlp_traces_endpoint, config.otlp_traces_protocol, resource)


def _line_of(span: Span) -> str:
    milliseconds = (span.end_ns - span.start_ns) / 1e6
    parts = [f"trace={span.context.trace_id} span={span.context.span_id} parent={span.context.parent_id or '-'}"]
    parts += [f"{key}={value!r}" for key, value in span.all_attributes.items()]
    parts += [f"event={event.name}" for event in span.events]
    return f"{span.name} {milliseconds:.3f} ms {' '.join(parts)}"

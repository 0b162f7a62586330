"""Settings of tracing."""

from __future__ import annotations

from typing import Annotated, Literal
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

OtlpProtocol = Literal["grpc", "http"]

_SCHEMES = ("http", "https", "grpc", "grpcs")


class TracingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tracing: spans of requests, for OpenTelemetry."""

    otlp_traces_endpoint: Annotated[
        str,
        Meta(
            description="Where spans are sent over OTLP, such as http://127.0.0.1:4317, or https:// with TLS; empty: "
            "nowhere. Needs the extra 'tracing'."
        ),
    ] = ""
    otlp_traces_protocol: Annotated[
        OtlpProtocol, Meta(description="OTLP over gRPC, or over HTTP with protobuf; /v1/traces is the default path.")
    ] = "grpc"
    traces_file: Annotated[
        str,
        Meta(
            description="File to which spans are appended as OTLP's JSON, one batch per line. Processes of one machine "
            "may share it. Empty: none."
        ),
    ] = ""
    traces_console: Annotated[bool, Meta(description="Print spans on stderr, one per line.")] = False

    def __post_init__(self) -> None:
        if self.otlp_traces_endpoint and not _is_url(self.otlp_traces_endpoint):
            problem = f"expected http://host:port, or https://, got {self.otlp_traces_endpoint!r}"
            raise ValueError(f"--otlp-traces-endpoint: {problem}")

    @property
    def is_on(self) -> bool:
        """Whether spans go anywhere."""
        return bool(self.otlp_traces_endpoint or self.traces_file or self.traces_console)


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return parts.scheme in _SCHEMES and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        return False

"""Settings of the router's tracing."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from common.observability.tracing.config import TracingConfig


class RouterTracingConfig(TracingConfig, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tracing: spans of requests, for OpenTelemetry."""

    traces_sampling_ratio: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="Share of the requests without a traceparent header that are traced. A header decides for its "
            "own request, and the router for its pods.",
        ),
    ] = 1.0

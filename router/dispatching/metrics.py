"""What survival counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class SurvivalMetrics:
    """On the router's registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.redispatched = Counter(
            "baton_router_redispatch", "Running requests moved to another decode pod.", ["reason"], registry=registry
        )
        self.prefill_retries = Counter(
            "baton_router_prefill_retries",
            "Prompts that were given to another prefill pod, by what was wrong with the first.",
            ["reason"],
            registry=registry,
        )
        self.migrations_waiting = Gauge(
            "baton_router_num_migrations_waiting", "Requests in line to be computed again elsewhere.", registry=registry
        )
        self.migrations_running = Gauge(
            "baton_router_num_migrations_running",
            "Requests that are being computed again elsewhere, until their next token.",
            registry=registry,
        )
        self.resumed = Counter(
            "baton_router_stream_resume",
            "Streams that clients resumed: from what was kept of them, or computed again from the beginning.",
            ["source"],
            registry=registry,
        )
        self.streams_kept = Gauge(
            "baton_router_num_streams_kept", "Broken streams that are kept to be resumed.", registry=registry
        )

"""What is counted of keys and refused connections. Tenants are labelled by name: there are as many as keys."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

HTTP_REFUSALS = ("connections", "malformed", "header_size", "header_time", "body_memory", "body_time", "send_time")
"""Why an HTTP connection is closed."""


class SecurityMetrics:
    """Registers itself."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.unauthenticated = Counter(
            "baton_router_unauthenticated", "Requests without a valid API key.", ["reason"], registry=registry
        )
        self.refused = Counter(
            "baton_router_tenant_refused", "Requests over a limit of their key.", ["tenant", "limit"], registry=registry
        )
        self.tokens = Counter(
            "baton_router_tenant_tokens", "Prompt and output tokens, by key.", ["tenant"], registry=registry
        )
        self.http_refused = Counter(
            "baton_router_http_refused", "HTTP connections that were closed, by reason.", ["reason"], registry=registry
        )
        self.unfinished_body_bytes = Gauge(
            "baton_router_http_unfinished_body_bytes",
            "Bytes of request bodies that are unfinished or wait to be tokenised.",
            registry=registry,
        )
        for reason in ("missing", "unknown"):
            self.unauthenticated.labels(reason)
        for reason in HTTP_REFUSALS:
            self.http_refused.labels(reason)

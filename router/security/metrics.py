"""What is counted of keys. Tenants are labelled by name: there are as many as keys."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class SecurityMetrics:
    """Registers itself."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.unauthenticated = Counter(
            "baton_unauthenticated", "Requests without a valid API key.", ["reason"], registry=registry
        )
        self.refused = Counter(
            "baton_tenant_refused", "Requests over a limit of their key.", ["tenant", "limit"], registry=registry
        )
        self.tokens = Counter("baton_tenant_tokens", "Prompt and output tokens, by key.", ["tenant"], registry=registry)
        for reason in ("missing", "unknown"):
            self.unauthenticated.labels(reason)

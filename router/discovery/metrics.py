"""What is counted of discovery."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge


class DiscoveryMetrics:
    """By source: "static", "dns:NAME:PORT", "registry"."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.pods = Gauge(
            "baton_router_discovery_pods", "Pods that a source names, as last heard.", ["source"], registry=registry
        )
        self.failures = Counter(
            "baton_router_discovery_failures",
            "Lookups that failed; the pods that were known stay.",
            ["source"],
            registry=registry,
        )
        self.ignored_records = Counter(
            "baton_router_discovery_ignored_records",
            "Records of the registry that make no sense, each counted once for as long as it is there.",
            registry=registry,
        )

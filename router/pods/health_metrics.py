"""What is counted of pods' health."""

from __future__ import annotations

from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter

from router.pods.health import OUTCOMES, REASONS


class PodHealthMetrics:
    """By pod; a pod that is forgotten takes its figures along."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.ejections = Counter(
            "baton_router_pod_ejections",
            "Ejections of pods by what the last failure was.",
            ["role", "address", "reason"],
            registry=registry,
        )
        self.canaries = Counter(
            "baton_router_canary_requests",
            "Canary requests by how they ended.",
            ["role", "address", "outcome"],
            registry=registry,
        )

    def forget(self, role: str, address: str) -> None:
        """Nothing more will come of this pod."""
        for metric, values in ((self.ejections, REASONS), (self.canaries, OUTCOMES)):
            for value in values:
                with suppress(KeyError):  # it never happened
                    metric.remove(role, address, value)

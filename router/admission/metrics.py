"""What admission counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from common.observability.model_label import MODEL_LABEL, OfModel

_WAITS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

REFUSALS = ("queue_full", "tenant_share", "ttft", "itl", "deadline")
LIMITS = ("ttft", "itl", "deadline")


def priority_label(priority: int) -> str:
    """Clients choose any of 2**32."""
    if priority == 0:
        return "normal"
    return "high" if priority < 0 else "low"


class AdmissionMetrics:
    """Of all models. Registers itself."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.queued = Gauge(
            "baton_router_num_requests_queued",
            "Generations that wait in the router to be dispatched.",
            [MODEL_LABEL, "priority"],
            registry=registry,
        )
        self.queue_wait = Histogram(
            "baton_router_request_queue_seconds",
            "Time in the router's queue of requests that were dispatched.",
            [MODEL_LABEL, "priority"],
            buckets=_WAITS_S,
            registry=registry,
        )
        self.refused = Counter(
            "baton_router_request_refusals",
            "Requests that were refused at once: no place in the queue (queue_full, tenant_share), or a limit that "
            "they name would be broken.",
            [MODEL_LABEL, "reason"],
            registry=registry,
        )
        self.limits = Counter(
            "baton_router_request_limits",
            "Limits of time that requests named (the deadline: that every one has), by whether they were kept.",
            ["limit", "outcome"],
            registry=registry,
        )
        for limit in LIMITS:  # so that each rate starts at 0 and not at nothing
            self.limits.labels(limit, "met")
            self.limits.labels(limit, "missed")


class QueueMetrics:
    """Of one model's queue."""

    def __init__(self, admission: AdmissionMetrics, model_name: str) -> None:
        self.queued = OfModel(admission.queued, model_name)
        self.queue_wait = OfModel(admission.queue_wait, model_name)
        self.refused = OfModel(admission.refused, model_name)
        for label in ("high", "normal", "low"):  # so that each rate starts at 0 and not at nothing
            self.queued.labels(label)
            self.queue_wait.labels(label)
        for reason in REFUSALS:
            self.refused.labels(reason)

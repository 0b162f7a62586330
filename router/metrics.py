"""Tables of all that a router counts. What a scrape reads from elsewhere is in IndexMetrics and RelayedFigures.

Names follow the field's: a dashboard needs only another prefix.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from common.errors import ErrorCode
from common.observability.bounded_labels import BoundedLabels
from common.observability.build_info import BuildInfo
from common.observability.local_histogram import LocalHistogram
from common.observability.metric_tables import Column, MetricTable, ModelFamilies, ModelTable, metric, per_model
from common.observability.model_label import MODEL_LABEL
from common.observability.tracing.tracer import trace_span_counter

_LATENCIES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
GAPS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
_LENGTHS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
_WAITS_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)

HTTP_REFUSALS = ("connections", "malformed", "header_size", "header_time", "body_memory", "body_time", "send_time")
"""Why an HTTP connection is closed."""


class LocalHistograms(Collector):
    """A LocalHistogram for each model."""

    def __init__(self, name: str, documentation: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._documentation = documentation
        self._bounds = bounds
        self._by_model: dict[str, LocalHistogram] = {}

    def labels(self, model_name: str) -> LocalHistogram:
        """The one of this model."""
        return self._by_model.setdefault(model_name, LocalHistogram(self._bounds))

    def remove(self, model_name: str) -> None:
        """Removes the one of this model, if there is one."""
        self._by_model.pop(model_name, None)

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=[MODEL_LABEL])
        for model_name, histogram in list(self._by_model.items()):
            family.add_metric([model_name], histogram.buckets(), histogram.sum)
        yield family


def _local_histograms(name: str, text: str, bounds: Sequence[float]) -> Column[LocalHistogram]:
    def family(registry: CollectorRegistry) -> LocalHistograms:
        histograms = LocalHistograms(name, text, bounds)
        registry.register(histograms)
        return histograms

    return Column(family, LocalHistograms.labels)


class GenerationMetrics(ModelTable):
    """Metrics of one model's requests."""

    inflight = per_model(Gauge, "baton_router_num_requests_inflight", "Generations under way.")
    success = per_model(Counter, "baton_router_request_success", "Generations that ended well.", "finished_reason")
    prompt_tokens = per_model(Counter, "baton_router_prompt_tokens", "Prompt tokens of accepted requests.")
    generation_tokens = per_model(Counter, "baton_router_generation_tokens", "Output tokens received.")
    cached_tokens = per_model(
        Counter, "baton_router_prefix_cached_tokens", "Prompt tokens served by a pod's prefix cache."
    )
    external_tokens = per_model(
        Counter, "baton_router_external_tokens", "Prompt tokens whose KV came through the connector."
    )
    time_to_first_token = per_model(
        Histogram,
        "baton_router_time_to_first_token_seconds",
        "Arrival at the router to first token.",
        buckets=_LATENCIES_S,
    )
    first_token_phase = per_model(
        Histogram,
        "baton_router_first_token_phase_seconds",
        "Parts of the time to first token: tokenize; queue and prefill (on the pod that prefilled); "
        "handoff and decode_queue (of the decode leg, which the first token does not wait for).",
        "phase",
        buckets=_LATENCIES_S,
    )
    inter_token_latency = _local_histograms(
        "baton_router_inter_token_latency_seconds", "Gap between two deliveries of tokens to a request.", GAPS_S
    )
    time_per_output_token = per_model(
        Histogram,
        "baton_router_time_per_output_token_seconds",
        "(End - first token) / (output tokens - 1), per request.",
        buckets=GAPS_S,
    )
    decode_time = per_model(
        Histogram, "baton_router_request_decode_time_seconds", "First token to last token.", buckets=_LATENCIES_S
    )
    e2e_latency = per_model(
        Histogram, "baton_router_e2e_request_latency_seconds", "Arrival to last token.", buckets=_LATENCIES_S
    )
    prompt_length = per_model(
        Histogram, "baton_router_request_prompt_tokens", "Prompt tokens per request.", buckets=_LENGTHS
    )
    output_length = per_model(
        Histogram, "baton_router_request_generation_tokens", "Output tokens per request.", buckets=_LENGTHS
    )
    dispatched = per_model(
        Counter,
        "baton_router_dispatch",
        "Dispatches by where the prompt was sent to be prefilled, and why there.",
        "prefill",
        "reason",
    )
    pooled = per_model(
        Counter, "baton_router_pooled_inputs", "Inputs that were pooled: embedded, classified or scored.", "task"
    )
    pooling_latency = per_model(
        Histogram,
        "baton_router_pooling_latency_seconds",
        "Arrival to answer of requests that pool, with all their inputs.",
        buckets=_LATENCIES_S,
    )
    recomputed = per_model(
        Counter,
        "baton_router_recompute",
        "Prompts that decode pods computed although a prefill pod was to.",
        "reason",
    )


class QueueMetrics(ModelTable):
    """Metrics of one model's queue."""

    queued = per_model(
        Gauge,
        "baton_router_num_requests_queued",
        "Generations that wait in the router to be dispatched.",
        "priority",
        starts=("high", "normal", "low"),
    )
    queue_wait = per_model(
        Histogram,
        "baton_router_request_queue_seconds",
        "Time in the router's queue of requests that were dispatched.",
        "priority",
        starts=("high", "normal", "low"),
        buckets=_WAITS_S,
    )
    refused = per_model(
        Counter,
        "baton_router_request_refusals",
        "Requests that were refused at once: no place in the queue (queue_full, tenant_share), or a limit that "
        "they name would be broken.",
        "reason",
        starts=("queue_full", "tenant_share", "ttft", "itl", "deadline"),
    )


class SurvivalMetrics(MetricTable):
    """Metrics of requests that move or are resumed."""

    redispatched = metric(Counter, "baton_router_redispatch", "Running requests moved to another decode pod.", "reason")
    prefill_retries = metric(
        Counter,
        "baton_router_prefill_retries",
        "Prompts that were given to another prefill pod, by what was wrong with the first.",
        "reason",
    )
    migrations_waiting = metric(
        Gauge, "baton_router_num_migrations_waiting", "Requests in line to be computed again elsewhere."
    )
    migrations_running = metric(
        Gauge,
        "baton_router_num_migrations_running",
        "Requests that are being computed again elsewhere, until their next token.",
    )
    resumed = metric(
        Counter,
        "baton_router_stream_resume",
        "Streams that clients resumed: from what was kept of them, or computed again from the beginning.",
        "source",
    )
    streams_kept = metric(Gauge, "baton_router_num_streams_kept", "Broken streams that are kept to be resumed.")


class PodHealthMetrics(MetricTable):
    """Metrics of pods, as the router sees them."""

    ready = metric(Gauge, "baton_router_pod_ready", "1 if the pod can take requests.", "role", "address")
    ejections = metric(
        Counter,
        "baton_router_pod_ejections",
        "Ejections of pods by what the last failure was.",
        "role",
        "address",
        "reason",
    )
    canaries = metric(
        Counter,
        "baton_router_canary_requests",
        "Canary requests by how they ended.",
        "role",
        "address",
        "outcome",
    )


class DiscoveryMetrics(MetricTable):
    """By source: "static", "dns:NAME:PORT", "registry"."""

    pods = metric(Gauge, "baton_router_discovery_pods", "Pods that a source names, as last heard.", "source")
    failures = metric(
        Counter, "baton_router_discovery_failures", "Lookups that failed; the pods that were known stay.", "source"
    )
    ignored_records = metric(
        Counter,
        "baton_router_discovery_ignored_records",
        "Records of the registry that make no sense, each counted once for as long as it is there.",
    )


class SecurityMetrics(MetricTable):
    """Metrics of keys and refused connections. Tenants are labelled by name: there are as many as keys."""

    unauthenticated = metric(
        Counter,
        "baton_router_unauthenticated",
        "Requests without a valid API key.",
        "reason",
        starts=[("missing",), ("unknown",)],
    )
    refused = metric(Counter, "baton_router_tenant_refused", "Requests over a limit of their key.", "tenant", "limit")
    tokens = metric(Counter, "baton_router_tenant_tokens", "Prompt and output tokens, by key.", "tenant")
    http_refused = metric(
        Counter,
        "baton_router_http_refused",
        "HTTP connections that were closed, by reason.",
        "reason",
        starts=[(reason,) for reason in HTTP_REFUSALS],
    )
    unfinished_body_bytes = metric(
        Gauge,
        "baton_router_http_unfinished_body_bytes",
        "Bytes of request bodies that are unfinished or wait to be tokenised.",
    )


class WorkerMetrics(MetricTable):
    """Metrics of the workers of a router, counted by their parent."""

    workers = metric(Gauge, "baton_router_workers", "Workers of the router that serve.")
    restarts = metric(Counter, "baton_router_worker_restarts", "Workers that died and were started again.", "worker")
    hangs = metric(
        Counter, "baton_router_worker_hangs", "Workers that were killed because they no longer answered.", "worker"
    )


class RouterMetrics(MetricTable):
    """All metrics of one router, in a registry of their own."""

    errors = metric(
        Counter,
        "baton_router_request_errors",
        "Requests that failed.",
        "code",
        starts=[(code.label,) for code in ErrorCode],
    )
    limits = metric(
        Counter,
        "baton_router_request_limits",
        "Limits of time that requests named (the deadline: that every one has), by whether they were kept.",
        "limit",
        "outcome",
        starts=product(("ttft", "itl", "deadline"), ("met", "missed")),
    )
    prefill_failures = metric(Counter, "baton_router_prefill_failures", "Prefill legs that failed.", "code")
    token_mismatches = metric(
        Counter,
        "baton_router_token_mismatch",
        "Prefill and decode pod chose different tokens for one index.",
    )
    model_failures = metric(
        Counter, "baton_router_model_failures", "Models of the models file that could not be served."
    )

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        super().__init__(registry)
        ProcessCollector(registry=registry)
        registry.register(BuildInfo("baton_router"))
        self.trace_spans = trace_span_counter("baton_router")
        registry.register(self.trace_spans)
        self.generations = ModelFamilies(GenerationMetrics, registry)
        self.queues = ModelFamilies(QueueMetrics, registry)
        self.survival = SurvivalMetrics(registry)
        self.pods = PodHealthMetrics(registry)
        self.discovery = DiscoveryMetrics(registry)
        self.security = SecurityMetrics(registry)
        self.recompute_reasons = BoundedLabels()  # reasons as pods report them

    def forget_model(self, model_name: str) -> None:
        """Removes the series of a model that is gone."""
        self.generations.forget(model_name)
        self.queues.forget(model_name)

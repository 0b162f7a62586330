"""The router's metrics. One instance per router, with its own registry."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from common.errors import ErrorCode
from common.observability.bounded_labels import BoundedLabels
from common.observability.build_info import BuildInfo
from common.observability.local_histogram import LocalHistogram
from common.observability.model_label import MODEL_LABEL, OfModel
from common.observability.tracing.tracer import trace_span_counter

_LATENCIES_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100)
GAPS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5, 5)
_LENGTHS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)


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


def forget_model(metrics: object, model_name: str) -> None:
    """Removes the model's series from all families that are attributes of `metrics`."""
    for family in vars(metrics).values():
        if isinstance(family, LocalHistograms):
            family.remove(model_name)
        elif isinstance(family, MetricWrapperBase):
            for values in _series_of(family, model_name):
                family.remove(*values)


def _series_of(family: MetricWrapperBase, model_name: str) -> set[tuple[str, ...]]:
    """Label values of the model's series."""
    labels = [sample.labels for metric in family.collect() for sample in metric.samples]
    return {
        tuple(value for name, value in each.items() if name != "le")  # of a bucket
        for each in labels
        if each.get(MODEL_LABEL) == model_name
    }


class RouterMetrics:
    """Everything the router counts. Names follow the field's: a dashboard needs only another prefix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        registry = self.registry
        ProcessCollector(registry=registry)
        registry.register(BuildInfo("baton_router"))
        self.trace_spans = trace_span_counter("baton_router")
        registry.register(self.trace_spans)

        self.inflight = Gauge(
            "baton_router_num_requests_inflight", "Generations under way.", [MODEL_LABEL], registry=registry
        )
        self.success = Counter(
            "baton_router_request_success",
            "Generations that ended well.",
            [MODEL_LABEL, "finished_reason"],
            registry=registry,
        )
        self.errors = Counter("baton_router_request_errors", "Requests that failed.", ["code"], registry=registry)
        self.prompt_tokens = Counter(
            "baton_router_prompt_tokens", "Prompt tokens of accepted requests.", [MODEL_LABEL], registry=registry
        )
        self.generation_tokens = Counter(
            "baton_router_generation_tokens", "Output tokens received.", [MODEL_LABEL], registry=registry
        )
        self.cached_tokens = Counter(
            "baton_router_prefix_cached_tokens",
            "Prompt tokens served by a pod's prefix cache.",
            [MODEL_LABEL],
            registry=registry,
        )
        self.external_tokens = Counter(
            "baton_router_external_tokens",
            "Prompt tokens whose KV came through the connector.",
            [MODEL_LABEL],
            registry=registry,
        )

        self.time_to_first_token = Histogram(
            "baton_router_time_to_first_token_seconds",
            "Arrival at the router to first token.",
            [MODEL_LABEL],
            buckets=_LATENCIES_S,
            registry=registry,
        )
        self.first_token_phase = Histogram(
            "baton_router_first_token_phase_seconds",
            "Parts of the time to first token: tokenize; queue and prefill (on the pod that prefilled); "
            "handoff and decode_queue (of the decode leg, which the first token does not wait for).",
            [MODEL_LABEL, "phase"],
            buckets=_LATENCIES_S,
            registry=registry,
        )
        self.inter_token_latency = LocalHistograms(
            "baton_router_inter_token_latency_seconds", "Gap between two deliveries of tokens to a request.", GAPS_S
        )
        registry.register(self.inter_token_latency)
        self.time_per_output_token = Histogram(
            "baton_router_time_per_output_token_seconds",
            "(End - first token) / (output tokens - 1), per request.",
            [MODEL_LABEL],
            buckets=GAPS_S,
            registry=registry,
        )
        self.decode_time = Histogram(
            "baton_router_request_decode_time_seconds",
            "First token to last token.",
            [MODEL_LABEL],
            buckets=_LATENCIES_S,
            registry=registry,
        )
        self.e2e_latency = Histogram(
            "baton_router_e2e_request_latency_seconds",
            "Arrival to last token.",
            [MODEL_LABEL],
            buckets=_LATENCIES_S,
            registry=registry,
        )
        self.prompt_length = Histogram(
            "baton_router_request_prompt_tokens",
            "Prompt tokens per request.",
            [MODEL_LABEL],
            buckets=_LENGTHS,
            registry=registry,
        )
        self.output_length = Histogram(
            "baton_router_request_generation_tokens",
            "Output tokens per request.",
            [MODEL_LABEL],
            buckets=_LENGTHS,
            registry=registry,
        )

        self.dispatched = Counter(
            "baton_router_dispatch",
            "Dispatches by where the prompt was sent to be prefilled, and why there.",
            [MODEL_LABEL, "prefill", "reason"],
            registry=registry,
        )
        self.recomputed = Counter(
            "baton_router_recompute",
            "Prompts that decode pods computed although a prefill pod was to.",
            [MODEL_LABEL, "reason"],
            registry=registry,
        )
        self.recompute_reasons = BoundedLabels()  # as pods give them
        self.prefill_failures = Counter(
            "baton_router_prefill_failures", "Prefill legs that failed.", ["code"], registry=registry
        )
        self.token_mismatches = Counter(
            "baton_router_token_mismatch",
            "Prefill and decode pod chose different tokens for one index.",
            registry=registry,
        )
        self.model_failures = Counter(
            "baton_router_model_failures", "Models of the models file that could not be served.", registry=registry
        )
        self.pod_ready = Gauge(
            "baton_router_pod_ready", "1 if the pod can take requests.", ["role", "address"], registry=registry
        )

        for code in ErrorCode:  # so that each rate starts at 0 and not at nothing
            self.errors.labels(code.label)

    def of(self, model_name: str) -> ModelMetrics:
        """What is counted of this model."""
        return ModelMetrics(self, model_name)


class ModelMetrics:
    """What is counted of one model, and what the requests for it count of the router as a whole."""

    def __init__(self, router: RouterMetrics, model_name: str) -> None:
        self.inflight = router.inflight.labels(model_name)
        self.success = OfModel(router.success, model_name)
        self.prompt_tokens = router.prompt_tokens.labels(model_name)
        self.generation_tokens = router.generation_tokens.labels(model_name)
        self.cached_tokens = router.cached_tokens.labels(model_name)
        self.external_tokens = router.external_tokens.labels(model_name)
        self.time_to_first_token = router.time_to_first_token.labels(model_name)
        self.first_token_phase = OfModel(router.first_token_phase, model_name)
        self.inter_token_latency = router.inter_token_latency.labels(model_name)
        self.time_per_output_token = router.time_per_output_token.labels(model_name)
        self.decode_time = router.decode_time.labels(model_name)
        self.e2e_latency = router.e2e_latency.labels(model_name)
        self.prompt_length = router.prompt_length.labels(model_name)
        self.output_length = router.output_length.labels(model_name)
        self.dispatched = OfModel(router.dispatched, model_name)
        self.recomputed = OfModel(router.recomputed, model_name)
        self.recompute_reasons = router.recompute_reasons
        self.prefill_failures = router.prefill_failures
        self.token_mismatches = router.token_mismatches
        self.errors = router.errors

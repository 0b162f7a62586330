"""A pod's Prometheus metrics. The engine's figures are read at each scrape, so that they cost a step nothing."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.pod.stats import StatsBoard

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class PodMetrics:
    """All metrics of one pod, in a registry of their own."""

    def __init__(self, stats: StatsBoard) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineFigures(stats))
        self.request_success = Counter(
            "baton_request_success",
            "Requests that finished without an error.",
            ["finished_reason"],
            registry=self.registry,
        )
        self.request_failure = Counter(
            "baton_request_failure", "Requests that ended with an error.", ["code"], registry=self.registry
        )
        self.internal_errors = Counter(
            "baton_internal_errors", "Calls that failed for a fault of the pod's own code.", registry=self.registry
        )
        self.kernel_fallbacks = Counter(
            "baton_kernel_fallbacks",
            "CPU kernels that computed something else than torch at start, so that torch's operators are used.",
            registry=self.registry,
        )
        self.queue_time = Histogram(
            "baton_request_queue_time_seconds",
            "From arrival at the pod to first scheduled or reserved.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.prefill_time = Histogram(
            "baton_request_prefill_time_seconds",
            "From first scheduled to first token, on a prefill pod.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.handoff_time = Histogram(
            "baton_handoff_seconds",
            "From `delivered` to runnable on the decode pod.",
            buckets=_SECONDS,
            registry=self.registry,
        )
        self.handoffs = Counter(
            "baton_handoff", "Handoffs that ended, by outcome as seen by this pod.", ["outcome"], registry=self.registry
        )
        self.handoff_tokens = Counter(
            "baton_handoff_external_tokens", "Prompt tokens whose KV arrived by handoff.", registry=self.registry
        )
        self.kv_recompute = Counter(
            "baton_kv_recompute",
            "Requests whose KV was computed here instead of arriving by handoff.",
            ["reason"],
            registry=self.registry,
        )
        self.kv_failures = Counter(
            "baton_kv_failure",
            "Requests whose KV did not arrive by handoff, by outcome: recomputed, or failed if that is their policy.",
            ["reason", "outcome"],
            registry=self.registry,
        )


class _EngineFigures(Collector):
    def __init__(self, stats: StatsBoard) -> None:
        self._stats = stats

    def collect(self) -> Iterable[Metric]:
        stats = self._stats.latest
        used = stats.num_blocks - stats.num_free_blocks
        gauges: tuple[tuple[str, str, float], ...] = (
            ("num_requests_running", "Requests in the running batch.", stats.num_running),
            ("num_requests_waiting", "Requests queued.", stats.num_waiting),
            (
                "num_requests_waiting_for_remote_kv",
                "Requests whose KV is in flight.",
                stats.num_waiting_for_remote_kv,
            ),
            ("kv_cache_usage_perc", "Used KV blocks / all blocks; 1 is full.", used / max(1, stats.num_blocks)),
            ("queued_tokens", "Tokens not yet computed.", stats.num_queued_tokens),
            ("last_step_seconds", "Duration of the last step.", stats.last_step_s),
        )
        counters: tuple[tuple[str, str, int], ...] = (
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", stats.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", stats.prefix_cache_hits),
            ("tier_queries", "Tokens looked up in the tiers below the device.", stats.tier_queries),
            ("tier_hits", "Tokens restored from the tiers below the device.", stats.tier_hits),
            ("num_offloaded_blocks", "Blocks saved to the tiers below the device.", stats.num_offloaded_blocks),
            (
                "num_offload_failures",
                "Blocks that could not be saved to the tiers below the device.",
                stats.num_offload_failures,
            ),
            (
                "num_offloads_skipped",
                "Blocks not offered to the tiers below the device because too many offloads were in flight.",
                stats.num_offloads_skipped,
            ),
            ("prompt_tokens", "Prompt tokens computed here.", stats.num_prompt_tokens),
            ("generation_tokens", "Tokens generated here.", stats.num_generation_tokens),
            ("num_preemptions", "Requests that lost their blocks while running.", stats.num_preemptions),
        )
        for name, documentation, value in gauges:
            yield GaugeMetricFamily(f"baton_{name}", documentation, value)
        for name, documentation, value in counters:
            yield CounterMetricFamily(f"baton_{name}", documentation, value)

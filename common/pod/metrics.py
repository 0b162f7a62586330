"""A pod's Prometheus metrics. The engine's figures are read at each scrape, so that they cost a step nothing.

All names begin with `baton_pod_`, those of a router with `baton_router_`: no sum counts anything twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

from common.engine.messages import EngineSpec, EngineStats, PhaseSeconds
from common.observability.build_info import BuildInfo
from common.observability.metric_tables import ModelTable, metric, per_model
from common.observability.model_label import MODEL_LABEL
from common.observability.tracing.tracer import trace_span_counter
from common.pod.config import PodConfig
from common.pod.stats import StatsBoard

PREFIX = "baton_pod"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_DECODE_SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)


class PodMetrics(ModelTable):
    """All metrics of one pod, in a registry of their own."""

    request_success = per_model(
        Counter, "baton_pod_request_success", "Requests that finished without an error.", "finished_reason"
    )
    request_failure = per_model(Counter, "baton_pod_request_failure", "Requests that ended with an error.", "code")
    internal_errors = metric(
        Counter, "baton_pod_internal_errors", "Calls that failed for a fault of the pod's own code."
    )
    queue_time = per_model(
        Histogram,
        "baton_pod_request_queue_time_seconds",
        "From arrival at the pod to first scheduled or reserved.",
        buckets=_SECONDS,
    )
    prefill_time = per_model(
        Histogram,
        "baton_pod_request_prefill_time_seconds",
        "From first scheduled to first token, on a prefill pod.",
        buckets=_SECONDS,
    )
    decode_time = per_model(
        Histogram,
        "baton_pod_request_decode_time_seconds",
        "From the first token that the decode pod has to the last, of requests that finished.",
        buckets=_DECODE_SECONDS,
    )
    handoff_time = per_model(
        Histogram, "baton_pod_handoff_seconds", "From `delivered` to runnable on the decode pod.", buckets=_SECONDS
    )
    handoffs = per_model(
        Counter, "baton_pod_handoff", "Handoffs that ended, by outcome as seen by this pod.", "outcome"
    )
    handoff_tokens = per_model(
        Counter, "baton_pod_handoff_external_tokens", "Prompt tokens whose KV arrived by handoff."
    )
    kv_recompute = per_model(
        Counter,
        "baton_pod_kv_recompute",
        "Requests whose KV was computed here instead of arriving by handoff.",
        "reason",
    )
    kv_failures = per_model(
        Counter,
        "baton_pod_kv_failure",
        "Requests whose KV did not arrive by handoff, by outcome: recomputed, or failed if that is their policy.",
        "reason",
        "outcome",
    )

    def __init__(
        self, stats: StatsBoard, spec: EngineSpec, config: PodConfig, trace_spans: Counter | None = None
    ) -> None:
        """`spec` and `config` are those of the pod; what of them is a metric never changes. `trace_spans`: of its
        tracer."""
        self.registry = registry = CollectorRegistry()
        super().__init__(self.families(registry), config.model_name)
        registry.register(BuildInfo(PREFIX))
        registry.register(trace_spans or trace_span_counter(PREFIX))
        registry.register(_CacheConfig(spec, config))
        registry.register(_EngineFigures(stats, spec, config))


class _CacheConfig(Collector):
    """The KV cache as it was configured, and what computes on it."""

    def __init__(self, spec: EngineSpec, config: PodConfig) -> None:
        self._labels = {
            MODEL_LABEL: config.model_name,
            "block_size": str(spec.block_size),
            "num_blocks": str(spec.num_blocks),
            "bytes_per_block": str(spec.bytes_per_block),
            "draft_bytes_per_block": str(spec.draft_bytes_per_block),
            "enable_prefix_caching": str(config.cache.enable_prefix_caching).lower(),
            "connector": config.connector or "none",
            "dtype": spec.dtype,
            "kv_dtype": spec.layout.kv_dtype,
            "device": spec.device,
            "kernels": spec.kernels,
        }

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        family = GaugeMetricFamily(
            "baton_pod_cache_config_info", "The KV cache and the device; always 1.", labels=list(self._labels)
        )
        family.add_metric(list(self._labels.values()), 1)
        yield family


def _kv_cache_usage(stats: EngineStats) -> float:
    return (stats.num_blocks - stats.num_free_blocks) / max(1, stats.num_blocks)


_Figure = tuple[str, str, str | Callable[[EngineStats], float]]  # name, documentation, attribute or function

_GAUGES: Sequence[_Figure] = (
    ("baton_pod_num_requests_running", "Requests in the running batch.", "num_running"),
    ("baton_pod_num_requests_waiting", "Requests queued.", "num_waiting"),
    ("baton_pod_num_requests_waiting_for_remote_kv", "Requests whose KV is in flight.", "num_waiting_for_remote_kv"),
    ("baton_pod_kv_cache_usage_perc", "Used KV blocks / all blocks; 1 is full.", _kv_cache_usage),
    ("baton_pod_queued_tokens", "Tokens not yet computed.", "num_queued_tokens"),
    ("baton_pod_last_step_seconds", "Duration of the last step.", "last_step_s"),
    (
        "baton_pod_num_adapters_running",
        "LoRA adapters that requests are computed with; at most max_loras.",
        lambda stats: len(stats.running_adapters),
    ),
)
_COUNTERS: Sequence[_Figure] = (
    ("baton_pod_prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_cache_queries"),
    ("baton_pod_prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_cache_hits"),
    ("baton_pod_tier_queries", "Tokens looked up in the tiers below the device.", "tier_queries"),
    ("baton_pod_tier_hits", "Tokens restored from the tiers below the device.", "tier_hits"),
    ("baton_pod_num_offloaded_blocks", "Blocks saved to the tiers below the device.", "num_offloaded_blocks"),
    (
        "baton_pod_num_offload_failures",
        "Blocks that could not be saved to the tiers below the device.",
        "num_offload_failures",
    ),
    (
        "baton_pod_num_offloads_skipped",
        "Blocks not offered to the tiers below the device because too many offloads were in flight.",
        "num_offloads_skipped",
    ),
    ("baton_pod_prompt_tokens", "Prompt tokens computed here.", "num_prompt_tokens"),
    ("baton_pod_generation_tokens", "Tokens generated here.", "num_generation_tokens"),
    ("baton_pod_num_preemptions", "Requests that lost their blocks while running.", "num_preemptions"),
    (
        "baton_pod_num_late_masks",
        "Tokens that waited for another step because the mask of the request's grammar was not there.",
        "num_late_masks",
    ),
    (
        "baton_pod_num_slow_grammars",
        "Requests that ended because following their grammar takes too long.",
        "num_slow_grammars",
    ),
    ("baton_pod_drafts_proposed", "Tokens that the proposer guessed.", "drafts.num_proposed"),
    ("baton_pod_drafts_verified", "Of these, computed beside the requests' next tokens.", "drafts.num_verified"),
    ("baton_pod_drafts_accepted", "Of these, those that were right: tokens of outputs.", "drafts.num_accepted"),
    (
        "baton_pod_draft_verifications",
        "Steps of requests that verified drafts; each gives a token more than were accepted.",
        "drafts.num_verifications",
    ),
    ("baton_pod_draft_steps", "Steps in which any request verified drafts.", "drafts.num_steps"),
    (
        "baton_pod_draft_prompt_tokens",
        "Tokens that the draft model computed before it could propose, such as prompts that were handed over.",
        "drafts.num_caught_up",
    ),
    (
        "baton_pod_head_unseen_tokens",
        "Tokens that a head does without, as these or later ones were computed by a pod without this head.",
        "drafts.num_unseen",
    ),
)


class _EngineFigures(Collector):
    """The figures of the pod's engines. Those of several have the label `engine`, its number."""

    def __init__(self, stats: StatsBoard, spec: EngineSpec, config: PodConfig) -> None:
        self._stats = stats
        self._labels = [MODEL_LABEL]
        self._of_engines = [[config.model_name]]
        if spec.data_parallel_size > 1:
            self._labels += ["engine"]
            self._of_engines = [[config.model_name, str(rank)] for rank in range(spec.data_parallel_size)]
        self._connector = config.connector or "none"
        self._bytes_per_block = spec.bytes_per_whole_block
        self._kernels_failed = spec.kernels_failed

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        yield from self._figures(GaugeMetricFamily, _GAUGES)
        yield from self._figures(CounterMetricFamily, _COUNTERS)
        yield from self._drafts()
        yield self._kernel_fallbacks()
        yield from self._steps()
        yield from self._transfers()
        yield from self._ranks()

    def _by_engine(self) -> list[tuple[list[str], EngineStats]]:
        """Values of the labels, and the figures."""
        return list(zip(self._of_engines, self._stats.by_engine, strict=True))

    def _figures(
        self, kind: type[GaugeMetricFamily] | type[CounterMetricFamily], figures: Sequence[_Figure]
    ) -> Iterator[Metric]:
        for name, documentation, source in figures:
            value = attrgetter(source) if isinstance(source, str) else source
            family = kind(name, documentation, labels=self._labels)
            for labels, stats in self._by_engine():
                family.add_metric(labels, value(stats))
            yield family

    def _drafts(self) -> Iterator[Metric]:
        """Nothing by position or reason where there was none."""
        fallen = GaugeMetricFamily(
            "baton_pod_draft_acceptance_fallen",
            "1: of the drafts of the last minutes, less than half as many were right as in the hour before.",
            labels=self._labels,
        )
        for labels, drift in zip(self._of_engines, self._stats.drifts, strict=True):
            fallen.add_metric(labels, drift.has_fallen)
        yield fallen
        accepted = CounterMetricFamily(
            "baton_pod_drafts_accepted_per_position",
            "Accepted drafts by their place among those of a request and step, from 0; 15 counts later ones too.",
            labels=[*self._labels, "position"],
        )
        failures = CounterMetricFamily(
            "baton_pod_proposer_failures",
            "Steps whose proposer failed, so that the next had no drafts.",
            labels=[*self._labels, "reason"],
        )
        for labels, stats in self._by_engine():
            for position, count in enumerate(stats.drafts.accepted_by_position):
                accepted.add_metric([*labels, str(position)], count)
            for reason, count in stats.drafts.failures.items():
                failures.add_metric([*labels, reason], count)
        yield accepted
        yield failures

    def _kernel_fallbacks(self) -> Metric:
        family = CounterMetricFamily(
            "baton_pod_kernel_fallbacks",
            "Self-checks that failed: of compiled kernels at start (kernel), after which torch's operators are used, "
            "or of a recorded decode step (recorded_step), after which decode steps run kernel by kernel.",
            labels=[*self._labels, "check"],
        )
        for labels, stats in self._by_engine():
            family.add_metric([*labels, "kernel"], self._kernels_failed)
            family.add_metric([*labels, "recorded_step"], stats.num_failed_recordings)
        return family

    def _steps(self) -> Iterator[Metric]:
        names = [*self._labels, "kind"]
        seconds = SummaryMetricFamily(
            "baton_pod_step_seconds",
            "Duration of steps that computed prompts (prefill), tokens of running requests (decode), or both (mixed).",
            labels=names,
        )
        tokens = SummaryMetricFamily("baton_pod_step_tokens", "Tokens per step, by the same kinds.", labels=names)
        for labels, stats in self._by_engine():
            kinds = (("prefill", stats.prefill_steps), ("decode", stats.decode_steps), ("mixed", stats.mixed_steps))
            for kind, steps in kinds:
                seconds.add_metric([*labels, kind], steps.num_steps, steps.seconds)
                tokens.add_metric([*labels, kind], steps.num_steps, steps.num_tokens)
        yield seconds
        yield tokens
        yield self._phases()

    def _phases(self) -> Metric:
        family = CounterMetricFamily(
            "baton_pod_step_phase_seconds",
            "Time of the engine's step loop, by what it did; the phases add up to the time for which it has run.",
            labels=[*self._labels, "phase"],
        )
        for labels, phases in zip(self._of_engines, self._stats.phases, strict=True):
            for phase in PhaseSeconds.__struct_fields__:
                family.add_metric([*labels, phase], getattr(phases, phase))
        return family

    def _ranks(self) -> Iterator[Metric]:
        """Nothing where there is one rank."""
        seconds = CounterMetricFamily(
            "baton_pod_rank_step_seconds",
            "Time of the steps of each of several ranks: on a core (computing), without one though it could go on "
            "(delayed), asleep until others had come as far (waiting).",
            labels=[*self._labels, "rank", "state"],
        )
        memory = GaugeMetricFamily(
            "baton_pod_rank_resident_bytes",
            "Host memory of the process of each of several ranks.",
            labels=[*self._labels, "rank"],
        )
        for labels, each in ((labels, rank) for labels, stats in self._by_engine() for rank in stats.ranks):
            names = [*labels, str(each.rank)]
            states = (("computing", each.computing_s), ("delayed", each.delayed_s), ("waiting", each.waiting_s))
            for state, value in states:
                seconds.add_metric([*names, state], value)
            memory.add_metric(names, each.resident_bytes)
        yield seconds
        yield memory

    def _transfers(self) -> Iterator[Metric]:
        names = [*self._labels, "connector", "direction"]
        seconds = SummaryMetricFamily(
            "baton_pod_kv_transfer_seconds",
            "Duration of KV transfers: save and load of handoffs, offload and restore of tiers.",
            labels=names,
        )
        moved = CounterMetricFamily("baton_pod_kv_transfer_bytes", "Bytes of KV that they moved.", labels=names)
        failed = CounterMetricFamily(
            "baton_pod_kv_transfer_failures", "Those that did not move all their blocks.", labels=names
        )
        for labels, stats in self._by_engine():
            directions = (
                ("save", stats.saves),
                ("load", stats.loads),
                ("offload", stats.offloads),
                ("restore", stats.restores),
            )
            for direction, transfers in directions:
                values = [*labels, self._connector, direction]
                seconds.add_metric(values, transfers.num_transfers, transfers.seconds)
                moved.add_metric(values, transfers.num_blocks * self._bytes_per_block)
                failed.add_metric(values, transfers.num_failed)
        yield seconds
        yield moved
        yield failed

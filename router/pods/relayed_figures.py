"""The figures that pods report of themselves, as metrics of the router: one scrape of it shows the whole cluster.

The names begin with `baton_router_pod_`, unlike those that pods export themselves, so a Prometheus that scrapes both
counts nothing twice. The series are those of the pods that are connected: a pod that goes takes its own along.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common.observability.model_label import MODEL_LABEL
from common.pb import pods_pb2
from router.pods.pod import Pod

_LABELS = ("role", "address", MODEL_LABEL)
_MAX_WORD_CHARS = 64  # of what a pod says of itself
_PHASES = tuple(field.name for field in pods_pb2.PhaseSeconds.DESCRIPTOR.fields)


class _Figure(NamedTuple):
    name: str
    documentation: str
    value: Callable[[pods_pb2.PodStats], float]


_GAUGES = (
    _Figure("baton_router_pod_num_requests_running", "Requests in the pod's running batch.", attrgetter("num_running")),
    _Figure("baton_router_pod_num_requests_waiting", "Requests queued on the pod.", attrgetter("num_waiting")),
    _Figure(
        "baton_router_pod_num_requests_waiting_for_remote_kv",
        "Requests of the pod whose KV is in flight.",
        attrgetter("num_waiting_for_remote_kv"),
    ),
    _Figure(
        "baton_router_pod_kv_cache_usage_perc",
        "Used KV blocks / all blocks of the pod; 1 is full.",
        lambda stats: (stats.num_blocks - min(stats.num_free_blocks, stats.num_blocks)) / max(1, stats.num_blocks),
    ),
    _Figure("baton_router_pod_queued_tokens", "Tokens not yet computed on the pod.", attrgetter("num_queued_tokens")),
    _Figure(
        "baton_router_pod_last_step_seconds",
        "Duration of the pod's last step.",
        lambda stats: _finite(stats.last_step_s),
    ),
)
_COUNTERS = (
    _Figure(
        "baton_router_pod_num_preemptions",
        "Requests that lost their blocks while running.",
        attrgetter("num_preemptions"),
    ),
    _Figure("baton_router_pod_prompt_tokens", "Prompt tokens computed on the pod.", attrgetter("num_prompt_tokens")),
    _Figure("baton_router_pod_generation_tokens", "Tokens generated on the pod.", attrgetter("num_generation_tokens")),
    _Figure(
        "baton_router_pod_prefix_cache_queries",
        "Prompt tokens looked up in the pod's prefix cache.",
        attrgetter("prefix_cache_queries"),
    ),
    _Figure(
        "baton_router_pod_prefix_cache_hits",
        "Prompt tokens found in the pod's prefix cache.",
        attrgetter("prefix_cache_hits"),
    ),
    _Figure(
        "baton_router_pod_drafts_verified",
        "Drafts that the pod computed beside the requests' next tokens.",
        attrgetter("drafts.num_verified"),
    ),
    _Figure(
        "baton_router_pod_drafts_accepted",
        "Of these, those that were right: tokens of outputs.",
        attrgetter("drafts.num_accepted"),
    ),
    _Figure(
        "baton_router_pod_draft_verifications",
        "Steps of the pod's requests that verified drafts; each gives a token more than were accepted.",
        attrgetter("drafts.num_verifications"),
    ),
    _Figure(
        "baton_router_pod_kv_saved_bytes",
        "Bytes of KV that the pod has put into the connector for other pods.",
        attrgetter("kv_bytes_saved"),
    ),
    _Figure(
        "baton_router_pod_kv_loaded_bytes",
        "Bytes of KV of other pods that the pod has taken out of the connector.",
        attrgetter("kv_bytes_loaded"),
    ),
)


class RelayedFigures(Collector):
    """Reads the pods' last reports at each scrape; costs nothing else."""

    def __init__(self, pods: Callable[[], list[Pod]]) -> None:
        self._pods = pods

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        reports = [(_labels(pod), pod.stats) for pod in self._pods() if pod.stats is not None]
        for kind, figures in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
            for figure in figures:
                family = kind(figure.name, figure.documentation, labels=_LABELS)
                for labels, stats in reports:
                    family.add_metric(labels, figure.value(stats))
                yield family
        yield self._phases(reports)
        yield self._info()

    def _phases(self, reports: list[tuple[list[str], pods_pb2.PodStats]]) -> Metric:
        family = CounterMetricFamily(
            "baton_router_pod_step_phase_seconds",
            "Time of the step loop of the pod's engine, by what it did.",
            labels=[*_LABELS, "phase"],
        )
        for labels, stats in reports:
            for phase in _PHASES:
                family.add_metric([*labels, phase], _finite(getattr(stats.phases, phase)))
        return family

    def _info(self) -> Metric:
        family = GaugeMetricFamily(
            "baton_router_pod_info",
            "What the pod is; always 1.",
            labels=[*_LABELS, "pod_id", "version", "connector", "num_blocks", "block_size"],
        )
        for pod in self._pods():
            if (info := pod.info) is not None:
                words = [word[:_MAX_WORD_CHARS] for word in (info.pod_id, info.version, info.connector)]
                family.add_metric([*_labels(pod), *words, str(info.num_blocks), str(info.block_size)], 1)
        return family


def _finite(seconds: float) -> float:
    """0 for what no clock shows."""
    return seconds if 0 <= seconds < math.inf else 0.0


def _labels(pod: Pod) -> list[str]:
    """The model is the first name of the served one, whatever the pod calls it."""
    return [pod.role_name, pod.address, next(iter(pod.model_names), "")]

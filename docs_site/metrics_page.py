"""Writes docs/metrics.md from the registries of router and pods: `make reference`, or this as a program."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from common.engine.contract.layout import KVLayout
from common.engine.messages import EngineSpec, EngineStats
from common.observability.loop_figures import LoopFigures
from common.pod.config import PodConfig
from common.pod.metrics import PodMetrics
from common.pod.stats import StatsBoard
from router.metrics import RouterMetrics, WorkerMetrics
from router.placing.index import PrefixIndex
from router.placing.index_metrics import IndexMetrics
from router.pods.relayed_figures import RelayedFigures

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
VLLM_NAMES = {
    "baton_pod_cache_config_info": "vllm:cache_config_info",
    "baton_pod_draft_verifications_total": "vllm:spec_decode_num_drafts_total",
    "baton_pod_drafts_accepted_per_position_total": "vllm:spec_decode_num_accepted_tokens_per_pos_total",
    "baton_pod_drafts_accepted_total": "vllm:spec_decode_num_accepted_tokens_total",
    "baton_pod_drafts_verified_total": "vllm:spec_decode_num_draft_tokens_total",
    "baton_pod_generation_tokens_total": "vllm:generation_tokens_total",
    "baton_pod_kv_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "baton_pod_kv_transfer_bytes_total": "vllm:nixl_bytes_transferred",
    "baton_pod_kv_transfer_failures_total": "vllm:nixl_num_failed_transfers",
    "baton_pod_kv_transfer_seconds": "vllm:nixl_xfer_time_seconds",
    "baton_pod_num_preemptions_total": "vllm:num_preemptions_total",
    "baton_pod_num_requests_running": "vllm:num_requests_running",
    "baton_pod_num_requests_waiting": "vllm:num_requests_waiting",
    "baton_pod_prefix_cache_hits_total": "vllm:prefix_cache_hits_total",
    "baton_pod_prefix_cache_queries_total": "vllm:prefix_cache_queries_total",
    "baton_pod_prompt_tokens_total": "vllm:prompt_tokens_total",
    "baton_pod_request_decode_time_seconds": "vllm:request_decode_time_seconds",
    "baton_pod_request_prefill_time_seconds": "vllm:request_prefill_time_seconds",
    "baton_pod_request_queue_time_seconds": "vllm:request_queue_time_seconds",
    "baton_pod_request_success_total": "vllm:request_success_total",
    "baton_pod_step_tokens": "vllm:iteration_tokens_total",
    "baton_pod_tier_hits_total": "vllm:external_prefix_cache_hits_total",
    "baton_pod_tier_queries_total": "vllm:external_prefix_cache_queries_total",
    "baton_router_e2e_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "baton_router_generation_tokens_total": "vllm:generation_tokens_total",
    "baton_router_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "baton_router_pod_generation_tokens_total": "vllm:generation_tokens_total",
    "baton_router_pod_kv_cache_usage_perc": "vllm:kv_cache_usage_perc",
    "baton_router_pod_num_preemptions_total": "vllm:num_preemptions_total",
    "baton_router_pod_num_requests_running": "vllm:num_requests_running",
    "baton_router_pod_num_requests_waiting": "vllm:num_requests_waiting",
    "baton_router_pod_prefix_cache_hits_total": "vllm:prefix_cache_hits_total",
    "baton_router_pod_prefix_cache_queries_total": "vllm:prefix_cache_queries_total",
    "baton_router_pod_prompt_tokens_total": "vllm:prompt_tokens_total",
    "baton_router_prompt_tokens_total": "vllm:prompt_tokens_total",
    "baton_router_request_decode_time_seconds": "vllm:request_decode_time_seconds",
    "baton_router_request_generation_tokens": "vllm:request_generation_tokens",
    "baton_router_request_prompt_tokens": "vllm:request_prompt_tokens",
    "baton_router_request_success_total": "vllm:request_success_total",
    "baton_router_time_per_output_token_seconds": "vllm:request_time_per_output_token_seconds",
    "baton_router_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
}
"""Metrics of vLLM with the same meaning."""

_INTRODUCTION = """\
# Metrics

Written by `make reference` from the code; a test holds it to that. [observability.md](observability.md) says what to
watch.

Names are those of a scrape. A histogram has `_bucket`, `_sum` and `_count` behind its name, a summary `_sum` and
`_count`. The last column has the metric of vLLM that means the same, for dashboards that are to be moved.

A name begins with the process that exports it: `baton_router_` or `baton_pod_`. So a sum over one name never counts
anything twice, however many routers and pods one Prometheus scrapes.
"""
_ROUTER = """\
## Router

At `/metrics` of its HTTP port. With API keys, an operator's key is needed, unless `metrics_need_key` is off.

`baton_router_pod_*` are figures of pods: those the router keeps itself, and those that the pods last reported to it, so
that one scrape of a router shows its cluster. They are there while the pod is connected. Each router of several has
them all: take `max by (role, address)` of them before a sum.
"""
_WORKERS = """\
With [several workers](workers.md), all these are one answer for all of them, and there are:
"""
_PODS = """\
## Pods

At `/metrics` of `metrics_port`, which is off by default. Prefill and decode pods have the same metrics. The values
`reason` of handoffs are those of [When KV does not come](kv.md#when-kv-does-not-come).
"""
_END = """\
The router also has the `process_*` metrics of Prometheus' clients: CPU time, resident memory, open files.
"""


class MetricRow(NamedTuple):
    """One metric as a scrape shows it."""

    name: str
    kind: str
    labels: tuple[str, ...]
    text: str


def page() -> str:
    """The whole page."""
    return "\n".join(
        [
            *(_INTRODUCTION, _ROUTER, _table(router_metrics()), _END),
            *(_WORKERS, _table(worker_metrics())),
            *(_PODS, _table(pod_metrics())),
        ],
    )


def router_metrics() -> list[MetricRow]:
    """Returns the metrics of a router, without those of its process."""
    metrics = RouterMetrics()
    metrics.generations.of("model")
    metrics.queues.of("model")
    metrics.registry.register(IndexMetrics(PrefixIndex(max_holdings=1)))
    metrics.registry.register(RelayedFigures(list))
    rows = _rows_and_loop(metrics.registry, "baton_router")
    return [row for row in rows if not row.name.startswith("process_")]


def worker_metrics() -> list[MetricRow]:
    """Returns the metrics that a router has only if it has several workers."""
    registry = CollectorRegistry()
    WorkerMetrics(registry)
    return list(_rows(registry))


def pod_metrics() -> list[MetricRow]:
    """Returns the metrics of a pod."""
    return list(_rows_and_loop(sample_pod_metrics().registry, "baton_pod"))


def sample_pod_metrics() -> PodMetrics:
    """The metrics of a pod that has done nothing."""
    return PodMetrics(StatsBoard(EngineStats()), sample_pod_spec(), PodConfig())


def sample_pod_spec() -> EngineSpec:
    """Facts of a small engine."""
    return EngineSpec(
        fingerprint=b"",
        layout=KVLayout(16, ()),
        num_blocks=1,
        max_model_len=1,
        vocab_size=1,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        device="cpu",
        dtype="float32",
        bytes_per_block=1,
    )


def _rows_and_loop(registry: CollectorRegistry, prefix: str) -> Iterator[MetricRow]:
    """Yields the metrics of the registry and those of an event loop."""
    loop = asyncio.new_event_loop()
    try:
        registry.register(LoopFigures(prefix, loop))
        yield from _rows(registry)
    finally:
        loop.close()


def _rows(registry: CollectorRegistry) -> Iterator[MetricRow]:
    for family in sorted(registry.collect(), key=lambda family: family.name):
        collector = registry._names_to_collectors.get(family.name)  # noqa: SLF001  (nothing else has the labels)
        labels = getattr(collector, "_labelnames", ()) or getattr(family, "_labelnames", ())
        suffix = "_total" if family.type == "counter" else ""
        yield MetricRow(family.name + suffix, family.type, tuple(labels), family.documentation)


def _table(rows: Iterable[MetricRow]) -> str:
    lines = ["| metric | type | labels | what it says | of vLLM |", "|---|---|---|---|---|"]
    for row in rows:
        labels = ", ".join(f"`{label}`" for label in row.labels)
        vllm = f"`{VLLM_NAMES[row.name]}`" if row.name in VLLM_NAMES else ""
        lines.append(f"| `{row.name}` | {row.kind} | {labels} | {row.text} | {vllm} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())

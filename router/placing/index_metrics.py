"""Metrics of the prefix index."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from router.placing.index import PrefixIndex


class IndexMetrics(Collector):
    """Reads the index when it is asked; costs nothing else."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        size = self._index.size
        blocks = GaugeMetricFamily(
            "baton_router_prefix_index_blocks",
            "Blocks that pods are known to hold: pairs of block and pod, remembered or beyond max_index_blocks.",
            labels=["state"],
        )
        blocks.add_metric(["remembered"], size.num_holdings)
        blocks.add_metric(["beyond"], size.num_unindexed)
        yield blocks
        yield CounterMetricFamily(
            "baton_router_prefix_index_gaps",
            "KV events that did not follow on the last ones of their pod, which was asked for a snapshot.",
            value=self._index.num_gaps,
        )

"""The state of a process's event loop: how late it runs timers, and how many tasks it has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from common.observability.local_histogram import LocalHistogram

_INTERVAL_S = 0.5
_LAGS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class LoopFigures(Collector):
    """The figures of one event loop. `start` on the loop, `stop` once it ends. Scrapes may come from any thread."""

    def __init__(self, prefix: str, loop: asyncio.AbstractEventLoop) -> None:
        """`prefix` begins the metrics' names: "baton_router", "baton_pod"."""
        self._prefix = prefix
        self._loop = loop
        self._lag = LocalHistogram(_LAGS_S)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begins to measure the lag, twice a second."""
        self._timer = self._loop.call_later(_INTERVAL_S, self._measure, self._loop.time() + _INTERVAL_S)

    def stop(self) -> None:
        """Ends it. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()

    def collect(self) -> Iterator[Metric]:
        """See Collector. A number of tasks that grows without load is a leak."""
        count = len(asyncio.all_tasks(self._loop))
        yield GaugeMetricFamily(f"{self._prefix}_num_asyncio_tasks", "Unfinished tasks of the event loop.", value=count)
        lag = HistogramMetricFamily(
            f"{self._prefix}_event_loop_lag_seconds",
            "How late the event loop ran a timer, measured twice a second: what every stream waits for as well.",
        )
        lag.add_metric([], self._lag.buckets(), self._lag.sum)
        yield lag

    def _measure(self, due_at: float) -> None:
        self._lag.observe(max(0.0, self._loop.time() - due_at))
        self.start()

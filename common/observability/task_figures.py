"""Exports the number of asyncio tasks of a process; one that grows without load is a leak."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector


class TaskFigures(Collector):
    """Counts the unfinished tasks of one event loop at each scrape. Thread-safe."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        """The current number."""
        count = len(asyncio.all_tasks(self._loop))
        yield GaugeMetricFamily("baton_num_asyncio_tasks", "Unfinished tasks of the event loop.", value=count)

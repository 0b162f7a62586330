"""Which code a process runs, as a metric whose value is always 1."""

from __future__ import annotations

import platform
from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from common import __version__


class BuildInfo(Collector):
    """The versions of Baton and Python."""

    def __init__(self, prefix: str) -> None:
        """`prefix` begins the metric's name: "baton_router", "baton_pod"."""
        self._name = f"{prefix}_build_info"

    def collect(self) -> Iterator[Metric]:
        """See Collector."""
        family = GaugeMetricFamily(self._name, "Version of the process; always 1.", labels=["version", "python"])
        family.add_metric([__version__, platform.python_version()], 1)
        yield family

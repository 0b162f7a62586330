"""Prometheus metrics of the processes of a cluster."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping

import httpx
import psutil

from tests.e2e.cluster import SETTLE_DEADLINE_S, Cluster

_MODEL = re.compile(r'\{model_name="[^"]*"\}')


class Metrics:
    """Figures of one process, read when asked for."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None, *, kind: str = "router") -> None:
        """`kind`: of the process, "router" or "pod"."""
        self._prefix = f"baton_{kind}_"
        self.url = url
        self._headers = headers

    def __getitem__(self, name: str) -> float:
        """The counter or gauge baton_<kind>_<name>."""
        for line in httpx.get(self.url, headers=self._headers).raise_for_status().text.splitlines():
            figure = _MODEL.sub("", line)
            if figure.startswith((f"{self._prefix}{name} ", f"{self._prefix}{name}_total ")):
                return float(line.rpartition(" ")[2])
        raise KeyError(name)

    async def until(self, name: str, at_least: float) -> None:
        """Returns once the figure has come to `at_least`."""
        async with asyncio.timeout(SETTLE_DEADLINE_S):
            while await asyncio.to_thread(self.__getitem__, name) < at_least:  # noqa: ASYNC110
                await asyncio.sleep(0.05)


def pod_metrics(cluster: Cluster, name: str) -> Metrics:
    """Returns the metrics of a pod that has a `metrics_port`."""
    process = psutil.Process(cluster.pid_of(name))
    listening = [each.laddr.port for each in process.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
    grpc_port = int(cluster.addresses[name].rpartition(":")[2])
    (port,) = [port for port in listening if port != grpc_port]
    return Metrics(f"http://127.0.0.1:{port}/metrics", kind="pod")

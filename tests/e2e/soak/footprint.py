"""Memory, file descriptors, threads and tasks of each process of an idle cluster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import psutil

from tests.e2e.cluster import Cluster
from tests.e2e.metrics import Metrics, pod_metrics

WARM_UP = 2000  # requests
MAX_GROWTH = 0.10  # of resident memory
NUM_SPARE = 4  # file descriptors, threads or tasks, as connections come and go
_MIB = 1 << 20


class Usage(NamedTuple):
    """Resources of one process."""

    resident_mib: float
    num_descriptors: int
    num_threads: int
    num_tasks: int | None  # of its event loop; None: it has none

    def __str__(self) -> str:
        tasks = "" if self.num_tasks is None else f" / {self.num_tasks}"
        return f"{self.resident_mib:.0f} / {self.num_descriptors} / {self.num_threads}{tasks}"


class Sample(NamedTuple):
    """Resources of all processes, by name, after so many requests."""

    num_requests: int
    usages: dict[str, Usage]


def read_sample(cluster: Cluster, num_requests: int, operator: Mapping[str, str]) -> Sample:
    """Raises AssertionError if a pod is not sound, or holds a request, a block or a transfer. `operator`: headers of
    one who may read the router's metrics."""
    cluster.check_integrity()
    router = Metrics(f"{cluster.url}/metrics", operator)
    usages = {"router": _usage(psutil.Process(cluster.pid_of("router")), router)}
    for name in cluster.addresses:
        front = psutil.Process(cluster.pid_of(name))
        (engine,) = front.children()
        usages[name], usages[f"{name} engine"] = _usage(front, pod_metrics(cluster, name)), _usage(engine)
    return Sample(num_requests, usages)


def baseline_of(samples: Sequence[Sample]) -> Sample:
    """The first sample after the warm-up: by then every cache and pool has been filled once."""
    warm_up = min(WARM_UP, samples[-1].num_requests // 2)
    return next(sample for sample in samples if sample.num_requests >= warm_up)


def growth_problems(baseline: Sample, last: Sample) -> list[str]:
    """Processes that hold more in the end than they did at the baseline."""
    problems = []
    for name, before in baseline.usages.items():
        after = last.usages[name]
        if after.resident_mib > before.resident_mib * (1 + MAX_GROWTH):
            problems.append(f"{name}: {before.resident_mib:.0f} MiB grew to {after.resident_mib:.0f} MiB")
        counts = (
            ("file descriptors", before.num_descriptors, after.num_descriptors),
            ("threads", before.num_threads, after.num_threads),
            ("tasks", before.num_tasks or 0, after.num_tasks or 0),
        )
        problems += [f"{name}: {old} {what} became {new}" for what, old, new in counts if new > old + NUM_SPARE]
    return problems


def _usage(process: psutil.Process, metrics: Metrics | None = None) -> Usage:
    num_tasks = None if metrics is None else int(metrics["num_asyncio_tasks"])
    with process.oneshot():
        return Usage(process.memory_info().rss / _MIB, process.num_fds(), process.num_threads(), num_tasks)
